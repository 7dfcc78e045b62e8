"""Layers whose results are summed over the ranks (row parallel). Created by the weight loader."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class Summed(Linear):
    """A `Linear` with a part of the matrix's columns, or an `Mlp` of experts with a part of their inner columns.

    `part` has no bias; the bias is added once, to the sum.
    """

    part: Linear | Mlp
    all_sum: Callable[[Tensor], Tensor]
    bias: Tensor | None = None

    def around(self, change: Callable[[Linear], Linear]) -> "Summed":
        """Returns the layer with `change` applied to its matrix, so that the added products are summed too."""
        return replace(self, part=change(cast(Linear, self.part)))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear` and `Mlp`."""
        y = self.all_sum(self.part(x))
        return y if self.bias is None else y + self.bias
