"""The forward pass of every decoder that a `DecoderDescription` can describe, over paged KV.

    h = embedding[ids] · scale + position_embedding[positions]
    per layer:  attention and MLP around the residual stream, in one of the orders of `ResidualKind`
    hidden = norm(h),  logits = head(hidden)

Tokens of all sequences of a step lie flat one after another; what tells them apart is in `StepInputs`, an argument.
What a model does is chosen once, from its description and the kinds of its weights; only `None` for what it lacks is
looked at in between. No state: weights are given, caches are in the step. Called by the worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.kernels.paged_attention import AttentionBatch, Scores, paged_attention, write_kv
from services.engine.kernels.rms_norm import rms_norm
from services.engine.kernels.rotary import Rotation, make_rotation, rotate
from services.engine.models.description import DecoderDescription, RopeParameters
from services.engine.models.linear import Linear
from services.engine.models.mlp import Mlp
from services.engine.models.norm import Norm
from services.engine.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qk_norm` [heads + kv_heads, head_dim], a row for each query and key head."""

    input_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm | None
    """None: the MLP reads through `input_norm`."""
    mlp: Mlp
    qk_norm: Tensor | None = None
    after_attention_norm: Norm | None = None
    after_mlp_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of it. `embedding` [vocab, hidden], `positions` [learned positions, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step knows besides its tokens.

    `slot_mapping` [num_tokens] int64: where each token's key and value go. `attention`: who sees what, for each
    distinct sliding window of the model's layers. `key_caches`, `value_caches`: one a layer, see `paged_attention`.
    """

    slot_mapping: Tensor
    attention: Mapping[int | None, AttentionBatch]
    key_caches: tuple[Tensor, ...]
    value_caches: tuple[Tensor, ...]


class LanguageModel(Protocol):
    """A model as the worker runs it. Both calls write the step's keys and values; ids, positions [num_tokens] int64."""

    def forward(self, ids: Tensor, positions: Tensor, step: StepInputs) -> object:
        """A step in which nothing samples."""
        ...

    def step_logits(self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor | None) -> Tensor:
        """Logits [n, vocab] float32 of the `tokens` [n] of the step, of all in order where it is None."""
        ...


Rotations = Mapping[RopeParameters, Rotation]


class Decoder:
    """A model's forward pass."""

    def __init__(self, description: DecoderDescription, weights: DecoderWeights) -> None:
        self.description = description
        self._weights = weights
        embedding = weights.embedding
        self._ropes = tuple(description.rope_of(layer) for layer in range(description.num_layers))
        self._frequencies = {
            rope: inverse_frequencies(rope).to(embedding.device) for rope in set(self._ropes) if rope is not None
        }
        # The scale is rounded to the weights' type, as the checkpoints were trained.
        scaled = description.embedding_scale != 1.0
        self._embedding_scale = embedding.new_tensor(description.embedding_scale) if scaled else None
        self._scores = Scores(description.query_scale, description.attention_softcap)
        blocks = {"sequential": self._sequential, "parallel": self._parallel, "normed": self._normed}
        self._block = blocks[description.residual]

    def forward(self, ids: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """Ids and positions [num_tokens] int64 → hidden [num_tokens, hidden]; writes the step's keys and values."""
        hidden = self._embed(ids, positions)
        rotations = {
            rope: make_rotation(positions, frequencies, rope.attention_factor, hidden.dtype, rope.interleaved)
            for rope, frequencies in self._frequencies.items()
        }
        for index, layer in enumerate(self._weights.layers):
            hidden = self._block(index, layer, hidden, rotations, step)
        return self._weights.final_norm(hidden)

    def step_logits(self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor | None) -> Tensor:
        """See `LanguageModel`."""
        hidden = self.forward(ids, positions, step)
        return self.logits(hidden if tokens is None else hidden.index_select(0, tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [n, hidden] → [n, vocab] float32. Only for the rows that sample: the head is the widest matrix."""
        logits = self._weights.head(hidden).to(torch.float32)
        cap = self.description.logits_softcap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = F.embedding(ids, self._weights.embedding)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if self._weights.positions is not None:
            hidden = hidden + F.embedding(positions + self.description.learned_position_offset, self._weights.positions)
        return hidden

    def _sequential(
        self, index: int, layer: LayerWeights, hidden: Tensor, rotations: Rotations, step: StepInputs
    ) -> Tensor:
        assert layer.mlp_norm is not None
        attended = self._attention(index, layer, layer.input_norm(hidden), rotations, step)
        hidden = layer.o.add_to(hidden, attended)
        return layer.mlp.add_to(hidden, layer.mlp_norm(hidden))

    def _parallel(
        self, index: int, layer: LayerWeights, hidden: Tensor, rotations: Rotations, step: StepInputs
    ) -> Tensor:
        normed = layer.input_norm(hidden)
        attended = self._attention(index, layer, normed, rotations, step)
        inner = normed if layer.mlp_norm is None else layer.mlp_norm(hidden)
        return layer.mlp.add_to(layer.o.add_to(hidden, attended), inner)

    def _normed(
        self, index: int, layer: LayerWeights, hidden: Tensor, rotations: Rotations, step: StepInputs
    ) -> Tensor:
        assert layer.mlp_norm is not None
        assert layer.after_attention_norm is not None
        assert layer.after_mlp_norm is not None
        attended = self._attention(index, layer, layer.input_norm(hidden), rotations, step)
        hidden = hidden + layer.after_attention_norm(layer.o(attended))
        return hidden + layer.after_mlp_norm(layer.mlp(layer.mlp_norm(hidden)))

    def _attention(
        self, index: int, layer: LayerWeights, normed: Tensor, rotations: Rotations, step: StepInputs
    ) -> Tensor:
        """Normed [num_tokens, hidden] → attended values [num_tokens, heads * head_dim]."""
        d = self.description
        heads = layer.qkv(normed).view(-1, d.num_heads + 2 * d.num_kv_heads, d.head_dim)
        queries_keys, values = heads.split((d.num_heads + d.num_kv_heads, d.num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            queries_keys = rms_norm(queries_keys, None, d.norm_eps) * layer.qk_norm
        rope = self._ropes[index]
        if rope is not None:
            queries_keys = rotate(queries_keys, rotations[rope])
        queries, keys = queries_keys.split((d.num_heads, d.num_kv_heads), dim=1)
        caches = step.key_caches[index], step.value_caches[index]
        write_kv(keys, values, *caches, step.slot_mapping)
        batch = step.attention[d.sliding_windows[index]]
        return paged_attention(queries, keys, values, *caches, batch, self._scores).view(-1, d.q_size)
