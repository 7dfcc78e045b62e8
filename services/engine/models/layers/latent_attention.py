"""The latent attention of a decoder's layers, from the stacked projection of hidden states to the attended values.

    qkv      [num_tokens, queries or their latent | latent | rotated part of the key]
    queries  W_q norm(latent of queries), or taken from qkv; per head nope_dim numbers, and rope_dim rotated ones
    row      [norm(latent) | rotated part]: the KV cache's entry for a token

In plain torch operations on any device. Created by a model's operations (`operations`), called by the decoder.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.services.engine.kernels.latent_attention import latent_attention
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.kernels.rotary import rotate
from antiphon.services.engine.kernels.storage import as_moved, as_stored
from antiphon.services.engine.models.description import DecoderDescription, LatentAttention
from antiphon.services.engine.models.layers.attention import Prepared, Rotations, StepInputs, growth_of, places_of
from antiphon.services.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of a layer's latent attention beside its projections `qkv` and `o`."""

    norm: Tensor
    """[rank]"""
    up: Tensor
    """The matrices that compute keys and values from latents, [heads, nope_dim + value_dim, rank]. Never quantized,
    because they are multiplied from both sides.
    """
    query_norm: Tensor | None = None
    """[query_rank]; None (then `query_up` is None too): queries are computed from the hidden states."""
    query_up: Linear | None = None
    """[query_rank] → [heads * (nope_dim + rope_dim)]"""


class ReferenceLatentAttention:
    """An `Attention` over latents in plain torch operations. `weights`: one entry per layer that attends."""

    def __init__(
        self, description: DecoderDescription, shape: LatentAttention, weights: tuple[LatentWeights, ...], like: Tensor
    ) -> None:
        self._num_heads, self._shape, self._weights = description.num_heads, shape, weights
        self._places = places_of(description.attention_layers)
        self._windows, self._growth = description.sliding_windows, description.query_growth
        self._rotations = Rotations(description, like)
        self._scale = shape.query_dim**-0.5 if description.query_scale is None else description.query_scale

    def prepare(self, positions: Tensor) -> Prepared:
        """See `Attention`."""
        return Prepared(self._rotations.of(positions), growth_of(positions, self._growth))

    def attend(self, layer: int, qkv: Tensor, prepared: Prepared, step: StepInputs) -> Tensor:
        """See `Attention`; `qkv` as in the module's docstring."""
        place = self._places[layer]
        shape, weights, rope = self._shape, self._weights[place], self._rotations.ropes[layer]
        first, latents, keys = qkv.split((qkv.shape[1] - shape.row_size, shape.rank, shape.rope_dim), dim=1)
        if weights.query_up is not None:
            first = weights.query_up(rms_norm(first, weights.query_norm, shape.norm_eps))
        queries = first.view(-1, self._num_heads, shape.query_dim)
        if rope is not None:
            rotation = prepared.rotations[rope]
            plain, turning = queries.split((shape.nope_dim, shape.rope_dim), dim=2)
            queries = torch.cat((plain, rotate(turning, rotation)), dim=2)
            keys = rotate(keys.unsqueeze(1), rotation).squeeze(1)
        if prepared.growth is not None:
            queries = queries * prepared.growth.to(queries.dtype)
        normed = rms_norm(latents, weights.norm, shape.norm_eps)
        rows = torch.cat((normed, keys), dim=1)
        cache = step.key_caches[place]
        as_moved(cache).flatten(0, 2).index_copy_(0, step.slot_mapping[0], as_moved(as_stored(rows, cache.dtype)))
        batch = step.attention[self._windows[layer]]
        return latent_attention(queries, rows, cache, weights.up, batch, self._scale).flatten(1)
