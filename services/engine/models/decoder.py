"""The forward pass, over a paged KV cache, of every decoder that a `DecoderDescription` can describe.

    h = embedding[ids] · scale + position_embedding[positions]
    per layer:  attention and MLP around the residual stream, in one of the orders of `ResidualKind`
    hidden = norm(h),  logits = head(hidden)

The tokens of all sequences of a step are concatenated; `StepInputs` describes the sequences. The operations are
selected once, from the model's description and the kinds of its weights; the forward pass itself only checks whether
optional parts are `None`. A decoder has no state: weights and KV caches are passed to it. Called by the worker.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.attention import Attention, StepInputs
from antiphon.services.engine.models.layers.ending import ExpertsBeside, LayerEnding, LayerInputWeights
from antiphon.services.engine.models.layers.given import GivenEmbeddings
from antiphon.services.engine.models.layers.latent_attention import LatentWeights
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.mlp import Mlp
from antiphon.services.engine.models.layers.norm import Norm
from antiphon.services.engine.models.layers.recurrent import (
    ChannelDeltaWeights,
    ChannelSpaceWeights,
    ConvolutionWeights,
    DeltaWeights,
    Recurrent,
    RecurrentWeights,
    StateSpaceWeights,
)
from antiphon.services.engine.models.layers.streams import SideProduct, StreamedLayer, StreamEnds, StreamMix
from antiphon.services.engine.models.operations import TORCH_OPERATIONS, Operations
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The weights that a draft layer has besides those of other layers. `input` [hidden, 2 hidden]."""

    input: Linear
    embedding_norm: Norm
    hidden_norm: Norm
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer. `qk_norm` [heads + kv_heads, head_dim] has a row for each query and key head."""

    input_norm: Norm | None
    """None: attention reads the residual stream directly."""
    qkv: Linear
    """The projections of the hidden states: queries, keys and values, or those of latent attention, or `mix_in`."""
    o: Linear
    mlp_norm: Norm | None
    """None: the MLP reads the output of `input_norm`, or the residual stream if there is none; or `mlp` is `NoMlp`."""
    mlp: Mlp
    qk_norm: Tensor | None = None
    after_attention_norm: Norm | None = None
    after_mlp_norm: Norm | None = None
    sinks: Tensor | None = None
    """[heads] float32: the score of each head's sink."""
    latent: LatentWeights | None = None
    """Weights of latent attention besides `qkv` and `o`."""
    gate: Linear | None = None
    """The projection `attention_gate` or `mix_gate`."""
    experts_beside: ExpertsBeside | None = None
    """Experts beside `mlp`."""
    ending: LayerEnding | None = None
    """What the layer does after the MLP."""
    streams: StreamMix | None = None
    """What the layer reads of several streams, and writes to them, in place of `ending`."""
    side: SideProduct | None = None
    """What is beside attention."""
    recurrent: RecurrentWeights | None = None
    """Set for a layer that has a recurrent state: its weights besides the projections."""
    beside: tuple[Linear, Linear] | None = None
    """`mix_in` and `mix_out` of a layer that has attention too, whose projections are `qkv` and `o`."""
    draft: DraftWeights | None = None
    """Set for a draft layer (`DecoderDescription.num_draft_layers`)."""


Block = Callable[[Tensor, Any, StepInputs], Tensor]
"""A layer: hidden, what attention has prepared, the step → hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The weights of a decoder. `embedding` [vocab, hidden], `positions` [learned positions, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    positions: Tensor | None = None
    layer_inputs: LayerInputWeights | None = None
    streams: StreamEnds | None = None
    nbytes: int = 0
    """Bytes of all weights, as loaded."""
    around: Callable[[int, Block], Block] | None = None
    """Puts around a layer's function what brings its weights, where they are not all on the device."""


class LanguageModel(Protocol):
    """The interface of a model for the worker.

    The methods write the step's keys and values to the cache. `ids` and `positions` are [num_tokens].
    """

    @property
    def embedding_size(self) -> int:
        """Width of the hidden states that `hidden_and_logits` returns; 0 if the model does not expose them."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, as they were loaded."""
        ...

    @property
    def weights(self) -> object:
        """The object with the model's tensors: a dataclass or a torch module."""
        ...

    def forward(self, ids: Tensor, positions: Tensor, step: StepInputs) -> object:
        """Runs a step in which no sequence samples."""
        ...

    def step_logits(self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor | None) -> Tensor:
        """Returns logits [n, vocab] float32 of the step's `tokens` [n]; of all tokens in order if `tokens` is None."""
        ...

    def hidden_and_logits(
        self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of all tokens after the final norm [num_tokens, hidden], and `step_logits`.

        For steps with pooling sequences; `tokens` may be empty.
        """
        ...


class Stage(Protocol):
    """The exchange of hidden states between the pipeline stages of a model."""

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, whose hidden states are those of the model."""
        ...

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """Returns the hidden states [num_tokens, hidden] of the previous stage, with the width and type of `like`."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Sends hidden states to the next stage."""
        ...

    def from_last(self, hidden: Tensor) -> Tensor:
        """Returns the last stage's tensor; the other stages pass a tensor of the same shape."""
        ...


class Decoder:
    """A model's forward pass. `operations` must be the ones that created the parts of `weights`."""

    def __init__(
        self,
        description: DecoderDescription,
        weights: DecoderWeights,
        operations: Operations = TORCH_OPERATIONS,
        stage: Stage | None = None,
    ) -> None:
        """`stage`: the exchange with the other pipeline stages; None without pipeline parallelism."""
        self._stage = stage
        self.description = description
        self._weights = weights
        embedding = weights.embedding
        self._attention = _attention(description, weights, operations)
        self._embedding_scale: Tensor | float | None = None
        if description.embedding_scale != 1.0:
            scale = description.embedding_scale
            self._embedding_scale = embedding.new_tensor(scale) if description.rounded_embedding_scale else scale
        kinds = {"sequential": _Sequential, "parallel": _Parallel, "normed": _Normed, "post_normed": _PostNormed}
        block = kinds[description.residual]
        recurrent = _recurrent(description, weights, operations)
        blocks = (
            block(layer, _Mixer(index, layer, self._attention, recurrent, description))
            for index, layer in enumerate(weights.layers)
        )
        streamed = (
            one if layer.streams is None else StreamedLayer(one, layer.streams)
            for one, layer in zip(blocks, weights.layers, strict=True)
        )
        around = weights.around or (lambda _, block: block)
        self._blocks = tuple(around(index, block) for index, block in enumerate(streamed))

    @property
    def weights(self) -> object:
        """See `LanguageModel`."""
        return self._weights

    @property
    def embedding_size(self) -> int:
        """See `LanguageModel`."""
        return self.description.hidden_size

    @property
    def weights_bytes(self) -> int:
        """See `LanguageModel`."""
        return self._weights.nbytes

    def forward(self, ids: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """Ids and positions [num_tokens] → hidden [num_tokens, hidden]; writes the step's keys and values."""
        stage = self._stage
        if stage is None or stage.is_first:
            hidden = self.embed(ids, positions, step.given)
        else:
            hidden = stage.receive(len(ids), self._weights.embedding)
        if self._weights.layer_inputs is not None:
            step = replace(step, layer_inputs=self._weights.layer_inputs(ids, hidden))
        hidden = self.layers(hidden, positions, step)
        if stage is not None and not stage.is_last:
            stage.send(hidden)
            return hidden
        return self._weights.final_norm(hidden)

    def layers(self, hidden: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """Hidden [num_tokens, hidden] → the same after the last layer; writes the step's keys and values."""
        prepared, ends = self._attention.prepare(positions), self._weights.streams
        hidden = hidden if ends is None else ends.split(hidden)
        for index, block in enumerate(self._blocks[: self.description.num_model_layers]):
            hidden = block(hidden, prepared, step)
            if step.given is not None and index < self.description.image_layers:
                hidden = step.given.added(index, hidden)
        return hidden if ends is None else ends.join(hidden)

    def draft(
        self, ids: Tensor, positions: Tensor, step: StepInputs, hidden: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the draft layer's hidden states of `tokens` [n, hidden], behind its norm, and logits [n, vocab].

        `ids` [num_tokens]: of each token of the step the token after it; `hidden` [num_tokens, hidden]: hidden states
        of the tokens behind the final norm, or those that an earlier call has returned. Writes keys and values.
        """
        draft = self._weights.layers[-1].draft
        assert draft is not None, "the model has no draft layer"
        both = draft.embedding_norm(self.embed(ids, positions, step.given)), draft.hidden_norm(hidden)
        states = self._blocks[-1](draft.input(torch.cat(both, dim=1)), self._attention.prepare(positions), step)
        states = draft.norm(states.index_select(0, tokens))
        return states, self.logits(states)

    def step_logits(self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor | None) -> Tensor:
        """See `LanguageModel`."""
        hidden = self.forward(ids, positions, step)
        return self.logits(self.from_last(hidden if tokens is None else hidden.index_select(0, tokens)))

    def hidden_and_logits(
        self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `LanguageModel`."""
        hidden = self.from_last(self.forward(ids, positions, step))
        return hidden, self.logits(hidden.index_select(0, tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [n, hidden] → logits [n, vocab] float32. Only for rows that sample: the head is the widest matrix."""
        logits = self._weights.head(hidden).to(torch.float32)
        if self.description.logits_scale != 1.0:
            logits = logits * self.description.logits_scale
        cap = self.description.logits_softcap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def from_last(self, hidden: Tensor) -> Tensor:
        """Returns the last stage's hidden states for the same tokens, so that all stages sample the same tokens.

        Waits until the last stage has computed them; each stage must call this in the order of the steps.
        """
        return hidden if self._stage is None else self._stage.from_last(hidden)

    def embed(self, ids: Tensor, positions: Tensor, given: GivenEmbeddings | None = None) -> Tensor:
        """Ids and positions [num_tokens] → hidden [num_tokens, hidden] before the first layer.

        `given` replaces scaled embeddings: it is not scaled itself.
        """
        hidden = F.embedding(ids, self._weights.embedding)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if given is not None:
            hidden = given.placed(hidden)
        if self._weights.positions is not None:
            hidden = hidden + F.embedding(positions + self.description.learned_position_offset, self._weights.positions)
        return hidden


def _attention(description: DecoderDescription, weights: DecoderWeights, operations: Operations) -> Attention:
    if description.latent is None:
        qk_norms, sinks = tuple(x.qk_norm for x in weights.layers), tuple(x.sinks for x in weights.layers)
        return operations.attention(description, qk_norms, weights.embedding, sinks)
    latents = tuple(layer.latent for layer in weights.layers if layer.latent is not None)
    return operations.latent_attention(description, description.latent, latents, weights.embedding)


def _recurrent(description: DecoderDescription, weights: DecoderWeights, operations: Operations) -> Recurrent | None:
    found = {index: one.recurrent for index, one in enumerate(weights.layers)}
    if isinstance(description.recurrent, GatedDelta):
        deltas = {index: one for index, one in found.items() if isinstance(one, DeltaWeights)}
        return operations.delta(description.recurrent, deltas)
    if isinstance(description.recurrent, StateSpace):
        spaces = {index: one for index, one in found.items() if isinstance(one, StateSpaceWeights)}
        return operations.state_space(description.recurrent, spaces)
    if isinstance(description.recurrent, ChannelSpace):
        channels = {index: one for index, one in found.items() if isinstance(one, ChannelSpaceWeights)}
        return operations.channel_space(description.recurrent, channels)
    if isinstance(description.recurrent, ChannelDelta):
        rules = {index: one for index, one in found.items() if isinstance(one, ChannelDeltaWeights)}
        return operations.channel_delta(description.recurrent, rules)
    convolutions = {index: one for index, one in found.items() if isinstance(one, ConvolutionWeights)}
    return operations.convolution(convolutions) if convolutions else None


class _Mixer:
    """What a layer does between its first norm and its output projection: attention, or what it has in its place."""

    def __init__(
        self,
        index: int,
        layer: LayerWeights,
        attention: Attention,
        recurrent: Recurrent | None,
        description: DecoderDescription,
    ) -> None:
        self._index, self._layer, self._attention = index, layer, attention
        self._gate_kind, self._scale = description.gate_kind, description.attended_scale
        self._recurrent = recurrent if layer.recurrent is not None else None

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        if self._recurrent is not None and layer.beside is None:
            gates = None if layer.gate is None else layer.gate(hidden)
            return self._recurrent.mix(self._index, layer.qkv(hidden), gates, step)
        attended = self._attention.attend(self._index, layer.qkv(hidden), prepared, step)
        if self._scale != 1.0:
            attended = attended * self._scale
        return attended if layer.gate is None else self._gated(attended, layer.gate(hidden))

    def add_beside(self, residual: Tensor, hidden: Tensor, step: StepInputs) -> Tensor:
        """Returns the residual [n, hidden] with the output of the mixer beside attention, if there is one."""
        if self._layer.beside is None:
            return residual
        assert self._recurrent is not None
        first, last = self._layer.beside
        return last.add_to(residual, self._recurrent.mix(self._index, first(hidden), None, step))

    def _gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """Attended [n, values] and gates [n, values], or [n, heads], → attended · f(gates)."""
        factors = gates.sigmoid() if self._gate_kind == "sigmoid" else F.softplus(gates.float()).to(gates.dtype)
        if gates.shape == attended.shape:
            return attended * factors
        return (attended.unflatten(1, (gates.shape[1], -1)) * factors[:, :, None]).flatten(1)


class _Sequential:
    """A layer whose MLP, if it has one, reads the residual stream after attention was added to it."""

    def __init__(self, layer: LayerWeights, mixer: _Mixer) -> None:
        assert layer.input_norm is not None
        self._layer, self._mixer = layer, mixer
        self._input_norm, self._mlp_norm = layer.input_norm, layer.mlp_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer, normed = self._layer, self._input_norm(hidden)
        attended = self._mixer(normed, prepared, step)
        hidden = self._mixer.add_beside(layer.o.add_to(hidden, attended), normed, step)
        return hidden if self._mlp_norm is None else layer.mlp.add_to(hidden, self._mlp_norm(hidden))


class _Parallel:
    """A layer whose attention and MLP both read the layer's input, through one norm or two."""

    def __init__(self, layer: LayerWeights, mixer: _Mixer) -> None:
        assert layer.input_norm is not None
        self._layer, self._mixer, self._norm = layer, mixer, layer.input_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        normed = self._norm(hidden)
        attended = self._mixer(normed, prepared, step)
        inner = normed if layer.mlp_norm is None else layer.mlp_norm(hidden)
        return layer.mlp.add_to(layer.o.add_to(hidden, attended), inner)


class _Normed:
    """A sequential layer that also normalises the outputs of attention and MLP."""

    def __init__(self, layer: LayerWeights, mixer: _Mixer) -> None:
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        assert layer.after_attention_norm is not None
        assert layer.after_mlp_norm is not None
        self._layer, self._mixer = layer, mixer
        self._input_norm, self._mlp_norm = layer.input_norm, layer.mlp_norm
        self._after_attention, self._after_mlp = layer.after_attention_norm, layer.after_mlp_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer, normed = self._layer, self._input_norm(hidden)
        attended = self._mixer(normed, prepared, step)
        hidden = self._after_attention.add_to(hidden, layer.o(attended))
        if layer.side is not None:
            hidden = layer.side.added_to(hidden, normed)
        inner = layer.mlp(self._mlp_norm(hidden))
        if layer.experts_beside is not None:
            inner = layer.experts_beside.added_to(inner, hidden)
        hidden = self._after_mlp.add_to(hidden, inner)
        return hidden if layer.ending is None else layer.ending(hidden, step.layer_inputs)


class _PostNormed:
    """A layer that normalises the outputs of attention and MLP, but not their inputs."""

    def __init__(self, layer: LayerWeights, mixer: _Mixer) -> None:
        assert layer.after_attention_norm is not None
        assert layer.after_mlp_norm is not None
        self._layer, self._mixer = layer, mixer
        self._after_attention, self._after_mlp = layer.after_attention_norm, layer.after_mlp_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        attended = self._mixer(hidden, prepared, step)
        hidden = self._after_attention.add_to(hidden, layer.o(attended))
        return self._after_mlp.add_to(hidden, layer.mlp(hidden))
