"""A decoder's operations. Which implementation is used is chosen once, when a model is loaded.

`Operations` is the reference and runs on any device; `backends/triton/operations` uses GPU kernels. Called by the
weight loader, which creates the parts, and by the decoder, which combines them.
"""

from torch import Tensor

from antiphon.services.engine.models.description import ActivationKind, DecoderDescription, LatentAttention, NormKind
from antiphon.services.engine.models.layers.attention import Attention, ReferenceAttention
from antiphon.services.engine.models.layers.latent_attention import LatentWeights, ReferenceLatentAttention
from antiphon.services.engine.models.layers.linear import DenseLinear, Linear, make_linear
from antiphon.services.engine.models.layers.mlp import ExpertMlp, ExpertParts, GatedMlp, Mlp, PlainMlp
from antiphon.services.engine.models.layers.norm import Norm, make_norm
from antiphon.services.engine.quantization.weight import QuantizedWeight


class Operations:
    """The reference: plain torch operations, with weights in the form that is fastest on their device."""

    def norm(self, kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Returns a norm of a kind with these parameters [n]."""
        return make_norm(kind, weight, bias, eps)

    def linear(self, weight: "Tensor | QuantizedWeight", bias: Tensor | None = None) -> Linear:
        """Returns a linear layer with a weight [out, in]."""
        return make_linear(weight, bias)

    def unpacked_linear(self, weight: Tensor) -> Linear:
        """Returns a linear layer that does not copy its weight, because the weight is also used elsewhere."""
        return DenseLinear(weight)

    def mlp(self, up: Linear, down: Linear, activation: ActivationKind, gated: bool) -> Mlp:
        """Returns an MLP. If it is gated, `up` computes gate and up together."""
        return (GatedMlp if gated else PlainMlp)(up, down, activation)

    def expert_mlp(self, parts: ExpertParts) -> Mlp:
        """Returns a mixture of experts."""
        return ExpertMlp(parts)

    def attention(
        self,
        description: DecoderDescription,
        qk_norms: tuple[Tensor | None, ...],
        like: Tensor,
        sinks: tuple[Tensor | None, ...],
    ) -> Attention:
        """Returns the attention of all layers, with the type and on the device of `like`; see `ReferenceAttention`."""
        return ReferenceAttention(description, qk_norms, like, sinks)

    def latent_attention(
        self, description: DecoderDescription, shape: LatentAttention, weights: tuple[LatentWeights, ...], like: Tensor
    ) -> Attention:
        """Returns the attention over latents of all layers; see `ReferenceLatentAttention`."""
        return ReferenceLatentAttention(description, shape, weights, like)


TORCH_OPERATIONS = Operations()
