"""The reference of layers with a recurrent state in place of attention: from their first projection to the last one.

Created once per model by its operations (`operations`), called by the decoder where other layers attend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.channel_space import channel_space
from antiphon.services.engine.kernels.recurrent.convolution import causal_convolution
from antiphon.services.engine.kernels.recurrent.delta_rule import delta_rule, normalised
from antiphon.services.engine.kernels.recurrent.state_space import state_space
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.models.layers.attention import StepInputs, places_of
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.recurrent_kinds import (
    STATE_COLUMNS,
    ChannelDelta,
    ChannelSpace,
    GatedDelta,
    StateSpace,
)


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """The kernel [channels, kernel_size] of a `ShortConvolution`, and its bias [channels]."""

    kernel: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The vectors of a `GatedDelta`: `kernel` [channels, kernel_size]; `norm` [value_dim].

    `decay` = -exp(A_log) and `decay_bias` [value heads] are float32.
    """

    kernel: Tensor
    norm: Tensor
    decay: Tensor
    decay_bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceWeights:
    """The vectors of a `StateSpace`: those of the convolution, see `ConvolutionWeights`; `norm` [width].

    They contain the factors of the `StateSpace`, but for z and d. `norm`, `decay` = -exp(A_log), `decay_bias` and
    `skip` = D, [heads], are float32.
    """

    kernel: Tensor
    bias: Tensor | None
    norm: Tensor
    decay: Tensor
    decay_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpaceWeights:
    """The weights of a `ChannelSpace`: those of the convolution, see `ConvolutionWeights`, and the inner projections.

    `norm` [step_rank + 2 state_dim]: weights of the norms of r, B and C; None: they have none. `decay` = -exp(A_log)
    [channels, state_dim], `decay_bias` and `skip` = D, [channels], are float32.
    """

    kernel: Tensor
    bias: Tensor | None
    select: Linear
    step: Linear
    norm: Tensor | None
    decay: Tensor
    decay_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDeltaWeights:
    """The weights of a `ChannelDelta`: `kernel` [channels, kernel_size], `norm` [value_dim], the inner projections.

    `decay` = -exp(A_log) [heads] and `decay_bias` [heads, key_dim] are float32.
    """

    kernel: Tensor
    norm: Tensor
    decays: Linear
    gates: Linear
    decay: Tensor
    decay_bias: Tensor


RecurrentWeights = ConvolutionWeights | DeltaWeights | StateSpaceWeights | ChannelSpaceWeights | ChannelDeltaWeights


class Recurrent(Protocol):
    """The interface of what recurrent layers have in place of attention."""

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """Returns the inputs of the layer's `mix_out`, [num_tokens, width]. Reads and writes states.

        `projected`, `gates`: the outputs of its `mix_in` and `mix_gate`; may overwrite them.
        """
        ...


class ReferenceConvolution:
    """The gated short convolutions of a model, by layer, in plain torch operations."""

    def __init__(self, weights: Mapping[int, ConvolutionWeights]) -> None:
        self._weights, self._places = weights, places_of(weights)

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`: `projected` [num_tokens, 3 channels]."""
        weights, states = self._weights[layer], step.state_caches[self._places[layer]]
        gate_in, gate_out, values = projected.chunk(3, dim=1)
        states = states.unflatten(1, (-1, values.shape[1]))
        return gate_out * causal_convolution(gate_in * values, weights.kernel, weights.bias, step.states, states)


class ReferenceDelta:
    """The gated delta rule of a model's layers, in plain torch operations."""

    def __init__(self, shape: GatedDelta, weights: Mapping[int, DeltaWeights]) -> None:
        self._shape, self._weights, self._places = shape, weights, places_of(weights)

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        assert gates is not None
        g, weights, states = self._shape, self._weights[layer], step.state_caches[self._places[layer]]
        before = (g.kernel_size - 1) * g.channels
        inputs, value_gates = projected.split((g.channels, g.in_widths[3]), dim=1)
        past = states[:, :before].unflatten(1, (-1, g.channels))
        mixed = F.silu(causal_convolution(inputs, weights.kernel, None, step.states, past))
        queries, keys, values = mixed.split(g.in_widths[:3], dim=1)
        repeats = g.num_value_heads // g.num_key_heads
        queries, keys = (
            normalised(heads.unflatten(1, (-1, g.key_dim))).repeat_interleave(repeats, dim=1)
            for heads in (queries, keys)
        )
        beta, speed = gates.to(torch.float32).chunk(2, dim=1)
        attended = delta_rule(
            queries * g.key_dim**-0.5,
            keys,
            values.unflatten(1, (-1, g.value_dim)).to(torch.float32),
            torch.exp(weights.decay * F.softplus(speed + weights.decay_bias))[:, :, None],
            beta.sigmoid(),
            step.states,
            states[:, before:].unflatten(1, (g.num_value_heads, -1, g.key_dim, STATE_COLUMNS)),
        ).to(projected.dtype)
        normed = weights.norm * rms_norm(attended, None, g.norm_eps)
        return (
            (normed.to(torch.float32) * F.silu(value_gates.to(torch.float32)).view_as(normed))
            .to(projected.dtype)
            .flatten(1)
        )


def scaled_kernel(shape: StateSpace, kernel: Tensor) -> Tensor:
    """Returns the weights of the convolution [channels, kernel_size] with the factors on its inputs."""
    scales = shape.scales[1:4]
    if scales == (1.0, 1.0, 1.0):
        return kernel
    parts = kernel.to(torch.float32).split(shape.in_widths[1:4])
    return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])


class ReferenceStateSpace:
    """The state spaces of a model's layers, in plain torch operations."""

    def __init__(self, shape: StateSpace, weights: Mapping[int, StateSpaceWeights]) -> None:
        self._shape, self._weights, self._places = shape, weights, places_of(weights)

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        s, weights, states = self._shape, self._weights[layer], step.state_caches[self._places[layer]]
        before = (s.kernel_size - 1) * s.channels
        value_gates, inputs, times = projected.split((s.width, s.channels, s.num_heads), dim=1)
        past = states[:, :before].unflatten(1, (-1, s.channels))
        mixed = F.silu(causal_convolution(inputs, weights.kernel, weights.bias, step.states, past))
        values, inner, outer = mixed.to(torch.float32).split(s.in_widths[1:4], dim=1)
        values, repeats = values.unflatten(1, (-1, s.head_dim)), s.num_heads // s.num_groups
        inner, outer = (
            shared.unflatten(1, (-1, s.state_dim)).repeat_interleave(repeats, dim=1) for shared in (inner, outer)
        )
        z_scale, *_, step_scale = s.scales
        times = F.softplus(times.to(torch.float32) * step_scale + weights.decay_bias).clamp(*s.step_limits)
        read = state_space(
            values * times[:, :, None],
            torch.exp(weights.decay * times),
            inner,
            outer,
            step.states,
            states[:, before:].unflatten(1, (s.num_heads, -1, s.state_dim, STATE_COLUMNS)),
        )
        given = (read + weights.skip[:, None] * values).flatten(1)
        gates = F.silu(value_gates.to(torch.float32) * z_scale)
        if s.norm == "gated":
            given = self._normed(given * gates)
        else:
            given = (given if s.norm == "none" else self._normed(given)) * gates
        return (weights.norm * given).to(projected.dtype)

    def _normed(self, given: Tensor) -> Tensor:
        s = self._shape
        return rms_norm(given.unflatten(1, (s.num_groups, -1)), None, s.norm_eps).flatten(1)


class ReferenceChannelSpace:
    """The state spaces with decays for each channel of a model's layers, in plain torch operations."""

    def __init__(self, shape: ChannelSpace, weights: Mapping[int, ChannelSpaceWeights]) -> None:
        self._shape, self._weights, self._places = shape, weights, places_of(weights)

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        s, weights, states = self._shape, self._weights[layer], step.state_caches[self._places[layer]]
        before = (s.kernel_size - 1) * s.channels
        inputs, value_gates = projected.chunk(2, dim=1)
        past = states[:, :before].unflatten(1, (-1, s.channels))
        mixed = F.silu(causal_convolution(inputs, weights.kernel, weights.bias, step.states, past))
        ranks, inner, outer = self._parts(weights, weights.select(mixed))
        values = mixed.to(torch.float32)
        read = channel_space(
            values,
            F.softplus(weights.step(ranks).to(torch.float32) + weights.decay_bias),
            weights.decay,
            inner.to(torch.float32),
            outer.to(torch.float32),
            step.states,
            states[:, before:].unflatten(1, (-1, s.state_dim, STATE_COLUMNS)),
        )
        given = (read + weights.skip * values) * F.silu(value_gates.to(torch.float32))
        return given.to(projected.dtype)

    def _parts(self, weights: ChannelSpaceWeights, selected: Tensor) -> list[Tensor]:
        """Returns r [num_tokens, step_rank], B and C [num_tokens, state_dim], normed if the norms are not left out."""
        s = self._shape
        parts = list(selected.split(s.select_widths, dim=1))
        if s.part_norms != "none":
            parts = [rms_norm(part, None, s.norm_eps) for part in parts]
        if weights.norm is not None:
            norms = weights.norm.split(s.select_widths)
            parts = [norm * part for part, norm in zip(parts, norms, strict=True)]
        return parts


class ReferenceChannelDelta:
    """The delta rule with decays for each dimension of keys of a model's layers, in plain torch operations."""

    def __init__(self, shape: ChannelDelta, weights: Mapping[int, ChannelDeltaWeights]) -> None:
        self._shape, self._weights, self._places = shape, weights, places_of(weights)

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        assert gates is not None
        g, weights, states = self._shape, self._weights[layer], step.state_caches[self._places[layer]]
        before = (g.kernel_size - 1) * g.channels
        past = states[:, :before].unflatten(1, (-1, g.channels))
        mixed = F.silu(causal_convolution(projected, weights.kernel, None, step.states, past))
        queries, keys, values = (part.unflatten(1, (g.num_heads, -1)) for part in mixed.split(g.in_widths, dim=1))
        narrow_decays, narrow_gates, beta = gates.split(g.gate_widths, dim=1)
        speeds = weights.decays(narrow_decays).to(torch.float32).unflatten(1, (g.num_heads, -1))
        attended = delta_rule(
            normalised(queries) * g.key_dim**-0.5,
            normalised(keys),
            values.to(torch.float32),
            torch.exp(weights.decay[:, None] * F.softplus(speeds + weights.decay_bias)),
            beta.to(torch.float32).sigmoid(),
            step.states,
            states[:, before:].unflatten(1, (g.num_heads, -1, g.key_dim, STATE_COLUMNS)),
        )
        normed = weights.norm.to(torch.float32) * rms_norm(attended, None, g.norm_eps)
        factors = weights.gates(narrow_gates).to(torch.float32).sigmoid()
        return (normed.flatten(1) * factors).to(projected.dtype)
