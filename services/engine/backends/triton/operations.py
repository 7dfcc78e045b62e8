"""Implements a decoder's operations (the interface is in `models/operations`) with the Triton kernels.

Products with weights have several forms (`autotune`). Usually those of up to 8 rows use `skinny_linear`, which reads
the weight once and fuses residual and activation. A decoder layer then takes nine launches: norm, query-key-value,
rotation + cache, attention (two), output + residual, norm, gate·up, down + residual. The norm is not fused with the
product behind it: on an H100 that made the product take twice as long.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.autotune.expert_forms import ExpertWeights, RoutedRows
from antiphon.services.engine.backends.triton.autotune.forms import Choice, Products
from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import DeviceWork, Geometry
from antiphon.services.engine.backends.triton.kernels.attention.decode_attention import attend_few
from antiphon.services.engine.backends.triton.kernels.attention.prefill_attention import attend_many
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import rotate_and_store
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts, pack_experts
from antiphon.services.engine.backends.triton.kernels.lora import LoraMatrix, LoraStep
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.backends.triton.kernels.products.skinny import skinny_linear
from antiphon.services.engine.backends.triton.kernels.products.weights import kernel_weight
from antiphon.services.engine.backends.triton.kernels.routing import route_tokens
from antiphon.services.engine.backends.triton.latent import TritonLatentAttention, rope_tables
from antiphon.services.engine.backends.triton.recurrent import (
    TritonChannelDelta,
    TritonChannelSpace,
    TritonConvolution,
    TritonDelta,
    TritonStateSpace,
)
from antiphon.services.engine.kernels.alibi import alibi_slopes
from antiphon.services.engine.models.description import (
    UNSCALED,
    ActivationKind,
    DecoderDescription,
    LatentAttention,
    NormKind,
)
from antiphon.services.engine.models.kv_groups import layer_groups
from antiphon.services.engine.models.layers.attention import (
    Attention,
    StepInputs,
    cache_places,
    grows,
    growth_of,
)
from antiphon.services.engine.models.layers.latent_attention import LatentWeights
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.mlp import ExpertMatrices, ExpertParts, Mlp, RoutedMlp, with_scaled_gates
from antiphon.services.engine.models.layers.norm import Norm
from antiphon.services.engine.models.layers.recurrent import (
    ChannelDeltaWeights,
    ChannelSpaceWeights,
    ConvolutionWeights,
    DeltaWeights,
    Recurrent,
    StateSpaceWeights,
)
from antiphon.services.engine.models.layers.rope import axes_of
from antiphon.services.engine.models.operations import Operations
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace
from antiphon.services.engine.parallel.shard import ALONE, Shard
from antiphon.services.engine.quantization.weight import QuantizedWeight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TritonNorm:
    """A `Norm`: a layer norm if it has a bias, else an RMS norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return normed(x, self.weight, self.bias, self.eps)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Norm`."""
        return normed(x, self.weight, self.bias, self.eps, residual)


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """A `Linear`: `weight` [out, in], contiguous."""

    weight: Tensor
    bias: Tensor | None
    choice: Choice

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.choice.compute(x.contiguous(), self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`. The residual may be overwritten."""
        return self.choice.compute(x.contiguous(), self.weight, self.bias, residual)


class TritonQuantizedLinear:
    """A `Linear` with a quantized weight, stored only in the kernel's layout. `like` has the type of the rows."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, products: Products, like: Tensor) -> None:
        self.weight, self._bias = kernel_weight(weight, like.dtype), bias
        self._choice = products.add_quantized(self.weight, like)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._choice.compute(x.contiguous(), self.weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`. The residual may be overwritten."""
        return self._choice.compute(x.contiguous(), self.weight, self._bias, residual)


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A `Linear` with the LoRA adapters of the step.

    In a step without adapters it is the plain, possibly fused layer.
    """

    linear: Linear
    adapters: LoraMatrix
    step: LoraStep

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._added(self.linear(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._added(self.linear.add_to(residual, x), x)

    def _added(self, y: Tensor, x: Tensor) -> Tensor:
        return y if self.step.tiles is None else self.adapters.add(y, x, self.step.tiles)


def fusable(linear: Linear, rows: int) -> TritonLinear | None:
    """Returns the layer if its product can be fused with other operations in this step; else None."""
    if isinstance(linear, AdaptedLinear):
        linear = linear.linear if linear.step.tiles is None else linear
    return linear if isinstance(linear, TritonLinear) and linear.choice.name(rows) == "skinny" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMlp:
    """An `Mlp` of two products, with or without a gate."""

    up: Linear
    down: Linear
    activation: ActivationKind
    gated: bool
    numbers: Tensor | None = None
    """Those of xielu, [4] float32."""
    scales: tuple[float, float] = UNSCALED

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down(self.inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down.add_to(residual, self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """Returns the input of the second product."""
        if self.scales != UNSCALED:
            return activated(with_scaled_gates(self.up(x), self.scales), self.activation, self.gated) * self.scales[1]
        up = fusable(self.up, x.shape[0]) if self.gated else None
        if up is not None:
            return skinny_linear(x.contiguous(), up.weight, up.bias, activation=self.activation)
        return activated(self.up(x), self.activation, self.gated, self.numbers)


@dataclass(frozen=True, slots=True)
class TritonExpertMlp:
    """A `RoutedMlp` with plain or packed matrices.

    `parts`: all but the matrices.
    """

    parts: ExpertParts
    weights: ExpertWeights
    choice: Choice

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """See `RoutedMlp`."""
        return self._mixed(None, x, x if routed is None else routed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self._mixed(residual, x, x)

    def _mixed(self, residual: Tensor | None, x: Tensor, routed: Tensor) -> Tensor:
        x, p = x.contiguous(), self.parts
        shares, chosen = route_tokens(p.router(routed), p.experts, p.correction, p.scales)
        inputs, added = (x, residual) if p.latent is None else (p.latent[0](x), None)
        mixed = self.choice.compute(RoutedRows(inputs, shares, chosen), self.weights, None, added)
        if p.latent is not None:
            mixed = p.latent[1](mixed) if residual is None else p.latent[1].add_to(residual, mixed)
        return mixed if p.shared is None else p.shared.added_to(mixed, x)


class TritonAttention:
    """An `Attention` that takes its work lists (`DeviceWork`) from `StepInputs.attention`. Positions are int32."""

    def __init__(
        self,
        description: DecoderDescription,
        qk_norms: tuple[Tensor | None, ...],
        like: Tensor,
        sinks: tuple[Tensor | None, ...],
        num_positions: int,
        shard: Shard,
    ) -> None:
        self._description, self._qk_norms = description, qk_norms
        self._of_layer = tuple(map(description.of_layer, range(description.num_layers)))
        self._places, self._groups = cache_places(description), layer_groups(description)
        self._ropes = tuple(description.rope_of(layer) for layer in range(description.num_layers))
        self._tables = {None: None, **rope_tables(self._ropes, num_positions, like)}
        self._axes = {rope: axes_of(rope).to(like.device, torch.int32) for rope in self._ropes if rope is not None}
        slopes = None
        if description.alibi_scale is not None:
            every = alibi_slopes(description.num_heads * shard.tp_size) * description.alibi_scale
            slopes = every.chunk(shard.tp_size)[shard.tp_rank].to(like.device)
        self._geometries = tuple(
            Geometry(
                kv_heads=d.num_kv_heads,
                scale=d.head_dim**-0.5 if d.query_scale is None else d.query_scale,
                softcap=d.attention_softcap,
                slopes=slopes,
                sinks=each,
            )
            for d, each in zip(self._of_layer, sinks, strict=True)
        )

    def prepare(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Attention`; returns the positions and the factors on queries."""
        return positions, growth_of(positions, self._description.query_growth)

    def attend(self, layer: int, qkv: Tensor, prepared: tuple[Tensor, Tensor | None], step: StepInputs) -> Tensor:
        """See `Attention`."""
        d, rope, (positions, growth) = self._of_layer[layer], self._ropes[layer], prepared
        place = self._places[layer]
        caches = step.key_caches[place], step.value_caches[place]
        norms = self._qk_norms[layer]
        if norms is not None and d.whole_qk_norm:
            _norm_whole(d, qkv, norms)
            norms = None
        rotate_and_store(
            qkv, positions, step.slot_mapping[self._groups[layer]], *caches, d.num_heads, self._tables[rope],
            rope is not None and rope.interleaved, norms, d.norm_eps, d.qk_norm_rotated, d.value_norm,
            None if rope is None else self._axes[rope],
        )  # fmt: skip
        queries = qkv.unflatten(1, (-1, d.head_dim))[:, : d.num_heads]
        if growth is not None and grows(d.query_growth, rope):
            queries.mul_(growth)
        attended = qkv.new_empty((qkv.shape[0], d.num_heads, d.head_dim))
        work: DeviceWork = step.attention[layer]
        if work.few is not None:
            attend_few(queries, *caches, attended, work, self._geometries[layer])
        if work.many is not None:
            attend_many(queries, *caches, attended, work, self._geometries[layer])
        return attended.view(-1, d.q_size)


def _norm_whole(d: DecoderDescription, qkv: Tensor, norms: Tensor) -> None:
    """Norms all query heads together, and all key heads, in place."""
    queries, keys = qkv[:, : d.q_size], qkv[:, d.q_size : d.q_size + d.kv_size]
    queries.copy_(normed(queries, norms[: d.num_heads].flatten(), None, d.norm_eps))
    keys.copy_(normed(keys, norms[d.num_heads :].flatten(), None, d.norm_eps))


class TritonOperations(Operations):
    """Operations with Triton kernels, for activations of a type.

    `num_positions`: number of tokens of the longest context. `deterministic`: a token has the same bits in any step.
    """

    def __init__(
        self, num_positions: int, dtype: torch.dtype, shard: Shard = ALONE, *, deterministic: bool = False
    ) -> None:
        self._num_positions, self._dtype, self._shard = num_positions, dtype, shard
        self._deterministic = deterministic
        self.products = Products()
        self._told = False

    def norm(self, kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """See `Operations`."""
        factor = weight.to(torch.float32) + 1.0 if kind == "rms_plus_one" else weight
        return TritonNorm(factor, bias if kind == "layer" else None, eps)

    def linear(self, weight: "Tensor | QuantizedWeight", bias: Tensor | None = None) -> Linear:
        """See `Operations`."""
        if isinstance(weight, QuantizedWeight):
            return TritonQuantizedLinear(weight, bias, self.products, weight.scales.new_empty(0, dtype=self._dtype))
        # The interpreter writes its arguments back after a launch, and the mapped pages of a checkpoint are read-only.
        weight = weight.clone() if weight.device.type == "cpu" else weight.contiguous()
        return TritonLinear(weight, bias, self.products.add_plain(weight))

    def unpacked_linear(self, weight: Tensor) -> Linear:
        """See `Operations`."""
        return self.linear(weight)

    def mlp(
        self,
        up: Linear,
        down: Linear,
        activation: ActivationKind,
        gated: bool,
        numbers: Tensor | None = None,
        scales: tuple[float, float] = UNSCALED,
    ) -> Mlp:
        """See `Operations`."""
        return TritonMlp(up=up, down=down, activation=activation, gated=gated, numbers=numbers, scales=scales)

    def expert_mlp(self, parts: ExpertParts) -> RoutedMlp:
        """See `Operations`."""
        weights = ExpertWeights(
            gate_up=self._experts(parts.gate_up),
            down=self._experts(parts.down),
            biases=(parts.up_bias, parts.down_bias),
            activation=parts.activation,
            gated=parts.gated,
            weighted_inputs=parts.experts.weighted_inputs,
            per_token=parts.experts.num_per_token,
            one_tile=self._deterministic,
        )
        like = weights.down if isinstance(weights.down, Tensor) else weights.down.scales.new_empty(0, dtype=self._dtype)
        # Matrices that became others must not stay in memory beside them.
        rest = replace(parts, gate_up=(), down=())
        return TritonExpertMlp(rest, weights, self.products.add_experts(weights, like))

    def _experts(self, matrices: ExpertMatrices) -> Tensor | PackedExperts:
        """Returns matrices [experts, out, in] as the grouped products take them."""
        if isinstance(matrices, Tensor):
            return matrices
        packed = pack_experts(matrices, self._dtype)
        if packed is not None:
            return packed
        if not self._told:
            logger.warning(
                "quantization: the Triton kernels multiply no experts of this format: they become %s weights while "
                "loading, which take the memory of an unquantized model; with --cuda-backend=torch they stay quantized",
                str(self._dtype).removeprefix("torch."),
            )
            self._told = True
        return torch.stack([matrix.dequantized().to(self._dtype) for matrix in matrices])

    def attention(
        self,
        description: DecoderDescription,
        qk_norms: tuple[Tensor | None, ...],
        like: Tensor,
        sinks: tuple[Tensor | None, ...],
    ) -> Attention:
        """See `Operations`."""
        return TritonAttention(description, qk_norms, like, sinks, self._num_positions, self._shard)

    def latent_attention(
        self, description: DecoderDescription, shape: LatentAttention, weights: tuple[LatentWeights, ...], like: Tensor
    ) -> Attention:
        """See `Operations`."""
        return TritonLatentAttention(description, shape, weights, like, self._num_positions)

    def convolution(self, weights: Mapping[int, ConvolutionWeights]) -> Recurrent:
        """See `Operations`."""
        return TritonConvolution(weights)

    def delta(self, shape: GatedDelta, weights: Mapping[int, DeltaWeights]) -> Recurrent:
        """See `Operations`."""
        return TritonDelta(shape, weights)

    def state_space(self, shape: StateSpace, weights: Mapping[int, StateSpaceWeights]) -> Recurrent:
        """See `Operations`."""
        return TritonStateSpace(shape, weights)

    def channel_space(self, shape: ChannelSpace, weights: Mapping[int, ChannelSpaceWeights]) -> Recurrent:
        """See `Operations`."""
        return TritonChannelSpace(shape, weights)

    def channel_delta(self, shape: ChannelDelta, weights: Mapping[int, ChannelDeltaWeights]) -> Recurrent:
        """See `Operations`."""
        return TritonChannelDelta(shape, weights)
