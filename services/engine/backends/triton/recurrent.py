"""Layers with a recurrent state, with Triton kernels, from their first projection to the last one.

They take `DeviceMoves` from `StepInputs.states`. Their weights are copies of what they get, for the reason given in
`TritonOperations.linear`. Created by `TritonOperations`, called by the decoder.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.recurrent.convolution import convolve
from antiphon.services.engine.backends.triton.kernels.recurrent.delta import attend_delta, finish_delta
from antiphon.services.engine.backends.triton.kernels.recurrent.state_space import (
    gate_heads,
    norm_parts,
    scan_channels,
    scan_heads,
)
from antiphon.services.engine.models.layers.attention import StepInputs, places_of
from antiphon.services.engine.models.layers.recurrent import (
    ChannelDeltaWeights,
    ChannelSpaceWeights,
    ConvolutionWeights,
    DeltaWeights,
    RecurrentWeights,
    StateSpaceWeights,
)
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace

Weights = TypeVar("Weights", bound=RecurrentWeights)


class _Convolved(Generic[Weights]):
    """The weights and states of a model's layers, and the convolution that all kinds of them have."""

    gated = False
    """See `convolve`."""

    def __init__(self, weights: Mapping[int, Weights]) -> None:
        self._places = places_of(weights)
        self._weights = dict(weights)
        self._kernels = {layer: (_transposed(each.kernel), _bias(each)) for layer, each in weights.items()}

    def _convolved(self, layer: int, inputs: Tensor, step: StepInputs) -> tuple[Weights, Tensor, Tensor]:
        """Returns the weights and states of a layer, and the convolution of the inputs, whose states it writes."""
        states = step.state_caches[self._places[layer]]
        mixed = convolve(inputs, *self._kernels[layer], states, step.states, gated=self.gated)
        return self._weights[layer], states, mixed


class TritonConvolution(_Convolved[ConvolutionWeights]):
    """The gated short convolutions of a model, by layer."""

    gated = True

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`: `projected` [num_tokens, 3 channels]."""
        return self._convolved(layer, projected, step)[2]


class TritonDelta(_Convolved[DeltaWeights]):
    """The gated delta rule of a model's layers."""

    def __init__(self, shape: GatedDelta, weights: Mapping[int, DeltaWeights]) -> None:
        super().__init__({layer: replace(each, norm=each.norm.clone()) for layer, each in weights.items()})
        self._shape = shape

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        assert gates is not None
        shape, channels = self._shape, self._shape.channels
        weights, states, mixed = self._convolved(layer, projected[:, :channels], step)
        betas, speeds = gates.chunk(2, dim=1)
        decay = weights.decay, weights.decay_bias
        attended = attend_delta(shape, mixed, betas, speeds, *decay, states, step.states)
        return finish_delta(shape, attended, projected[:, channels:], weights.norm)


class TritonChannelDelta(_Convolved[ChannelDeltaWeights]):
    """The delta rule with decays for each dimension of keys of a model's layers."""

    def __init__(self, shape: ChannelDelta, weights: Mapping[int, ChannelDeltaWeights]) -> None:
        super().__init__({layer: replace(each, norm=each.norm.clone()) for layer, each in weights.items()})
        self._shape = shape

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        assert gates is not None
        weights, states, mixed = self._convolved(layer, projected, step)
        narrow_decays, narrow_gates, betas = gates.split(self._shape.gate_widths, dim=1)
        speeds, decay = weights.decays(narrow_decays), (weights.decay, weights.decay_bias)
        attended = attend_delta(self._shape, mixed, betas, speeds, *decay, states, step.states)
        return finish_delta(self._shape, attended, weights.gates(narrow_gates), weights.norm)


class TritonStateSpace(_Convolved[StateSpaceWeights]):
    """The state spaces with a decay for each head of a model's layers."""

    def __init__(self, shape: StateSpace, weights: Mapping[int, StateSpaceWeights]) -> None:
        super().__init__(weights)
        self._shape = shape

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        s = self._shape
        value_gates, inputs, times = projected.split((s.width, s.channels, s.num_heads), dim=1)
        weights, states, mixed = self._convolved(layer, inputs, step)
        vectors = weights.decay, weights.decay_bias, weights.skip
        read = scan_heads(s, mixed, times, *vectors, states, step.states)
        return gate_heads(s, read, value_gates, weights.norm)


class TritonChannelSpace(_Convolved[ChannelSpaceWeights]):
    """The state spaces with decays for each channel of a model's layers."""

    def __init__(self, shape: ChannelSpace, weights: Mapping[int, ChannelSpaceWeights]) -> None:
        super().__init__({layer: replace(each, decay=_transposed(each.decay)) for layer, each in weights.items()})
        self._shape = shape

    def mix(self, layer: int, projected: Tensor, gates: Tensor | None, step: StepInputs) -> Tensor:
        """See `Recurrent`."""
        s = self._shape
        inputs, value_gates = projected.chunk(2, dim=1)
        weights, states, values = self._convolved(layer, inputs, step)
        selected = weights.select(values)
        if s.part_norms != "none":
            norm_parts(s, selected, weights.norm)
        steps = weights.step(selected[:, : s.step_rank])
        vectors = weights.decay, weights.decay_bias, weights.skip
        return scan_channels(s, values, selected, steps, value_gates, *vectors, states, step.states)


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _bias(weights: RecurrentWeights) -> Tensor | None:
    bias = None if isinstance(weights, DeltaWeights | ChannelDeltaWeights) else weights.bias
    return None if bias is None else bias.clone()
