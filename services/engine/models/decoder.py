"""The forward pass, over a paged KV cache, of every decoder that a `DecoderDescription` can describe.

    h = embedding[ids] · scale + position_embedding[positions]
    per layer:  attention and MLP around the residual stream, in one of the orders of `ResidualKind`
    hidden = norm(h),  logits = head(hidden)

The tokens of all sequences of a step are concatenated; `StepInputs` describes the sequences. The operations are
selected once, from the model's description and the kinds of its weights; the forward pass itself only checks whether
optional parts are `None`. A decoder has no state: weights and KV caches are passed to it. Called by the worker.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.attention import Attention, StepInputs
from antiphon.services.engine.models.layers.latent_attention import LatentWeights
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.mlp import Mlp
from antiphon.services.engine.models.layers.norm import Norm
from antiphon.services.engine.models.operations import TORCH_OPERATIONS, Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer. `qk_norm` [heads + kv_heads, head_dim] has a row for each query and key head."""

    input_norm: Norm | None
    """None: attention reads the residual stream directly."""
    qkv: Linear
    """The projections of the hidden states: queries, keys and values, or those of latent attention."""
    o: Linear
    mlp_norm: Norm | None
    """None: the MLP reads the output of `input_norm`, or the residual stream if there is none."""
    mlp: Mlp
    qk_norm: Tensor | None = None
    after_attention_norm: Norm | None = None
    after_mlp_norm: Norm | None = None
    sinks: Tensor | None = None
    """[heads] float32: the score of each head's sink."""
    latent: LatentWeights | None = None
    """Weights of latent attention besides `qkv` and `o`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The weights of a decoder. `embedding` [vocab, hidden], `positions` [learned positions, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    positions: Tensor | None = None
    nbytes: int = 0
    """Bytes of all weights, as loaded."""


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
        blocks = {"sequential": _Sequential, "parallel": _Parallel, "normed": _Normed, "post_normed": _PostNormed}
        block = blocks[description.residual]
        self._blocks = tuple(block(index, layer, self._attention) for index, layer in enumerate(weights.layers))

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
            hidden = self.embed(ids, positions)
        else:
            hidden = stage.receive(len(ids), self._weights.embedding)
        hidden = self.layers(hidden, positions, step)
        if stage is not None and not stage.is_last:
            stage.send(hidden)
            return hidden
        return self._weights.final_norm(hidden)

    def layers(self, hidden: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """Hidden [num_tokens, hidden] → the same after the last layer; writes the step's keys and values."""
        prepared = self._attention.prepare(positions)
        for block in self._blocks:
            hidden = block(hidden, prepared, step)
        return hidden

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

    def _lookup(self, ids: Tensor) -> Tensor:
        """Returns the rows of the embedding matrix, [num_tokens, hidden]."""
        return F.embedding(ids, self._weights.embedding)

    def _with_virtual(self, embeddings: Tensor) -> Tensor:
        """Returns the scaled embeddings [num_tokens, hidden]. A subclass inserts the embeddings of virtual tokens."""
        return embeddings

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Ids and positions [num_tokens] → hidden [num_tokens, hidden] before the first layer."""
        hidden = self._lookup(ids)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        hidden = self._with_virtual(hidden)
        if self._weights.positions is not None:
            hidden = hidden + F.embedding(positions + self.description.learned_position_offset, self._weights.positions)
        return hidden


def _attention(description: DecoderDescription, weights: DecoderWeights, operations: Operations) -> Attention:
    if description.latent is None:
        qk_norms, sinks = tuple(x.qk_norm for x in weights.layers), tuple(x.sinks for x in weights.layers)
        return operations.attention(description, qk_norms, weights.embedding, sinks)
    latents = tuple(layer.latent for layer in weights.layers if layer.latent is not None)
    return operations.latent_attention(description, description.latent, latents, weights.embedding)


class _Sequential:
    """A layer whose MLP reads the residual stream after attention was added to it."""

    def __init__(self, index: int, layer: LayerWeights, attention: Attention) -> None:
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        self._index, self._layer, self._attention = index, layer, attention
        self._input_norm, self._mlp_norm = layer.input_norm, layer.mlp_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        attended = self._attention.attend(self._index, layer.qkv(self._input_norm(hidden)), prepared, step)
        hidden = layer.o.add_to(hidden, attended)
        return layer.mlp.add_to(hidden, self._mlp_norm(hidden))


class _Parallel:
    """A layer whose attention and MLP both read the layer's input, through one norm or two."""

    def __init__(self, index: int, layer: LayerWeights, attention: Attention) -> None:
        assert layer.input_norm is not None
        self._index, self._layer, self._attention, self._norm = index, layer, attention, layer.input_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        normed = self._norm(hidden)
        attended = self._attention.attend(self._index, layer.qkv(normed), prepared, step)
        inner = normed if layer.mlp_norm is None else layer.mlp_norm(hidden)
        return layer.mlp.add_to(layer.o.add_to(hidden, attended), inner)


class _Normed:
    """A sequential layer that also normalises the outputs of attention and MLP."""

    def __init__(self, index: int, layer: LayerWeights, attention: Attention) -> None:
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        assert layer.after_attention_norm is not None
        assert layer.after_mlp_norm is not None
        self._index, self._layer, self._attention = index, layer, attention
        self._input_norm, self._mlp_norm = layer.input_norm, layer.mlp_norm
        self._after_attention, self._after_mlp = layer.after_attention_norm, layer.after_mlp_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        attended = self._attention.attend(self._index, layer.qkv(self._input_norm(hidden)), prepared, step)
        hidden = self._after_attention.add_to(hidden, layer.o(attended))
        return self._after_mlp.add_to(hidden, layer.mlp(self._mlp_norm(hidden)))


class _PostNormed:
    """A layer that normalises the outputs of attention and MLP, but not their inputs."""

    def __init__(self, index: int, layer: LayerWeights, attention: Attention) -> None:
        assert layer.after_attention_norm is not None
        assert layer.after_mlp_norm is not None
        self._index, self._layer, self._attention = index, layer, attention
        self._after_attention, self._after_mlp = layer.after_attention_norm, layer.after_mlp_norm

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        layer = self._layer
        attended = self._attention.attend(self._index, layer.qkv(hidden), prepared, step)
        hidden = self._after_attention.add_to(hidden, layer.o(attended))
        return self._after_mlp.add_to(hidden, layer.mlp(hidden))
