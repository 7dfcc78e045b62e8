"""The forward pass of every decoder that a `DecoderDescription` can describe, over paged KV.

    h = embedding[ids]
    per layer:  h = h + o(attention(rotate(qkv(norm(h)))))
                h = h + down(silu(gate) * up)      [gate | up] = gate_up(norm(h))
    hidden = norm(h),  logits = head(hidden)

Tokens of all sequences of a step lie flat one after another; what tells them apart is in `StepInputs`, an argument.
No state: weights are given, caches are in the step. Called by the worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.kernels.paged_attention import AttentionBatch, paged_attention, write_kv
from services.engine.kernels.rms_norm import rms_norm
from services.engine.kernels.rotary import Rotation, make_rotation, rotate
from services.engine.kernels.silu_mul import silu_mul
from services.engine.models.description import DecoderDescription
from services.engine.models.linear import Linear
from services.engine.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. The norms [hidden]; `qk_norm` [heads + kv_heads, head_dim], a row for each query and key head."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    qk_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of it. `embedding` [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear


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


class Decoder:
    """A model's forward pass."""

    def __init__(self, description: DecoderDescription, weights: DecoderWeights) -> None:
        self.description = description
        self._weights = weights
        self._frequencies = inverse_frequencies(description.rope).to(weights.embedding.device)

    def forward(self, ids: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """Ids and positions [num_tokens] int64 → hidden [num_tokens, hidden]; writes the step's keys and values."""
        d, weights = self.description, self._weights
        hidden = F.embedding(ids, weights.embedding)
        rotation = make_rotation(
            positions, self._frequencies, d.rope.attention_factor, hidden.dtype, d.rope.interleaved
        )
        for index, layer in enumerate(weights.layers):
            attended = self._attention(index, layer, rms_norm(hidden, layer.input_norm, d.norm_eps), rotation, step)
            hidden = layer.o.add_to(hidden, attended)
            gated = silu_mul(layer.gate_up(rms_norm(hidden, layer.mlp_norm, d.norm_eps)))
            hidden = layer.down.add_to(hidden, gated)
        return rms_norm(hidden, weights.final_norm, d.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [n, hidden] → [n, vocab] float32. Only for the rows that sample: the head is the widest matrix."""
        return self._weights.head(hidden).to(torch.float32)

    def _attention(
        self, index: int, layer: LayerWeights, normed: Tensor, rotation: Rotation, step: StepInputs
    ) -> Tensor:
        """Normed [num_tokens, hidden] → attended values [num_tokens, heads * head_dim]."""
        d = self.description
        heads = layer.qkv(normed).view(-1, d.num_heads + 2 * d.num_kv_heads, d.head_dim)
        queries_keys, values = heads.split((d.num_heads + d.num_kv_heads, d.num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            queries_keys = rms_norm(queries_keys, None, d.norm_eps) * layer.qk_norm
        rotated = rotate(queries_keys, rotation)
        queries, keys = rotated.split((d.num_heads, d.num_kv_heads), dim=1)
        caches = step.key_caches[index], step.value_caches[index]
        write_kv(keys, values, *caches, step.slot_mapping)
        attended = paged_attention(queries, keys, values, *caches, step.attention[d.sliding_windows[index]])
        return attended.view(-1, d.q_size)
