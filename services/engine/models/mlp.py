"""The MLPs of a decoder, with one interface: x [n, hidden] → [n, hidden]. Created by the weight loader.

GatedMlp   down(act(gate) · up),  [gate | up] = gate_up(x)
PlainMlp   down(act(up(x)))
ExpertMlp  the weighted sum of the selected experts, plus the shared expert times its gate if there is one

Called by the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.engine.kernels.activation import ACTIVATIONS, Activation, gated
from services.engine.kernels.experts import mixed_experts, route
from services.engine.kernels.silu_mul import silu_mul
from services.engine.models.description import ActivationKind, Experts
from services.engine.models.linear import DenseLinear, Linear, QuantizedLinear
from services.engine.quantization.weight import QuantizedWeight


class Mlp(Protocol):
    """The interface of the MLPs; see the module's docstring."""

    def __call__(self, x: Tensor) -> Tensor:
        """X [n, hidden] → [n, hidden]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """X [n, hidden] → residual [n, hidden] + mlp(x). May overwrite the residual after x has been read."""
        ...


class GatedMlp:
    """A gated MLP. Gate and up projection are one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: ActivationKind) -> None:
        self.gate_up, self.down = gate_up, down
        self._silu = activation == "silu"
        self._activation: Activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        return silu_mul(gate_up) if self._silu else gated(self._activation, gate_up)


class PlainMlp:
    """An MLP without gate."""

    def __init__(self, up: Linear, down: Linear, activation: ActivationKind) -> None:
        self.up, self.down = up, down
        self._activation: Activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down(self._activation(self.up(x)))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down.add_to(residual, self._activation(self.up(x)))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token uses. `gate` computes its weight before the sigmoid, [n, hidden] → [n, 1]."""

    mlp: Mlp
    gate: Linear


ExpertMatrices = Tensor | tuple[QuantizedWeight, ...]
"""The same matrix of all experts: plain [experts, out, in], or quantized, one [out, in] for each expert."""


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The parts of a mixture of experts. An expert's matrices: `gate_up` [2m, hidden], `down` [hidden, m]."""

    experts: Experts
    router: Linear
    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: ActivationKind
    shared: SharedExpert | None


MakeLinear = Callable[["Tensor | QuantizedWeight"], Linear]


class ExpertMlp:
    """A mixture of experts; see the module's docstring."""

    def __init__(self, parts: ExpertParts, make: MakeLinear | None = None) -> None:
        """`make` makes the linear layer of an expert's matrix; by default it keeps the matrix in its form."""
        self.parts = parts
        self.gate_up, self.down = (
            tuple((make or _linear)(weight) for weight in matrices) for matrices in (parts.gate_up, parts.down)
        )
        self._activation: Activation = ACTIVATIONS[parts.activation]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        p = self.parts
        weights, experts = route(p.router(x), p.experts.num_per_token, p.experts.normalise)
        mixed = mixed_experts(x, weights, experts, self.gate_up, self.down, self._activation)
        if p.shared is None:
            return mixed
        return torch.addcmul(mixed, p.shared.gate(x).sigmoid(), p.shared.mlp(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return residual + self(x)


def _linear(weight: "Tensor | QuantizedWeight") -> Linear:
    return QuantizedLinear(weight) if isinstance(weight, QuantizedWeight) else DenseLinear(weight)
