"""The norms of a decoder, each a callable x [..., n] → the same shape and type. Created by the weight loader.

RmsNorm         x / rms(x) · w
RmsPlusOneNorm  x / rms(x) · (1 + w), in float32 throughout, as its checkpoints were trained
LayerNorm       (x - mean(x)) / std(x) · w + b
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.models.description import NormKind


class Norm(Protocol):
    """The interface of the norms; see the module's docstring."""

    def __call__(self, x: Tensor) -> Tensor:
        """X [..., n] → the same shape and type."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """X [..., n] → residual + norm(x)."""
        return residual + self(x)


@dataclass(frozen=True, slots=True)
class RmsNorm(Norm):
    """RMS norm with `weight` [n]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class RmsPlusOneNorm(Norm):
    """RMS norm that multiplies by 1 + weight. `factor` [n] float32 is one plus the checkpoint's weight."""

    factor: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x.to(torch.float32), self.factor, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm(Norm):
    """Layer norm with `weight` and `bias` [n]."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    """Returns the norm of a kind. Only `layer` has a bias, which it requires."""
    if kind == "rms":
        return RmsNorm(weight, eps)
    if kind == "rms_plus_one":
        return RmsPlusOneNorm(weight.to(torch.float32) + 1.0, eps)
    assert bias is not None
    return LayerNorm(weight, bias, eps)
