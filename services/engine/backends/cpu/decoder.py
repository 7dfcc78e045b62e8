"""Passes a decoder's description and weights to the C++ library, parameter by parameter.

Each parameter is read, packed by the library and released before the next one is read, so peak memory stays close to
the size of the model. Called by the CPU worker at start-up.
"""

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.cpu.native import NATIVE_KINDS, Library, Spec, native_weight
from antiphon.services.engine.backends.cpu.packed import Piece, WeightCache
from antiphon.services.engine.kernels.alibi import alibi_slopes
from antiphon.services.engine.models.description import (
    ActivationKind,
    DecoderDescription,
    LatentAttention,
    NormKind,
    ResidualKind,
    RopeParameters,
    ScoringKind,
)
from antiphon.services.engine.models.layers.rope import inverse_frequencies
from antiphon.services.engine.models.layout import Parameter
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.capacity.memory import fetch
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.services.engine.worker.loading.parameters import Matrix, ParameterReader, made_plain

logger = logging.getLogger(__name__)

HEAD_DIM_MAX = 576
"""Largest supported head dimension: that of DeepSeek's rows of latents."""
_CPU = torch.device("cpu")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The 8-bit types of the KV cache, in the order of the library's enumeration, where the model's type comes first."""
_PANEL = 32
"""Number of rows in a panel of the library. If a matrix is multiplied in parts, these have whole panels."""
_NORMS = ("input_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm")
_MATRICES = ("qkv", "o", "up", "down", "router", "shared.up", "shared.down", "shared.gate", "q_up")
_LATENT_NORMS = ("latent_norm", "q_latent_norm")


class NativeDecoder:
    """A model in the library, together with the memory that the library reads in place."""

    def __init__(
        self,
        library: Library,
        description: DecoderDescription,
        model_dir: Path,
        layout: tuple[Parameter, ...],
        dtype: torch.dtype,
        block_size: int,
        threads: int,
        form: WeightForm = PLAIN_WEIGHTS,
        cache: WeightCache | None = None,
        lora: tuple[int, int] = (0, 0),
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Loads the checkpoint. Raises `ServiceError` if it does not fit its config.

        Packed weights are taken from the cache if it has them; otherwise they are packed and written to the cache.
        `lora`: number of adapter slots and the largest rank of an adapter.
        `cache_dtype`: type of the KV cache; None: the model's.
        """
        self._dtype = dtype
        self._cache = cache
        self._mapped = self._cache.find() if self._cache else None
        self._packed: list[Piece] = []
        self._made_plain: list[str] = []
        self.quantized_bytes, self.quantized_from_bytes = 0, 0
        """Bytes of the packed quantized matrices, and the bytes that they would take unquantized."""
        self.description = description
        self.model = library.new(make_spec(description, dtype, block_size, threads, lora, cache_dtype))
        self._kept: list[Tensor] = []
        self.weights: list[WeightMemory] = []
        """The matrices and tables in memory. The vectors of the layers are left out, because they are small."""
        self._caches: dict[int, tuple[Tensor, ...]] = {}
        with ParameterReader(model_dir, description, layout, dtype, _CPU, form) as reader:
            self._load(reader)
            self.weights_bytes = self.mapped_bytes + reader.read_bytes
        if self._made_plain:
            logger.warning("%s", made_plain(self._made_plain, dtype))
        for layer in range(description.num_layers):
            self._set_attention(layer)
        if description.alibi_scale is not None:
            slopes = alibi_slopes(description.num_heads) * (description.alibi_scale * math.log2(math.e))
            self._vector(-1, "slopes", slopes)
        if self._cache and not self._mapped:
            self._cache.keep(self._packed, self.model)

    @property
    def mapped_bytes(self) -> int:
        """Size of the mapped file of packed weights; 0 if there is none.

        The system counts the file's pages as available memory although the model needs them.
        """
        return self._mapped.nbytes if self._mapped else 0

    def close(self) -> None:
        """Stops writing packed weights and frees the model."""
        if self._cache:
            self._cache.close()
        self.model.free()

    def set_cache(self, layer: int, keys: Tensor, values: Tensor | None) -> None:
        """Sets or replaces a layer's KV cache: any tensors of the right size whose first dimension is blocks.

        Latent attention has no values.
        """
        parts = {"keys": keys} if values is None else {"keys": keys, "values": values}
        self._caches[layer] = tuple(parts.values())
        for name, part in parts.items():
            assert part.nbytes == len(keys) * self.model.block_bytes()
            self.model.set_table(layer, name, part.data_ptr())

    def _load(self, reader: ParameterReader) -> None:
        d = self.description
        if reader.has("positions"):
            self._table(-1, "positions", reader.tensor("positions"))
        self._norm(reader, -1, "final_norm", "final_norm")
        # Read once, because the reader counts the bytes that it reads.
        embedding = cache(lambda: reader.tensor("embedding"))
        as_it_is = self._matrix(-1, "head", 0, lambda: self._head(reader, embedding), _bias(reader, "head"))
        if not (as_it_is and d.tied_embeddings and not d.normalised_head):
            self._table(-1, "embedding", embedding())
        embedding.cache_clear()
        for layer in range(d.num_layers):
            self._load_layer(reader, layer)
        _release_freed_memory()

    def _head(self, reader: ParameterReader, embedding: Callable[[], Tensor]) -> Matrix:
        if self.description.normalised_head:
            return F.normalize(embedding() if self.description.tied_embeddings else reader.tensor("head.weight"))
        if self.description.tied_embeddings:
            return reader.tied_head(embedding())
        return reader.matrix("head")

    def _load_layer(self, reader: ParameterReader, layer: int) -> None:
        d, prefix = self.description, f"layers.{layer}"
        for name in _NORMS:
            self._norm(reader, layer, name, f"{prefix}.{name}")
        for name in _MATRICES:
            if reader.has(f"{prefix}.{name}.weight"):
                bias = _bias(reader, f"{prefix}.{name}")
                if name == "qkv":
                    self._parts(layer, name, partial(reader.matrices, f"{prefix}.{name}", _PANEL), bias)
                else:
                    self._matrix(layer, name, 0, partial(reader.matrix, f"{prefix}.{name}"), bias)
        if d.latent is not None:
            self._load_latents(reader, layer, d.latent)
        if d.qk_norm:
            heads = (("q_norm", d.num_heads), ("k_norm", d.num_kv_heads))
            parts = [reader.floats(f"{prefix}.{name}").view(-1, d.head_dim).expand(n, -1) for name, n in heads]
            norms = torch.cat(parts)
            self._vector(layer, "qk_norm", self._with_one(norms))
        if reader.has(f"{prefix}.router.correction"):
            self._vector(layer, "router.correction", reader.exact(f"{prefix}.router.correction"))
        if d.experts is not None and d.has_experts(layer):
            for part in ("up", "down"):
                count, bias = d.experts.num_experts, _bias(reader, f"{prefix}.experts.{part}")
                weights = _Experts(partial(reader.matrix, f"{prefix}.experts.{part}"), count)
                biases = (None,) * count if bias is None else bias.chunk(count)
                for expert in range(count):
                    self._matrix(layer, f"experts.{part}", expert, partial(weights.of, expert), biases[expert])
        if d.attention_sinks:
            self._vector(layer, "sinks", reader.exact(f"{prefix}.sinks") * math.log2(math.e))

    def _load_latents(self, reader: ParameterReader, layer: int, shape: LatentAttention) -> None:
        """Passes the norms of the latents, and for each head the matrices of `_Heads.key` and `_Heads.value`."""
        prefix, heads = f"layers.{layer}", self.description.num_heads
        for name in _LATENT_NORMS:
            if reader.has(f"{prefix}.{name}"):
                self._vector(layer, name, reader.floats(f"{prefix}.{name}"))
        up = _Heads(partial(reader.plain_matrix, f"{prefix}.latent_up"), heads, shape.nope_dim)
        for head in range(heads):
            self._matrix(layer, "latent.key", head, partial(up.key, head), None)
            self._matrix(layer, "latent.value", head, partial(up.value, head), None)

    def _norm(self, reader: ParameterReader, layer: int, name: str, parameter: str) -> None:
        if not reader.has(f"{parameter}.weight"):
            return
        self._vector(layer, name, self._with_one(reader.floats(f"{parameter}.weight")))
        bias = _bias(reader, parameter)
        if bias is not None:
            self._vector(layer, f"{name}.bias", bias)

    def _with_one(self, weight: Tensor) -> Tensor:
        return weight + 1.0 if self.description.norm == "rms_plus_one" else weight

    def _set_attention(self, layer: int) -> None:
        window = self.description.sliding_windows[layer]
        if window is not None:
            self.model.set_window(layer, window)
        rope = self.description.rope_of(layer)
        if rope is not None:
            self._set_rope(layer, rope)

    def _set_rope(self, layer: int, rope: RopeParameters) -> None:
        frequencies = inverse_frequencies(rope).contiguous()
        self.model.set_rope(layer, frequencies.data_ptr(), len(frequencies), rope.interleaved, rope.attention_factor)

    def _parts(self, layer: int, name: str, read: Callable[[], list[Matrix]], bias: Tensor | None) -> None:
        """Passes a matrix that may consist of several quantized ones, each below the one before it."""
        if self._mapped:
            heights, parts = self._mapped.heights(layer, name), []
        else:
            parts = read()
            heights = [part.shape[0] for part in parts]
        biases = [None] * len(heights) if bias is None else bias.split(heights)
        for number, own in enumerate(biases):
            self._matrix(layer, name, number, partial(parts.__getitem__, number), own)

    def _matrix(self, layer: int, name: str, expert: int, read: Callable[[], Matrix], bias: Tensor | None) -> bool:
        """Passes a matrix to the library. Returns False if it is quantized, else True."""
        address = 0 if bias is None else bias.data_ptr()
        if self._mapped:
            piece = self._mapped.piece((layer, name, expert))
            quantized_bytes = piece.size if piece.quantized else 0
            self.model.set_packed(*piece.name, piece.address, piece.shape, address, quantized_bytes)
        else:
            piece = self._pack(layer, name, expert, read(), address)
            if self._cache:
                self._packed.append(piece)
        self._weigh(layer, name, expert, piece.address, piece.size)
        if piece.quantized:
            self.quantized_bytes += piece.size
            self.quantized_from_bytes += piece.shape[0] * piece.shape[1] * self._dtype.itemsize
        return not piece.quantized

    def _pack(self, layer: int, name: str, expert: int, weight: Matrix, bias: int) -> Piece:
        """Has the library pack a matrix with the bias at the address `bias`. Returns the packed form."""
        quantized = isinstance(weight, QuantizedWeight) and weight.kind in NATIVE_KINDS
        if isinstance(weight, QuantizedWeight) and not quantized:
            self._made_plain.append(name if layer < 0 else f"layers.{layer}.{name}")
            weight = weight.dequantized().to(self._dtype)
        shape = (weight.shape[0], weight.shape[1])
        if isinstance(weight, QuantizedWeight):
            self.model.set_quantized(layer, name, expert, native_weight(weight), shape, bias)
        else:
            weight = weight.contiguous()
            self.model.set_matrix(layer, name, expert, weight.data_ptr(), shape, bias)
        address, size = self.model.packed(layer, name, expert)
        return Piece(name=(layer, name, expert), shape=shape, address=address, size=size, quantized=quantized)

    def _weigh(self, layer: int, name: str, expert: int, address: int, num_bytes: int) -> None:
        place = name if layer < 0 else f"layer {layer}, {name}"
        self.weights.append(WeightMemory(f"{place} {expert}" if expert else place, address, num_bytes))

    def _vector(self, layer: int, name: str, values: Tensor) -> None:
        values = values.to(torch.float32).contiguous()
        self.model.set_vector(layer, name, values.data_ptr(), values.numel())

    def _table(self, layer: int, name: str, table: Tensor) -> None:
        assert table.is_contiguous()
        self._kept.append(table)
        # The table's rows are read in place from the mapped checkpoint in an unknown order: start reading all of it
        # now.
        fetch(table.data_ptr(), table.nbytes)
        self._weigh(layer, name, 0, table.data_ptr(), table.nbytes)
        self.model.set_table(layer, name, table.data_ptr())


def _release_freed_memory() -> None:
    """Returns the memory of released parameters from the allocator to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Experts:
    """The weights of one layer's experts, which are one parameter. It is read when the first expert is requested."""

    def __init__(self, read: Callable[[], Matrix], count: int) -> None:
        self._read, self._count = read, count
        self._weights: Sequence[Matrix] = ()

    def of(self, expert: int) -> Matrix:
        self._weights = self._weights or self._read().chunk(self._count)
        return self._weights[expert]


class _Heads:
    """The matrices that compute keys and values from latents, which are one parameter [heads * (nope + value), rank].

    It is read when the matrices of the first head are requested.
    """

    def __init__(self, read: Callable[[], Tensor], count: int, nope_dim: int) -> None:
        self._read, self._count, self._nope_dim = read, count, nope_dim
        self._weights: Sequence[Tensor] = ()

    def key(self, head: int) -> Tensor:
        """Returns the matrix [rank, nope] that converts a head's query to a query for latents."""
        return self._of(head)[: self._nope_dim].t()

    def value(self, head: int) -> Tensor:
        """Returns the matrix [value, rank] that computes a head's value from a latent."""
        return self._of(head)[self._nope_dim :]

    def _of(self, head: int) -> Tensor:
        self._weights = self._weights or self._read().chunk(self._count)
        return self._weights[head]


def _bias(reader: ParameterReader, name: str) -> Tensor | None:
    return reader.floats(f"{name}.bias").contiguous() if reader.has(f"{name}.bias") else None


def make_spec(
    d: DecoderDescription,
    dtype: torch.dtype,
    block_size: int,
    threads: int,
    lora: tuple[int, int] = (0, 0),
    cache_dtype: torch.dtype | None = None,
) -> Spec:
    """Returns the description as the library takes it."""
    experts, latent = d.experts, d.latent
    return Spec(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        num_layers=d.num_layers,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        intermediate_size=d.intermediate_size,
        block_size=block_size,
        threads=threads,
        norm=get_args(NormKind).index(d.norm),
        activation=get_args(ActivationKind).index(d.activation),
        residual=get_args(ResidualKind).index(d.residual),
        gated_mlp=d.gated_mlp,
        shared_norm=d.shared_norm,
        qk_norm=3 if d.qk_norm_rotated else d.qk_norm + d.whole_qk_norm,
        wide=dtype == torch.float32,
        learned_position_offset=d.learned_position_offset,
        num_experts=experts.num_experts if experts else 0,
        experts_per_token=experts.num_per_token if experts else 0,
        expert_size=experts.intermediate_size if experts else 0,
        shared_expert_size=experts.shared_intermediate_size if experts else 0,
        normalise_experts=experts.normalise if experts else False,
        expert_scoring=get_args(ScoringKind).index(experts.scoring) if experts else 0,
        expert_groups=experts.num_groups if experts else 1,
        chosen_groups=experts.num_chosen_groups if experts else 1,
        expert_scale=experts.scale if experts else 1.0,
        cache=1 + _FLOAT8.index(cache_dtype) if cache_dtype in _FLOAT8 else 0,
        lora_slots=lora[0],
        lora_rank=lora[1],
        best_of_group=experts.best_of_group if experts else 1,
        latent_rank=latent.rank if latent else 0,
        latent_nope=latent.nope_dim if latent else 0,
        latent_value=latent.value_dim if latent else 0,
        query_rank=latent.query_rank if latent else 0,
        latent_eps=latent.norm_eps if latent else 0.0,
        norm_eps=d.norm_eps,
        query_scale=d.head_dim**-0.5 if d.query_scale is None else d.query_scale,
        attention_softcap=d.attention_softcap or 0.0,
        logits_softcap=d.logits_softcap or 0.0,
        logits_scale=d.logits_scale,
        embedding_scale=torch.tensor(d.embedding_scale, dtype=dtype).item()
        if d.rounded_embedding_scale
        else d.embedding_scale,
    )
