"""The interface of linear layers, y = x Wᵀ + b, independent of the form in which W is stored.

    DenseLinear    W [out, in] as in the checkpoint; any device
    PackedLinear   W in oneDNN's blocked layout, made once; CPU only. Compared with packing on every call, it takes 0.65
                   to 1.0 of the time in bfloat16 at 1 to 128 rows, 0.45 to 0.9 in float32 at 8 to 128 rows, the same
                   time at more rows, and up to 1.25 for a single float32 row
    QuantizedLinear  W in 8 or 4 bits, dequantized in each call; any device. It saves memory but no time

Called by the decoder; created by the weight loader.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.quantization.weight import QuantizedWeight

_PACKING_ROWS = 512
"""Number of rows of x for which the blocked layout is chosen. Other numbers of rows work too and are not slower."""


class Linear(Protocol):
    """A linear layer: a weight with its bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """X [n, in] → [n, out], both of the weight's dtype."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """X [n, in] → residual [n, out] + x Wᵀ + b. May overwrite the residual, which the caller does not use again."""
        return residual + self(x)


class DenseLinear(Linear):
    """A linear layer with a dense weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)


class PackedLinear(Linear):
    """A linear layer with a weight in oneDNN's layout. The dense weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`; the sum is rounded once."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")


class QuantizedLinear(Linear):
    """A linear layer with a quantized weight: the reference for the products of faster backends."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = self._weight.round_rows(self._weight.ordered(x))
        return F.linear(rows, self._weight.numbers().to(x.dtype), self._bias)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine can multiply with packed weights of this type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def make_linear(weight: "Tensor | QuantizedWeight", bias: Tensor | None = None) -> Linear:
    """Returns a linear layer with the fastest form of a weight [out, in] on its device."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinear(weight, bias)
    return PackedLinear(weight, bias) if can_pack(weight.dtype, weight.device) else DenseLinear(weight, bias)
