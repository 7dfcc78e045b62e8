"""Reads the parameters of a decoder by name, for every backend: plain tensors, and matrices that may be quantized.

The layout says which tensors of the checkpoint make up a parameter, the checkpoint reader joins them, and a quantizer,
if there is one, rounds plain matrices on the way. The backends decide what becomes of the result. Called by
`weights.py` (PyTorch and Triton) and `cpu/decoder.py` (C++).
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from services.engine.models.description import DecoderDescription
from services.engine.models.layout import Parameter, ignored_names
from services.engine.quantization.choice import WeightForm
from services.engine.quantization.weight import QuantizedWeight
from services.engine.worker.checkpoint import Checkpoint

Matrix = Tensor | QuantizedWeight
_LAYER = re.compile(r"layers\.\d+\.")


class ParameterReader:
    """The parameters of a checkpoint. Use as a context manager; tensors read from it stay valid afterwards."""

    def __init__(
        self,
        model_dir: Path,
        description: DecoderDescription,
        layout: tuple[Parameter, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm,
    ) -> None:
        """Opens and checks the files. Raises `ServiceError` naming tensors that are missing, wrong or superfluous."""
        self._dtype, self._device, self._form = dtype, device, form
        self._parameters = {parameter.name: parameter for parameter in layout}
        self._checkpoint = Checkpoint(model_dir, form.method, smoothquant=form.is_smoothquant)
        try:
            self._checkpoint.check(layout, ignored_names(description))
        except BaseException:
            self._checkpoint.close()
            raise

    def __enter__(self) -> "ParameterReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._checkpoint.close()

    def has(self, name: str) -> bool:
        """Whether the model has a parameter."""
        return name in self._parameters

    def tensor(self, name: str) -> Tensor:
        """Returns a parameter as a plain tensor of the computing type."""
        return self._checkpoint.read(self._parameters[name], self._dtype, self._device)

    def owned(self, name: str) -> Tensor:
        """Returns a plain tensor, copied if it would be the file's mapped pages.

        Every step reads the tensor, and the system could evict mapped pages.
        """
        return self.tensor(name).clone() if self.is_mapped(name) else self.tensor(name)

    def matrix(self, name: str) -> Matrix:
        """Returns the weight [out, in] of a linear layer, such as `layers.3.qkv`: quantized, or a plain tensor."""
        weight = self._checkpoint.matrix(self._parameters[f"{name}.weight"], self._dtype, self._device)
        return self.rounded(name, weight) if isinstance(weight, Tensor) else weight

    def rounded(self, name: str, weight: Tensor) -> Matrix:
        """Returns a plain weight as the quantizer rounds the matrix of that name; unchanged if it does not."""
        quantize = self._form.quantize
        return weight if quantize is None else quantize(_LAYER.sub("", name), weight)

    def floats(self, name: str) -> Tensor:
        """Returns a plain tensor as float32."""
        return self.tensor(name).to(torch.float32)

    def bias(self, name: str) -> Tensor | None:
        """Returns the bias of a linear layer or norm in the computing type; None if it has none."""
        return self.owned(f"{name}.bias") if self.has(f"{name}.bias") else None

    def is_mapped(self, name: str) -> bool:
        """Whether `tensor` returns the mapped pages of the file instead of a copy."""
        return self._checkpoint.is_mapped(self._parameters[name], self._dtype, self._device)
