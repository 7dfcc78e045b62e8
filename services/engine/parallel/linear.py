"""Linear layers and mixtures of experts whose results are summed over the ranks. Made by the weight loader."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from services.engine.models.linear import Linear
from services.engine.models.mlp import Mlp

AllSum = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A `Linear` whose matrix has a part of the columns. `part` has no bias; the bias is added once, to the sum."""

    part: Linear
    bias: Tensor | None
    all_sum: AllSum

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = self.all_sum(self.part(x))
        return y if self.bias is None else y + self.bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        return residual + self(x)


@dataclass(frozen=True, slots=True)
class SummedMlp:
    """An `Mlp` of experts that each have a part of their inner columns."""

    part: Mlp
    all_sum: AllSum

    def __call__(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return self.all_sum(self.part(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Mlp`."""
        return residual + self(x)
