"""The operations that a decoder is made of, behind one seam: a backend chooses them once, when a model is loaded.

`TorchOperations` are the reference, on any device. Fused ones stand behind the same methods (`services/engine/triton`):
where several steps may be one, the seam names them together (`normed_linear`, `normed_mlp`). Called by the weight
loader, which makes the parts, and by the decoder, which joins them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.engine.models.attention import Attention, ReferenceAttention
from services.engine.models.description import ActivationKind, DecoderDescription, NormKind
from services.engine.models.linear import DenseLinear, Linear, make_linear
from services.engine.models.mlp import ExpertMlp, ExpertParts, GatedMlp, Mlp, PlainMlp
from services.engine.models.norm import Norm, make_norm


class ResidualMlp(Protocol):
    """An MLP with what stands before it."""

    def add_to(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """Hidden [n, hidden] → residual [n, hidden] + mlp(norm(hidden))."""
        ...


class Operations(Protocol):
    """See the module."""

    def norm(self, kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """A norm of a width."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with a weight [out, in]."""
        ...

    def unpacked_linear(self, weight: Tensor) -> Linear:
        """A product with a weight that others read as it is, so that it is not to be copied."""
        ...

    def mlp(self, up: Linear, down: Linear, activation: ActivationKind, gated: bool) -> Mlp:
        """An MLP; if gated, gate and up are one product."""
        ...

    def expert_mlp(self, parts: ExpertParts) -> Mlp:
        """A mixture of experts."""
        ...

    def attention(
        self, description: DecoderDescription, qk_norms: tuple[Tensor | None, ...], like: Tensor
    ) -> Attention:
        """The attention of all layers, of the type and on the device of `like`."""
        ...

    def normed_linear(self, norm: Norm, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Linear(norm(x))."""
        ...

    def normed_mlp(self, norm: Norm, mlp: Mlp) -> ResidualMlp:
        """Residual + mlp(norm(x))."""
        ...


class TorchOperations:
    """The reference: plain torch operations, with weights in the form that is fastest on their device."""

    def norm(self, kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """See `Operations`."""
        return make_norm(kind, weight, bias, eps)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Operations`."""
        return make_linear(weight, bias)

    def unpacked_linear(self, weight: Tensor) -> Linear:
        """See `Operations`."""
        return DenseLinear(weight)

    def mlp(self, up: Linear, down: Linear, activation: ActivationKind, gated: bool) -> Mlp:
        """See `Operations`."""
        return (GatedMlp if gated else PlainMlp)(up, down, activation)

    def expert_mlp(self, parts: ExpertParts) -> Mlp:
        """See `Operations`."""
        return ExpertMlp(parts)

    def attention(
        self, description: DecoderDescription, qk_norms: tuple[Tensor | None, ...], like: Tensor
    ) -> Attention:
        """See `Operations`."""
        return ReferenceAttention(description, qk_norms, like)

    def normed_linear(self, norm: Norm, linear: Linear) -> Callable[[Tensor], Tensor]:
        """See `Operations`."""
        return lambda x: linear(norm(x))

    def normed_mlp(self, norm: Norm, mlp: Mlp) -> ResidualMlp:
        """See `Operations`."""
        return NormThenMlp(norm, mlp)


@dataclass(frozen=True, slots=True)
class NormThenMlp:
    """A `ResidualMlp` of two steps."""

    norm: Norm
    mlp: Mlp

    def add_to(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """See `ResidualMlp`."""
        return self.mlp.add_to(residual, self.norm(hidden))


TORCH_OPERATIONS = TorchOperations()
