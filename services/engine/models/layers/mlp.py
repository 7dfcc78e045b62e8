"""The MLPs of a decoder, with one interface: x [n, hidden] → [n, hidden]. Created by the weight loader.

GatedMlp   down(act(gate) · up),  [gate | up] = gate_up(x)
SparseMlp  the same with gates of which most become zero before the activation (`DecoderDescription.gate_cuts`)
PlainMlp   down(act(up(x)))
ExpertMlp  the weighted sum of the selected experts, plus the shared expert's output (times its gate, if it has one)
NoMlp      nothing: the layer has no MLP

Called by the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor

from antiphon.services.engine.kernels.activation import ACTIVATIONS, Activation, gated_by, xielu
from antiphon.services.engine.kernels.experts import mixed_experts, route
from antiphon.services.engine.models.description import UNSCALED, ActivationKind, Experts
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


class RoutedMlp(Mlp, Protocol):
    """A mixture of experts, whose router may read something else than the experts."""

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """See `Mlp`. `routed` [n, hidden]: what the router reads; None: x."""
        ...


class GatedMlp(Mlp):
    """A gated MLP. Gate and up projection are one matrix."""

    def __init__(
        self, gate_up: Linear, down: Linear, activation: ActivationKind, scales: tuple[float, float] = UNSCALED
    ) -> None:
        """`scales`: see `DecoderDescription.mlp_scales`."""
        self.gate_up, self.down, self._scales = gate_up, down, scales
        self._activation: Activation = gated_by(activation)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        if self._scales == UNSCALED:
            return self._activation(self.gate_up(x))
        return self._activation(with_scaled_gates(self.gate_up(x), self._scales)) * self._scales[1]


class SparseMlp(GatedMlp):
    """A gated MLP whose gates are cut, see `DecoderDescription.gate_cuts`."""

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        activation: ActivationKind,
        cut: float,
        ranks: int = 1,
        all_sum: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """`ranks`: number of those that divide the gates; `all_sum` sums over them."""
        super().__init__(gate_up, down, activation)
        self._cut, self._ranks, self._all_sum = cut, ranks, all_sum

    def _inner(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        gates = gate_up[:, : gate_up.shape[1] // 2]
        wide = gates.to(torch.float32)
        above = wide - self._mean(wide)
        deviation = self._mean(above.square()).sqrt()
        gates.copy_((above - deviation * self._cut).clamp_(min=0))
        return self._activation(gate_up)

    def _mean(self, x: Tensor) -> Tensor:
        """X [n, gates of this rank] → the mean of all ranks' numbers, [n, 1]."""
        return self._all_sum(x.sum(1, keepdim=True)) / (self._ranks * x.shape[1])


def with_scaled_gates(gate_up: Tensor, scales: tuple[float, float]) -> Tensor:
    """Returns gate_up [n, 2m], whose gates were multiplied in place by the first of `DecoderDescription.mlp_scales`."""
    gate_up[:, : gate_up.shape[1] // 2] *= scales[0]
    return gate_up


class PlainMlp(Mlp):
    """An MLP without gate."""

    def __init__(self, up: Linear, down: Linear, activation: ActivationKind, numbers: Tensor | None = None) -> None:
        """`numbers` [4]: those of `xielu`."""
        self.up, self.down = up, down
        self._activation: Activation = ACTIVATIONS[activation] if numbers is None else partial(xielu, numbers)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down(self._activation(self.up(x)))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.down.add_to(residual, self._activation(self.up(x)))


class NoMlp(Mlp):
    """What a layer without an MLP has in its place."""

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return torch.zeros_like(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return residual


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
    """The parts of a mixture of experts. An expert's matrices: `gate_up` [2m, hidden], `down` [hidden, m].

    Without gates an expert has an up [m, hidden] in place of `gate_up`. With `latent`, the matrices that convert from
    hidden states and back, an expert has the latents' width in place of hidden.
    """

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
    gated: bool = True
    latent: tuple[Linear, Linear] | None = None
    scales: Tensor | None = None
    """[experts] float32: factors on the weights, see `Experts.beside_mlp`."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X [n, hidden] → weights [n, k] and experts [n, k] int64 of each token."""
        e = self.experts
        weights, experts = route(
            self.router(x),
            e.num_per_token,
            e.normalise,
            sigmoid=e.scoring == "sigmoid",
            correction=self.correction,
            groups=(e.num_groups, e.num_chosen_groups),
            best_of_group=e.best_of_group,
            scale=e.scale,
        )
        return weights if self.scales is None else weights * self.scales[experts].to(weights.dtype), experts


MakeLinear = Callable[["Tensor | QuantizedWeight", Tensor | None], Linear]


class ExpertMlp(RoutedMlp):
    """A mixture of experts; see the module's docstring."""

    def __init__(self, parts: ExpertParts, make: MakeLinear | None = None) -> None:
        """`make` creates the linear layer from an expert's matrix and bias; by default the matrix keeps its form."""
        self.parts = parts
        self.gate_up, self.down = (
            tuple(map(make or _linear, matrices, repeat(None) if biases is None else biases))
            for matrices, biases in ((parts.gate_up, parts.up_bias), (parts.down, parts.down_bias))
        )
        self._activation: Activation = gated_by(parts.activation) if parts.gated else ACTIVATIONS[parts.activation]

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """See `RoutedMlp`."""
        p = self.parts
        weights, experts = p.route(x if routed is None else routed)
        inputs = x if p.latent is None else p.latent[0](x)
        mixed = mixed_experts(
            inputs, weights, experts, self.gate_up, self.down, self._activation, p.experts.weighted_inputs
        )
        mixed = mixed if p.latent is None else p.latent[1](mixed)
        return mixed if p.shared is None else p.shared.added_to(mixed, x)


def _linear(weight: "Tensor | QuantizedWeight", bias: Tensor | None) -> Linear:
    return QuantizedLinear(weight, bias) if isinstance(weight, QuantizedWeight) else DenseLinear(weight, bias)
