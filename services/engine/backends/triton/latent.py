"""Latent attention with the Triton kernels, and the library's products with the matrices of each head.

    sequences with few queries, and with   absorbed: W_keyᵀ q, attention over rows, W_value
    few behind a long context
    sequences with many queries            expanded: keys and values of each head are computed from the rows, piece by
                                           piece (`expanded_work`)

Both forms of a step use one piece of memory after another, so a step takes as much whatever the forms of its sequences.
"""

from dataclasses import replace

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import DeviceWork
from antiphon.services.engine.backends.triton.kernels.attention.expanded_attention import attend_made, gather_rows
from antiphon.services.engine.backends.triton.kernels.attention.expanded_work import ExpandedWork, Pieces
from antiphon.services.engine.backends.triton.kernels.attention.latent_attention import (
    RowShape,
    attend_few_latents,
    attend_many_latents,
)
from antiphon.services.engine.backends.triton.kernels.attention.latent_rows import store_latents
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import make_table
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.models.description import DecoderDescription, LatentAttention, RopeParameters
from antiphon.services.engine.models.layers.attention import StepInputs, growth_of, places_of
from antiphon.services.engine.models.layers.latent_attention import LatentWeights
from antiphon.services.engine.models.layers.rope import inverse_frequencies

_ALIGNED_BYTES = 256


def rope_tables(
    ropes: tuple[RopeParameters | None, ...], num_positions: int, like: Tensor
) -> dict[RopeParameters, Tensor]:
    """Returns the table of each rotary embedding (`make_table`), with the type and on the device of `like`."""
    return {
        rope: make_table(inverse_frequencies(rope).to(like.device), rope.attention_factor, num_positions, like.dtype)
        for rope in set(ropes)
        if rope is not None
    }


class TritonLatentAttention:
    """An `Attention` over latents, with work lists like `TritonAttention`."""

    def __init__(
        self,
        description: DecoderDescription,
        shape: LatentAttention,
        weights: tuple[LatentWeights, ...],
        like: Tensor,
        num_positions: int,
    ) -> None:
        self._num_heads, self._shape, self._weights = description.num_heads, shape, weights
        self._growth = description.query_growth
        self._places = places_of(description.attention_layers)
        self._ropes = tuple(description.rope_of(layer) for layer in range(description.num_layers))
        self._tables = {None: None, **rope_tables(self._ropes, num_positions, like)}
        scale = shape.query_dim**-0.5 if description.query_scale is None else description.query_scale
        self._row = RowShape(shape.rank, shape.rope_dim, scale)

    def prepare(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `TritonAttention`."""
        return positions, growth_of(positions, self._growth)

    def attend(self, layer: int, qkv: Tensor, prepared: tuple[Tensor, Tensor | None], step: StepInputs) -> Tensor:
        """See `Attention`; `qkv` as in `models/layers/latent_attention`."""
        place, (positions, growth) = self._places[layer], prepared
        shape, weights, rope = self._shape, self._weights[place], self._ropes[layer]
        first, cache = qkv[:, : qkv.shape[1] - shape.row_size], step.key_caches[place]
        if weights.query_up is not None:
            assert weights.query_norm is not None
            first = weights.query_up(normed(first, weights.query_norm, None, shape.norm_eps))
        queries = first.unflatten(1, (self._num_heads, shape.query_dim))
        if growth is not None:
            queries.mul_(growth)
        turned = qkv.new_empty((len(qkv), self._num_heads, shape.rope_dim))
        store_latents(
            qkv, queries, turned, positions, step.slot_mapping[0], cache, self._tables[rope],
            rope is not None and rope.interleaved, weights.norm, shape.norm_eps,
        )  # fmt: skip
        values = qkv.new_empty((len(qkv), self._num_heads, shape.value_dim))
        work: DeviceWork = step.attention[layer]
        sizes = Pieces(latent=shape, heads=self._num_heads, itemsize=qkv.dtype.itemsize, num_tokens=len(qkv))
        # Without pieces no more is needed than for these tokens. Captured graphs, which have none, keep their memory.
        sizes = replace(sizes, least=1) if work.expanded is None else sizes
        memory = _Memory(sizes.num_bytes, qkv)
        if work.few is not None or work.many is not None:
            tokens = (0, len(qkv)) if work.expanded is None else work.expanded.others
            self._absorbed((queries, turned), cache, weights.up, values, work, tokens, memory)
        if work.expanded is not None:
            memory.clear()
            self._expanded((queries, turned), cache, weights.up, values, work, work.expanded, memory)
        return values.flatten(1)

    def _absorbed(
        self,
        queries: tuple[Tensor, Tensor],
        cache: Tensor,
        up: Tensor,
        values: Tensor,
        work: DeviceWork,
        tokens: tuple[int, int],
        memory: "_Memory",
    ) -> None:
        """Writes what the sequences with few queries attend to into `values`, and anything into others of `tokens`."""
        (whole, turned), shape, (start, end) = queries, self._shape, tokens
        key_up, value_up = up.split((shape.nope_dim, shape.value_dim), dim=1)
        absorbed, attended = (memory.take(end, self._num_heads, shape.rank) for _ in range(2))
        _by_head(whole[start:end, :, : shape.nope_dim], key_up, absorbed[start:])
        if work.few is not None:
            attend_few_latents(absorbed, turned, cache, attended, work, self._row)
        if work.many is not None:
            attend_many_latents(absorbed, turned, cache, attended, work, self._row)
        _by_head(attended[start:], value_up.transpose(1, 2), values[start:end])

    def _expanded(
        self,
        queries: tuple[Tensor, Tensor],
        cache: Tensor,
        up: Tensor,
        values: Tensor,
        work: DeviceWork,
        expanded: ExpandedWork,
        memory: "_Memory",
    ) -> None:
        """Writes what the sequences with many queries attend to into `values`."""
        sums = None
        if len(expanded.pieces) > 1:
            best, total = (memory.take(*values.shape[:2], dtype=torch.float32) for _ in range(2))
            sums = memory.take(*values.shape, dtype=torch.float32), best, total
        rows = memory.take(expanded.most_rows, self._shape.row_size)
        made = memory.take(expanded.most_rows, up.shape[0] * up.shape[1])
        for piece in expanded.pieces:
            gather_rows(cache, rows, work.tables, piece)
            of_piece = made[: piece.num_rows]
            torch.mm(rows[: piece.num_rows, : self._shape.rank], up.flatten(0, 1).t(), out=of_piece)
            attend_made(*queries, of_piece, rows, values, sums, (expanded, piece), self._row.scale)


class _Memory:
    """Memory that is divided into tensors of the type of `like`, one behind another, and used again when cleared."""

    def __init__(self, num_bytes: int, like: Tensor) -> None:
        self._bytes, self._dtype, self._used = like.new_empty(num_bytes, dtype=torch.uint8), like.dtype, 0

    def clear(self) -> None:
        """Forgets all tensors, whose content may be overwritten."""
        self._used = 0

    def take(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor with any content, at an aligned address: others need another variant of the kernels."""
        kind, start = dtype or self._dtype, self._used
        count = int(torch.Size(shape).numel()) * kind.itemsize
        assert start + count <= len(self._bytes), f"latent attention needs {start + count} of {len(self._bytes)} bytes"
        self._used += -(-count // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._bytes[start : start + count].view(kind).view(shape)


def _by_head(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Writes x [n, heads, a] times the matrix [heads, a, b] of each head into `out` [n, heads, b]."""
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
