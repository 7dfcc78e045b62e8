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

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.cpu.native import NATIVE_KINDS, Library, native_weight
from antiphon.services.engine.backends.cpu.packed import Piece, WeightCache
from antiphon.services.engine.backends.cpu.spec import make_spec
from antiphon.services.engine.kernels.activation import xielu_numbers
from antiphon.services.engine.kernels.alibi import alibi_slopes
from antiphon.services.engine.models.description import (
    DecoderDescription,
    LatentAttention,
    RopeParameters,
)
from antiphon.services.engine.models.kv_groups import layer_groups
from antiphon.services.engine.models.layers.recurrent import scaled_kernel
from antiphon.services.engine.models.layers.rope import axes_of, inverse_frequencies
from antiphon.services.engine.models.layout import Parameter
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.capacity.kv_cache import padded_heads
from antiphon.services.engine.worker.capacity.memory import fetch
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.services.engine.worker.loading.parameters import Matrix, ParameterReader, made_plain, stream_router

logger = logging.getLogger(__name__)

HEAD_DIM_MAX = 576
"""Largest supported head dimension: that of DeepSeek's rows of latents."""
STATE_DIM_MAX = 256
"""Largest dimension of the heads of a gated delta rule, and of the states of a state space."""
CONVOLUTION_MAX = 16
"""Most tokens that a convolution reads."""
STREAMS_MAX = 8
"""Most residual streams."""
_CPU = torch.device("cpu")
_PANEL = 32
"""Number of rows in a panel of the library. If a matrix is multiplied in parts, these have whole panels."""
_NORMS = {
    **{name: name for name in ("input_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm", "input_after")},
    **{name: name for name in ("draft_embedding_norm", "draft_hidden_norm", "draft_norm")},
    "side.after": "side_after",
    "experts.norm": "experts_norm",
    "experts.after": "after_experts",
    "mlp.after": "after_mlp",
}
"""Names of norms of a layer, and how the library calls them."""
_MATRICES = {
    **{name: name for name in ("o", "up", "down", "router", "shared.up", "shared.down", "shared.gate", "q_up")},
    **{name: name for name in ("input_gate", "input_out", "draft_input", "side.in", "side.out")},
    "experts.in": "experts.in",
    "experts.out": "experts.out",
    "mix_in": "qkv",
    "mix_out": "o",
    "mix_gate": "gate",
    "mix_select": "mix_select",
    "mix_step": "mix_step",
    "mix_decay": "mix_decay",
    "mix_out_gate": "mix_out_gate",
    "attention_gate": "gate",
}
"""Names of matrices of a layer, and how the library calls them. `qkv`, which may have parts, is not among them."""
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
        self._states: dict[int, Tensor] = {}
        with ParameterReader(model_dir, description, layout, dtype, _CPU, form) as reader:
            self._load(reader)
            self.weights_bytes = self.mapped_bytes + reader.read_bytes
        if self._made_plain:
            logger.warning("%s", made_plain(self._made_plain, dtype))
        for layer, group in enumerate(layer_groups(description)):
            self._set_attention(layer, group)
        if description.layer_kv_heads:
            stride = block_size * padded_heads(description).slab_width
            for layer, (count, width) in enumerate(description.layer_kv_heads):
                self.model.set_heads(layer, count, width, stride, description.borrows_kv(layer))
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

        Latent attention has no values. Layers with heads of their own have parts of the blocks (`set_slabs`).
        """
        parts = {"keys": keys} if values is None else {"keys": keys, "values": values}
        self._caches[layer] = tuple(parts.values())
        for name, part in parts.items():
            assert part.nbytes == len(keys) * self.model.block_bytes()
            self.model.set_table(layer, name, part.data_ptr())

    def set_slabs(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Sets or replaces the KV cache of layers with heads of their own: slabs [blocks, block_size, 1, width].

        In a block of a slab, the numbers of a layer follow those of the layers before it.
        """
        own, sources = padded_heads(self.description), self.description.kv_sources
        for number, layers in (each for group in own.kv_groups or (own.slabs,) for each in enumerate(group)):
            first = 0
            for source in layers:
                readers = [layer for layer, one in enumerate(sources) if one == source] or [source]
                for name, slabs in (("keys", keys), ("values", values)):
                    slab = slabs[number]
                    address = slab.data_ptr() + first * slab.shape[1] * slab.itemsize
                    for layer in readers:
                        self.model.set_table(layer, name, address)
                first += own.of_layer(source).kv_size
        self._caches = dict(enumerate(zip(keys, values, strict=True)))

    def set_states(self, layer: int, states: Tensor) -> None:
        """Sets or replaces the recurrent states of a layer, [slots, …] float32."""
        self._states[layer] = states
        self.model.set_table(layer, "states", states.data_ptr())

    def _load(self, reader: ParameterReader) -> None:
        d = self.description
        if reader.has("positions"):
            self._table(-1, "positions", reader.tensor("positions"))
        self._norm(reader, -1, "final_norm", "final_norm")
        if d.layer_inputs is not None:
            self._table(-1, "inputs", reader.tensor("layer_inputs.table"))
            self._norm(reader, -1, "inputs_norm", "layer_inputs.norm")
            self._matrix(-1, "inputs.in", 0, partial(reader.matrix, "layer_inputs.in"), None)
        if d.streams is not None:
            for which in ("streams.in", "streams.out"):
                for number in range(d.streams.count - 1):
                    self._matrix(-1, which, number, partial(reader.matrix, f"{which}.{number}"), None)
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
        d, prefix = self.description.of_layer(layer), f"layers.{layer}"
        for ours, name in _NORMS.items():
            self._norm(reader, layer, name, f"{prefix}.{ours}")
        qkv = f"{prefix}.qkv"
        if reader.has(f"{qkv}.weight"):
            self._parts(layer, "qkv", partial(reader.matrices, qkv, _PANEL), _bias(reader, qkv))
        for ours, name in _MATRICES.items():
            matrix = f"{prefix}.{ours}"
            # Beside attention, a mixer's matrices keep their names.
            theirs = ours if d.attends(layer) and name in ("qkv", "o") else name
            if reader.has(f"{matrix}.weight"):
                self._matrix(layer, theirs, 0, partial(reader.matrix, matrix), _bias(reader, matrix))
        if d.latent is not None and d.attends(layer):
            self._load_latents(reader, layer, d.latent)
        if d.is_recurrent(layer):
            self._load_recurrent(reader, layer)
        if d.attends(layer) and d.has_qk_norm(layer):
            self._vector(layer, "qk_norm", reader.folded_norms(layer, self._qk_norm(reader, d, prefix)))
        if d.experts is not None and d.has_experts(layer):
            self._load_experts(reader, layer, d.experts.num_experts)
        self._load_factors(reader, layer)
        if d.layer_scales:
            self._vector(layer, "scale", reader.floats(f"{prefix}.scale"))
        if reader.has(f"{prefix}.xielu"):
            self._vector(layer, "xielu", xielu_numbers(reader.exact(f"{prefix}.xielu")))
        if d.attention_sinks and reader.has(f"{prefix}.sinks"):
            self._vector(layer, "sinks", reader.exact(f"{prefix}.sinks") * math.log2(math.e))

    def _load_factors(self, reader: ParameterReader, layer: int) -> None:
        """Passes the numbers by which a layer cuts gates and mixes streams."""
        d, prefix = self.description, f"layers.{layer}"
        if d.gate_cuts and (cut := d.gate_cuts[layer]) is not None:
            self._vector(layer, "gate_cut", torch.tensor([cut]))
        if d.streams is None:
            return
        self._vector(layer, "stream_router", stream_router(reader, prefix))
        for part in ("predict", "correct", "scale"):
            self._vector(layer, f"stream_{part}", reader.exact(f"{prefix}.streams.{part}"))

    def _qk_norm(self, reader: ParameterReader, d: DecoderDescription, prefix: str) -> Tensor:
        """Returns the weights of the norms of queries and keys, a row for each head."""
        heads = (("q_norm", d.num_heads), ("k_norm", d.num_kv_heads))
        if not d.qk_norm_weights:
            return torch.ones(d.num_heads + d.num_kv_heads, d.head_dim)
        own = heads[:1] if d.queries_only else heads
        parts = [reader.floats(f"{prefix}.{name}").view(-1, d.head_dim).expand(n, -1) for name, n in own]
        return self._with_one(torch.cat(parts))

    def _load_recurrent(self, reader: ParameterReader, layer: int) -> None:
        """Passes the vectors of a layer's mixer with a recurrent state."""
        prefix, shape = f"layers.{layer}", self.description.recurrent
        kernel = reader.floats(f"{prefix}.conv").flatten(1)
        self._vector(layer, "conv", (scaled_kernel(shape, kernel) if isinstance(shape, StateSpace) else kernel).t())
        if (bias := _bias(reader, f"{prefix}.conv")) is not None:
            self._vector(layer, "conv.bias", bias)
        if isinstance(shape, GatedDelta | StateSpace | ChannelSpace | ChannelDelta):
            decay = -reader.exact(f"{prefix}.decay").exp()
            self._vector(layer, "decay", decay.t() if isinstance(shape, ChannelSpace) else decay)
            self._vector(layer, "decay_bias", reader.exact(f"{prefix}.decay_bias"))
        if isinstance(shape, GatedDelta | ChannelDelta):
            self._vector(layer, "mix_norm", reader.floats(f"{prefix}.mix_norm"))
        if isinstance(shape, StateSpace | ChannelSpace):
            self._vector(layer, "skip", reader.exact(f"{prefix}.skip"))
        if isinstance(shape, ChannelSpace) and shape.part_norms != "none":
            weighted = reader.has(f"{prefix}.select_norm")
            norm = reader.floats(f"{prefix}.select_norm") if weighted else torch.ones(sum(shape.select_widths))
            self._vector(layer, "mix_norm", norm)
        if isinstance(shape, StateSpace):
            norm = torch.ones(shape.width) if shape.norm == "none" else reader.floats(f"{prefix}.mix_norm")
            self._vector(layer, "mix_norm", norm * shape.out_scale)

    def _load_experts(self, reader: ParameterReader, layer: int, count: int) -> None:
        prefix = f"layers.{layer}"
        if reader.has(f"{prefix}.router.correction"):
            self._vector(layer, "router.correction", reader.exact(f"{prefix}.router.correction"))
        if reader.has(f"{prefix}.router.scale"):
            scale = reader.floats(f"{prefix}.router.scale") * self.description.hidden_size**-0.5
            self._vector(layer, "router_norm", scale)
            self._vector(layer, "expert_scales", reader.exact(f"{prefix}.experts.scale"))
        for part in ("up", "down"):
            bias = _bias(reader, f"{prefix}.experts.{part}")
            weights = _Experts(partial(reader.matrix, f"{prefix}.experts.{part}"), count)
            biases = (None,) * count if bias is None else bias.chunk(count)
            for expert in range(count):
                self._matrix(layer, f"experts.{part}", expert, partial(weights.of, expert), biases[expert])

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

    def _set_attention(self, layer: int, group: int) -> None:
        window = self.description.sliding_windows[layer]
        if window is not None:
            self.model.set_window(layer, window, group)
        rope = self.description.rope_of(layer)
        if rope is not None:
            self._set_rope(layer, rope)

    def _set_rope(self, layer: int, rope: RopeParameters) -> None:
        frequencies, axes = inverse_frequencies(rope).contiguous(), axes_of(rope).contiguous()
        places = axes.data_ptr() if rope.sections else 0
        count, scale = len(frequencies), rope.attention_factor
        self.model.set_rope(layer, frequencies.data_ptr(), places, count, rope.interleaved, scale)

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
