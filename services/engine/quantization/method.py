"""The interface of a quantization method of prepared checkpoints, which store each linear layer as several tensors.

A method lists the tensors that make up the weight of a module, and builds the weight from them. It neither opens files
nor depends on model families. Implemented in `formats`; called by the checkpoint reader
(`worker/loading/checkpoint.py`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from antiphon.services.engine.quantization.weight import QuantizedWeight


class PreparedMethod(Protocol):
    """A method of prepared checkpoints, with the parameters of one checkpoint."""

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """Returns the tensors that make up a module's weight: name of the part → name of the tensor.

        `module` is a name such as `model.layers.0.mlp.up_proj`; `has` tells whether the checkpoint has a tensor. Empty
        if the module's weight is not quantized.
        """
        ...

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """Returns the weight [out, in] of `shape`. Raises ValueError if the parts do not fit each other or the shape.

        If no backend can multiply the stored form, the weight is returned as a plain tensor.
        """
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name in the checkpoint is to be ignored."""
        del name
        return False
