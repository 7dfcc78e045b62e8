"""A decoder's operations. Which implementation is used is chosen once, when a model is loaded.

`Operations` is the reference and runs on any device; `backends/triton/operations` uses GPU kernels. Called by the
weight loader, which creates the parts, and by the decoder, which combines them.
"""

from collections.abc import Mapping

from torch import Tensor

from antiphon.services.engine.models.description import (
    UNSCALED,
    ActivationKind,
    DecoderDescription,
    LatentAttention,
    NormKind,
)
from antiphon.services.engine.models.layers.attention import Attention, ReferenceAttention
from antiphon.services.engine.models.layers.latent_attention import LatentWeights, ReferenceLatentAttention
from antiphon.services.engine.models.layers.linear import DenseLinear, Linear, make_linear
from antiphon.services.engine.models.layers.mlp import ExpertMlp, ExpertParts, GatedMlp, Mlp, PlainMlp, RoutedMlp
from antiphon.services.engine.models.layers.norm import Norm, make_norm
from antiphon.services.engine.models.layers.recurrent import (
    ChannelDeltaWeights,
    ChannelSpaceWeights,
    ConvolutionWeights,
    DeltaWeights,
    Recurrent,
    ReferenceChannelDelta,
    ReferenceChannelSpace,
    ReferenceConvolution,
    ReferenceDelta,
    ReferenceStateSpace,
    StateSpaceWeights,
)
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace
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

    def mlp(
        self,
        up: Linear,
        down: Linear,
        activation: ActivationKind,
        gated: bool,
        numbers: Tensor | None = None,
        scales: tuple[float, float] = UNSCALED,
    ) -> Mlp:
        """Returns an MLP. If it is gated, `up` computes gate and up together. `numbers` [4] float32: those of xielu.

        `scales`: see `DecoderDescription.mlp_scales`.
        """
        return GatedMlp(up, down, activation, scales) if gated else PlainMlp(up, down, activation, numbers)

    def expert_mlp(self, parts: ExpertParts) -> RoutedMlp:
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

    def convolution(self, weights: Mapping[int, ConvolutionWeights]) -> Recurrent:
        """Returns the gated short convolutions of the layers that have them; see `ShortConvolution`."""
        return ReferenceConvolution(weights)

    def delta(self, shape: GatedDelta, weights: Mapping[int, DeltaWeights]) -> Recurrent:
        """Returns the gated delta rule of the layers that have it."""
        return ReferenceDelta(shape, weights)

    def state_space(self, shape: StateSpace, weights: Mapping[int, StateSpaceWeights]) -> Recurrent:
        """Returns the state spaces of the layers that have them."""
        return ReferenceStateSpace(shape, weights)

    def channel_space(self, shape: ChannelSpace, weights: Mapping[int, ChannelSpaceWeights]) -> Recurrent:
        """Returns the state spaces with decays for each channel of the layers that have them."""
        return ReferenceChannelSpace(shape, weights)

    def channel_delta(self, shape: ChannelDelta, weights: Mapping[int, ChannelDeltaWeights]) -> Recurrent:
        """Returns the delta rule with decays for each dimension of keys of the layers that have it."""
        return ReferenceChannelDelta(shape, weights)


TORCH_OPERATIONS = Operations()
