"""Passes a decoder's description and weights to the C++ library, parameter by parameter.

Each parameter is read, packed by the library and released before the next one is read, so peak memory stays close to
the size of the model. Called by the CPU worker at start-up.
"""

import ctypes
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.cpu.native import Library, Spec
from services.engine.cpu.packed import Piece, WeightCache
from services.engine.cpu.quantize import Quantize, QuantizedWeight
from services.engine.kernels.alibi import alibi_slopes
from services.engine.models.description import (
    ActivationKind,
    DecoderDescription,
    NormKind,
    ResidualKind,
    RopeParameters,
)
from services.engine.models.layout import Parameter, ignored_names
from services.engine.models.rope import inverse_frequencies
from services.engine.worker.checkpoint import Checkpoint
from services.engine.worker.memory import fetch

WIDTH_MULTIPLE = 32
"""In the KV cache, the dimensions of a head are padded to a multiple of this number."""
HEAD_DIM_MAX = 512
_CPU = torch.device("cpu")
_NORMS = ("input_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm")
_MATRICES = ("qkv", "o", "up", "down", "router", "shared.up", "shared.down", "shared.gate")


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
        quantize: Quantize | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        """Loads the checkpoint. Raises `ServiceError` if it does not fit its config.

        Packed weights are taken from the cache if it has them; otherwise they are packed and written to the cache. With
        `quantize` the cache is not used.
        """
        self._quantize = quantize
        self._cache = None if quantize else cache
        self._mapped = self._cache.find() if self._cache else None
        self._packed: list[Piece] = []
        self.description = description
        self.model = library.new(make_spec(description, dtype, block_size, threads))
        self._kept: list[Tensor] = []
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}
        with Checkpoint(model_dir) as checkpoint:
            checkpoint.check(layout, ignored_names(description))
            self._load(_Source(checkpoint, layout, dtype))
        for layer in range(description.num_layers):
            self._set_attention(layer)
        if description.alibi_scale is not None:
            slopes = alibi_slopes(description.num_heads) * (description.alibi_scale * math.log2(math.e))
            self._vector(-1, "slopes", slopes)
        if self._cache and not self._mapped:
            self._cache.keep(self._packed)

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

    def set_cache(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Sets or replaces a layer's KV cache: any tensors of the right size whose first dimension is blocks."""
        assert keys.nbytes == values.nbytes == len(keys) * self.model.block_bytes()
        self._caches[layer] = keys, values
        self.model.set_table(layer, "keys", keys.data_ptr())
        self.model.set_table(layer, "values", values.data_ptr())

    def _load(self, source: "_Source") -> None:
        d = self.description
        if source.has("positions"):
            self._table(-1, "positions", source.tensor("positions"))
        self._norm(source, -1, "final_norm", "final_norm")
        as_it_is = self._matrix(-1, "head", 0, lambda: self._head(source), source.bias("head"))
        if not (as_it_is and d.tied_embeddings and not d.normalised_head):
            self._table(-1, "embedding", source.tensor("embedding"))
        for layer in range(d.num_layers):
            self._load_layer(source, layer)
        _release_freed_memory()

    def _head(self, source: "_Source") -> Tensor:
        head = source.tensor("embedding" if self.description.tied_embeddings else "head.weight")
        return F.normalize(head) if self.description.normalised_head else head

    def _load_layer(self, source: "_Source", layer: int) -> None:
        d, prefix = self.description, f"layers.{layer}"
        for name in _NORMS:
            self._norm(source, layer, name, f"{prefix}.{name}")
        for name in _MATRICES:
            if source.has(f"{prefix}.{name}.weight"):
                weight = partial(source.tensor, f"{prefix}.{name}.weight")
                self._matrix(layer, name, 0, weight, source.bias(f"{prefix}.{name}"))
        if d.qk_norm:
            heads = (("q_norm", d.num_heads), ("k_norm", d.num_kv_heads))
            norms = torch.cat([source.floats(f"{prefix}.{name}").expand(count, -1) for name, count in heads])
            self._vector(layer, "qk_norm", self._with_one(norms))
        if d.experts is not None and d.has_experts(layer):
            for part in ("up", "down"):
                weights = _Experts(partial(source.tensor, f"{prefix}.experts.{part}.weight"), d.experts.num_experts)
                for expert in range(d.experts.num_experts):
                    self._matrix(layer, f"experts.{part}", expert, partial(weights.of, expert), None)

    def _norm(self, source: "_Source", layer: int, name: str, parameter: str) -> None:
        if not source.has(f"{parameter}.weight"):
            return
        self._vector(layer, name, self._with_one(source.floats(f"{parameter}.weight")))
        bias = source.bias(parameter)
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

    def _matrix(self, layer: int, name: str, expert: int, read: Callable[[], Tensor], bias: Tensor | None) -> bool:
        """Passes a matrix to the library. Returns False if it was quantized, else True."""
        address = 0 if bias is None else bias.data_ptr()
        if self._mapped:
            piece = self._mapped.piece((layer, name, expert))
            self.model.set_packed(*piece.name, piece.address, piece.shape, address)
            return True
        weight = read()
        chosen = self._quantize(name, weight) if self._quantize else weight
        if isinstance(chosen, QuantizedWeight):
            self.model.set_quantized(layer, name, expert, chosen.native(), chosen.shape, address)
            return False
        weight = chosen.contiguous()
        shape = (weight.shape[0], weight.shape[1])
        self.model.set_matrix(layer, name, expert, weight.data_ptr(), shape, address)
        if self._cache:
            self._packed.append(Piece((layer, name, expert), shape, *self.model.packed(layer, name, expert)))
        return True

    def _vector(self, layer: int, name: str, values: Tensor) -> None:
        values = values.to(torch.float32).contiguous()
        self.model.set_vector(layer, name, values.data_ptr(), values.numel())

    def _table(self, layer: int, name: str, table: Tensor) -> None:
        assert table.is_contiguous()
        self._kept.append(table)
        # The table's rows are read in place from the mapped checkpoint in an unknown order: start reading all of it
        # now.
        fetch(table.data_ptr(), table.nbytes)
        self.model.set_table(layer, name, table.data_ptr())


def _release_freed_memory() -> None:
    """Returns the memory of released parameters from the allocator to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Experts:
    """The weights of one layer's experts, which are one parameter. It is read when the first expert is requested."""

    def __init__(self, read: Callable[[], Tensor], count: int) -> None:
        self._read, self._count = read, count
        self._weights: tuple[Tensor, ...] = ()

    def of(self, expert: int) -> Tensor:
        self._weights = self._weights or self._read().chunk(self._count)
        return self._weights[expert]


class _Source:
    """Reads the checkpoint's parameters by name."""

    def __init__(self, checkpoint: Checkpoint, layout: tuple[Parameter, ...], dtype: torch.dtype) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._parameters = {parameter.name: parameter for parameter in layout}

    def has(self, name: str) -> bool:
        return name in self._parameters

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.read(self._parameters[name], self._dtype, _CPU)

    def floats(self, name: str) -> Tensor:
        return self.tensor(name).to(torch.float32)

    def bias(self, name: str) -> Tensor | None:
        return self.floats(f"{name}.bias").contiguous() if self.has(f"{name}.bias") else None


def make_spec(d: DecoderDescription, dtype: torch.dtype, block_size: int, threads: int) -> Spec:
    """Returns the description as the library takes it."""
    experts = d.experts
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
        qk_norm=d.qk_norm,
        wide=dtype == torch.float32,
        learned_position_offset=d.learned_position_offset,
        num_experts=experts.num_experts if experts else 0,
        experts_per_token=experts.num_per_token if experts else 0,
        expert_size=experts.intermediate_size if experts else 0,
        shared_expert_size=experts.shared_intermediate_size if experts else 0,
        normalise_experts=experts.normalise if experts else False,
        norm_eps=d.norm_eps,
        query_scale=d.head_dim**-0.5 if d.query_scale is None else d.query_scale,
        attention_softcap=d.attention_softcap or 0.0,
        logits_softcap=d.logits_softcap or 0.0,
        embedding_scale=torch.tensor(d.embedding_scale, dtype=dtype).item(),
    )
