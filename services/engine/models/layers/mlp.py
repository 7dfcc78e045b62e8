"""The MLPs of a decoder, with one interface: x [n, hidden] → [n, hidden]. Created by the weight loader.

GatedMlp   down(act(gate) · up),  [gate | up] = gate_up(x)
PlainMlp   down(act(up(x)))
ExpertMlp  the weighted sum of the selected experts, plus the shared expert's output (times its gate, if it has one)

Called by the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor

from antiphon.services.engine.kernels.activation import ACTIVATIONS, Activation, gated_by
from antiphon.services.engine.kernels.experts import mixed_experts, route
from antiphon.services.engine.kernels.silu_mul import silu_mul
from antiphon.services.engine.models.description import ActivationKind, Experts
from antiphon.services.engine.models.layers.linear import DenseLinear, Linear, QuantizedLinear
from antiphon.services.engine.quantization.weight import QuantizedWeight


class Mlp(Protocol):
    """The interface of the MLPs; see the module's docstring."""

    def __call__(self, x: Tensor) -> Tensor:
        """X [n, hidden] → [n, hidden]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """X [n, hidden] → residual [n, hidden] + mlp(x). May overwrite the residual after x has been read."""
        return residual + self(x)


class GatedMlp(Mlp):
    """A gated MLP. Gate and up projection are one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: ActivationKind) -> None:
        self.gate_up, self.down = gate_up, down
        self._activation: Activation = silu_mul if activation == "silu" else gated_by(activation)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        return self._activation(self.gate_up(x))


class PlainMlp(Mlp):
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
    gate: Linear | None
    """None: the weight is one."""

    def added_to(self, mixed: Tensor, x: Tensor) -> Tensor:
        """X [n, hidden] → mixed [n, hidden] + the expert's output for x."""
        if self.gate is None:
            return self.mlp.add_to(mixed, x)
        return torch.addcmul(mixed, self.gate(x).sigmoid(), self.mlp(x))


@dataclass(frozen=True, slots=True)
class ExactRouter:
    """A router whose product is computed in float32, independent of the type of x.

    `product`: the product with the router's weight [experts, hidden] float32.
    """

    product: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """X [n, hidden] → logits [n, experts] float32."""
        return self.product(x.to(torch.float32))


ExpertMatrices = Tensor | tuple[QuantizedWeight, ...]
"""The same matrix of all experts: plain [experts, out, in], or quantized, one [out, in] for each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """The parts of a mixture of experts. An expert's matrices: `gate_up` [2m, hidden], `down` [hidden, m]."""

    experts: Experts
    router: Linear | ExactRouter
    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: ActivationKind
    shared: SharedExpert | None
    correction: Tensor | None = None
    """[experts] float32, see `Experts.correction`."""
    up_bias: Tensor | None = None
    """[experts, 2m]"""
    down_bias: Tensor | None = None
    """[experts, hidden]"""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X [n, hidden] → weights [n, k] and experts [n, k] int64 of each token."""
        e = self.experts
        return route(
            self.router(x),
            e.num_per_token,
            e.normalise,
            sigmoid=e.scoring == "sigmoid",
            correction=self.correction,
            groups=(e.num_groups, e.num_chosen_groups),
            best_of_group=e.best_of_group,
            scale=e.scale,
        )


MakeLinear = Callable[["Tensor | QuantizedWeight", Tensor | None], Linear]


class ExpertMlp(Mlp):
    """A mixture of experts; see the module's docstring."""

    def __init__(self, parts: ExpertParts, make: MakeLinear | None = None) -> None:
        """`make` creates the linear layer from an expert's matrix and bias; by default the matrix keeps its form."""
        self.parts = parts
        self.gate_up, self.down = (
            tuple(map(make or _linear, matrices, repeat(None) if biases is None else biases))
            for matrices, biases in ((parts.gate_up, parts.up_bias), (parts.down, parts.down_bias))
        )
        self._activation: Activation = gated_by(parts.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        p = self.parts
        weights, experts = p.route(x)
        mixed = mixed_experts(x, weights, experts, self.gate_up, self.down, self._activation)
        return mixed if p.shared is None else p.shared.added_to(mixed, x)


def _linear(weight: "Tensor | QuantizedWeight", bias: Tensor | None) -> Linear:
    return QuantizedLinear(weight, bias) if isinstance(weight, QuantizedWeight) else DenseLinear(weight, bias)
