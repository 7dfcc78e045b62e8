"""What a layer with normed outputs may have beside attention and MLP: experts beside the MLP, and an end of its own.

    LayerInputWeights   the inputs of all layers of a token (`description.LayerInputs`)
    LayerEnding         the gate that lets a layer's inputs in, and the layer's factor on the residual stream
    ExpertsBeside       norm(mlp) + norm(experts): both read the residual stream (`Experts.beside_mlp`)

In plain torch operations on any device. Created by the weight loader, called by the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.activation import ACTIVATIONS
from antiphon.services.engine.models.description import ActivationKind
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.mlp import RoutedMlp
from antiphon.services.engine.models.layers.norm import Norm

_HALF = 2.0**-0.5
"""Keeps the variance of the sum of a table's row and a projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputWeights:
    """`table` [rows, layers * size] and `projection` [hidden] → [layers * size]; `norm` is over `size` numbers."""

    table: Tensor
    projection: Linear
    norm: Norm
    size: int
    hidden_size: int

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Ids [n] and embeddings [n, hidden] → inputs [n, layers, size]."""
        known = ids.where(ids < len(self.table), 0)
        # Rounded like the table, on the host: a copy to the device could not be captured in a graph.
        rows = F.embedding(known, self.table) * torch.tensor(self.size**0.5, dtype=self.table.dtype)
        projected = self.projection(hidden) * self.hidden_size**-0.5
        normed = self.norm(projected.view(-1, self.size)).view_as(projected)
        return ((normed + rows) * _HALF).unflatten(1, (-1, self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGate:
    """`gate` [hidden] → [size], `out` [size] → [hidden], `norm` of the result."""

    gate: Linear
    out: Linear
    norm: Norm
    activation: ActivationKind

    def __call__(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Hidden [n, hidden] and the layer's inputs [n, size] → hidden [n, hidden]."""
        return hidden + self.let_in(hidden, inputs)

    def let_in(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Hidden [n, hidden] and the layer's inputs [n, size] → what is added [n, hidden]."""
        return self.norm(self.out(ACTIVATIONS[self.activation](self.gate(hidden)) * inputs))


@dataclass(frozen=True, slots=True)
class LayerEnding:
    """The end of a layer. `scale` [1], or None."""

    layer: int
    gate: InputGate | None
    scale: Tensor | None

    def __call__(self, hidden: Tensor, inputs: Tensor | None) -> Tensor:
        """Hidden [n, hidden] and the inputs of all layers [n, layers, size] → hidden [n, hidden]."""
        if self.gate is not None:
            assert inputs is not None
            hidden = self.gate(hidden, inputs[:, self.layer])
        return hidden if self.scale is None else hidden * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBeside:
    """Experts beside an MLP, with the norms of what they read and of both results."""

    norm: Norm
    router_norm: Norm
    """With the router's own weights, divided by sqrt(hidden)."""
    experts: RoutedMlp
    all_sum: Callable[[Tensor], Tensor]
    """Sums the experts' results over the ranks that divide them."""
    after_experts: Norm
    after_mlp: Norm

    def added_to(self, inner: Tensor, hidden: Tensor) -> Tensor:
        """The MLP's output and the residual stream, [n, hidden] each → the sum of both results."""
        mixed = self.all_sum(self.experts(self.norm(hidden), self.router_norm(hidden)))
        return self.after_experts.add_to(self.after_mlp(inner), mixed)
