"""The part of a model that one rank has.

    tensor parallel     a rank has some heads and some of the inner columns of each MLP. The matrices that compute these
                        (qkv, up) are split by rows, those that read them (o, down) by columns, and the results of
                        matrices that are split by columns are summed over the ranks
    pipeline parallel   a rank has some consecutive layers. Hidden states go from rank to rank

Embeddings, head, routers, norms and the latents of latent attention are replicated on each rank. Pure: descriptions and
indices, no communication. Called by the parameter reader and the workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription, LatentAttention
from antiphon.services.engine.models.kv_groups import freeing_windows, slabs_of
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.distributed.world import check_division
from antiphon.shared.flags import SettingsError

_TP, _PP = "--tensor-parallel-size", "--pipeline-parallel-size"
_MIXED_ROWS = frozenset({"mix_in", "mix_gate", "mix_step"})
_ROWS = _MIXED_ROWS | {"qkv", "attention_gate", "q_up", "latent_up", "up", "shared.up", "experts.up"}
_COLUMNS = frozenset({"o", "mix_out", "mix_select", "down", "shared.down", "experts.down"})


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place among `tp_size` * `pp_size` ranks. The default is a single rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @staticmethod
    def of_rank(rank: int, tp_size: int, pp_size: int) -> "Shard":
        """Returns the shard of a rank. The ranks of a pipeline stage have consecutive numbers."""
        return Shard(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        """Number of this rank among all."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size

    def layers(self, num_layers: int) -> range:
        """Returns the layers of this rank's pipeline stage.

        If the number is not divisible, earlier stages get one more.
        """
        each, more = divmod(num_layers, self.pp_size)
        first = self.pp_rank * each + min(self.pp_rank, more)
        return range(first, first + each + (self.pp_rank < more))


ALONE = Shard()


def local_description(d: DecoderDescription, shard: Shard) -> DecoderDescription:
    """Returns the description of a rank's decoder. Raises SettingsError if the model cannot be divided."""
    if shard == ALONE:
        return d
    _check(d, shard)
    layers, n = shard.layers(d.num_layers), shard.tp_size
    experts = None
    if d.experts is not None:
        kept = frozenset(layer - layers.start for layer in d.experts.layers if layer in layers)
        experts = replace(
            d.experts,
            layers=kept,
            intermediate_size=d.experts.intermediate_size // n,
            shared_intermediate_size=d.experts.shared_intermediate_size // n,
        )
    recurrent = d.recurrent
    if recurrent is not None:
        kept = frozenset(layer - layers.start for layer in recurrent.layers if layer in layers)
        recurrent = recurrent.among(n, kept)
    heads = tuple((max(1, count // n), width) for count, width in d.layer_kv_heads[layers.start : layers.stop])
    own = [layer - layers.start for layer in d.attention_layers if layer in layers]
    local = replace(
        d,
        recurrent=recurrent,
        num_layers=len(layers),
        num_heads=max(1, d.num_heads // n),
        layer_heads=tuple(count // n for count in d.layer_heads[layers.start : layers.stop]),
        num_kv_heads=max(1, d.num_kv_heads // n),
        intermediate_size=d.intermediate_size // n,
        layer_inner=tuple(size // n for size in d.layer_inner[layers.start : layers.stop]),
        layer_kv_heads=heads,
        kv_slabs=slabs_of(heads, own) if d.kv_slabs else (),
        keys_as_values=frozenset(layer - layers.start for layer in d.keys_as_values if layer in layers),
        # The scale of attention scores depends on the head size, which does not change.
        sliding_windows=d.sliding_windows[layers.start : layers.stop],
        experts=experts,
        unrotated_layers=frozenset(layer - layers.start for layer in d.unrotated_layers if layer in layers),
        without_mlp=frozenset(layer - layers.start for layer in d.without_mlp if layer in layers),
        kv_groups=(),
    )
    # Pipeline stages have the same numbers of blocks, but layers and so groups of their own.
    return freeing_windows(local) if d.kv_groups and shard.pp_size == 1 else local


def sharded(
    name: str, weight: "Tensor | QuantizedWeight", d: DecoderDescription, shard: Shard
) -> "Tensor | QuantizedWeight":
    """Returns a rank's part of a matrix [out, in] with the name that it has within its layer, such as `qkv`.

    `d` describes the whole model. Matrices without such a name are replicated on each rank.
    """
    if shard.tp_size == 1:
        return weight
    rows = rows_of(name, d, shard)
    if rows is not None:
        return (
            weight.rows(rows) if isinstance(weight, QuantizedWeight) else weight.index_select(0, rows.to(weight.device))
        )
    columns = columns_of(name, weight.shape[1], shard)
    if columns is None:
        return weight
    if isinstance(weight, QuantizedWeight):
        return weight.columns(columns.start, columns.stop)
    return weight[:, columns].contiguous()


def rows_of(name: str, d: DecoderDescription, shard: Shard) -> Tensor | None:
    """Returns a rank's rows, sorted, of a matrix that is split by rows; None for other matrices, and with one rank."""
    return _rows(name, d, shard) if shard.tp_size > 1 and _loses_rows(name, d) else None


def columns_of(name: str, num_columns: int, shard: Shard) -> slice | None:
    """Returns a rank's columns of a matrix that is split by columns; None for other matrices, and with one rank."""
    if shard.tp_size == 1 or name not in _COLUMNS:
        return None
    each = num_columns // shard.tp_size
    return slice(shard.tp_rank * each, (shard.tp_rank + 1) * each)


def sharded_bias(name: str, bias: Tensor, d: DecoderDescription, shard: Shard) -> Tensor:
    """Returns a rank's part of a matrix's bias; for matrices whose results are summed, the whole bias."""
    if shard.tp_size == 1 or not _loses_rows(name, d):
        return bias
    return bias.index_select(0, _rows(name, d, shard).to(bias.device))


def is_summed(name: str, shard: Shard) -> bool:
    """Whether the results of the matrix of that name must be summed over the ranks of a stage."""
    return shard.tp_size > 1 and name in _COLUMNS


def local_heads(d: DecoderDescription, shard: Shard) -> slice:
    """Returns the query heads of the whole model that a rank has."""
    each = d.num_heads // shard.tp_size
    return slice(shard.tp_rank * each, (shard.tp_rank + 1) * each)


def local_kv_heads(d: DecoderDescription, shard: Shard) -> range:
    """Returns the key-value heads of the whole model that a rank has. Ranks share heads if there are too few."""
    first = shard.tp_rank * d.num_kv_heads // shard.tp_size
    return range(first, first + max(1, d.num_kv_heads // shard.tp_size))


def _loses_rows(name: str, d: DecoderDescription) -> bool:
    """Whether a matrix is split by rows. The matrices that compute latents are replicated on each rank."""
    return name in _ROWS and not (name == "qkv" and d.latent is not None and d.latent.query_rank)


def _rows(name: str, d: DecoderDescription, shard: Shard) -> Tensor:
    if d.latent is not None and name in ("qkv", "q_up", "latent_up"):
        return _latent_rows(name, d, d.latent, shard)
    if name == "qkv":
        return _qkv_rows(d, shard)
    if name in _MIXED_ROWS:
        assert d.recurrent is not None
        gates = [d.recurrent.num_gates // 2] * 2
        heights = {"mix_in": d.recurrent.in_widths, "mix_gate": gates, "mix_step": [d.recurrent.channels]}
        return _parts(heights[name], shard)
    if name == "attention_gate":
        return _parts([d.gate_size], shard)
    if name == "experts.up":
        assert d.experts is not None
        return _parts([d.experts.intermediate_size] * ((2 if d.gated_mlp else 1) * d.experts.num_experts), shard)
    inner = d.experts.shared_intermediate_size if name == "shared.up" and d.experts else d.intermediate_size
    return _parts([inner] * (2 if d.gated_mlp else 1), shard)


def _parts(heights: Sequence[int], shard: Shard) -> Tensor:
    """Returns the rows of this rank if each of the stacked parts is split over the ranks."""
    found: list[Tensor] = []
    start = 0
    for height in heights:
        each = height // shard.tp_size
        found.append(torch.arange(start + shard.tp_rank * each, start + (shard.tp_rank + 1) * each))
        start += height
    return torch.cat(found)


def _qkv_rows(d: DecoderDescription, shard: Shard) -> Tensor:
    """Returns the rows of this rank's query, key and value heads."""
    heads, kv_heads, size = local_heads(d, shard), local_kv_heads(d, shard), d.head_dim
    queries = torch.arange(heads.start * size, heads.stop * size)
    if d.queries_only:
        return queries
    keys = torch.arange(kv_heads.start * size, kv_heads.stop * size) + d.q_size
    return torch.cat([queries, keys, keys + d.kv_size])


def _latent_rows(name: str, d: DecoderDescription, a: LatentAttention, shard: Shard) -> Tensor:
    """Returns the rows of this rank's heads in a matrix of latent attention; after queries, those of the latent too."""
    heads, size = local_heads(d, shard), a.nope_dim + a.value_dim if name == "latent_up" else a.query_dim
    rows = torch.arange(heads.start * size, heads.stop * size)
    return rows if name != "qkv" else torch.cat([rows, torch.arange(a.row_size) + d.num_heads * size])


def _check(d: DecoderDescription, shard: Shard) -> None:
    n = shard.tp_size
    if n > 1 and d.whole_qk_norm:
        raise SettingsError(f"{_TP}: this model norms all heads together, which ranks that divide them cannot")
    if shard.pp_size > 1 and (d.kv_sources or d.layer_inputs is not None):
        raise SettingsError(f"{_PP}: the last layers of this model read what its first ones computed; use {_TP}")
    if n > 1 and isinstance(d.recurrent, ChannelDelta):
        raise SettingsError(
            f"{_TP}: linear attention with decays for each dimension of keys is not divided; use {_PP}, or "
            "--quantization"
        )
    numbers = {"attention heads": d.num_heads} if d.attention_layers else {}
    if len(d.without_mlp) < d.num_layers:
        numbers["columns of the MLP"] = d.intermediate_size
    if d.experts is not None:
        numbers["columns of an expert"] = d.experts.intermediate_size
        numbers["columns of the shared expert"] = d.experts.shared_intermediate_size
    if d.recurrent is not None:
        numbers["heads of the recurrent layers"] = d.recurrent.num_divided
        stages = (Shard(pp_rank=rank, pp_size=shard.pp_size).layers(d.num_layers) for rank in range(shard.pp_size))
        if d.attention_layers and not all(any(d.attends(layer) for layer in stage) for stage in stages):
            raise SettingsError(f"{_PP}: each stage of this model needs a layer with attention; use fewer stages")
    check_division(n, numbers, shard.pp_size, d.num_layers)
    for size in d.layer_inner:
        check_division(n, {"columns of the MLP": size}, shard.pp_size, d.num_layers)
    for count in d.layer_heads:
        check_division(n, {"attention heads": count}, shard.pp_size, d.num_layers)
    for count in {d.num_kv_heads, *(count for count, _ in d.layer_kv_heads)}:
        if count % n and n % count:
            raise SettingsError(f"{_TP}: {n} and the model's {count} key heads do not divide each other")
