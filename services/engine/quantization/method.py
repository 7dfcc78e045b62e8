"""The interface of a method of prepared checkpoints, whose linear layers are stored as several tensors each.

A method says which tensors stand for the weight of a module and makes the weight of them. It neither opens files nor
knows model families. Implemented in `formats`; called by the checkpoint reader (`worker/loading/checkpoint.py`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from services.engine.quantization.weight import QuantizedWeight


class PreparedMethod(Protocol):
    """A method of prepared checkpoints, with the parameters of one checkpoint."""

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """Returns the tensors that stand for a module's weight: name of the part → name of the tensor.

        `module` is a name such as `model.layers.0.mlp.up_proj`; `has` tells whether the checkpoint has a tensor. Empty
        if the module's weight is stored plainly.
        """
        ...

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """Returns the weight [out, in] of `shape`. Raises ValueError if the parts do not fit each other or the shape.

        A weight that no backend multiplies in its stored form is returned as a plain tensor.
        """
        ...

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint may have a tensor of this name that nothing needs."""
        ...
