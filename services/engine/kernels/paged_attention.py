"""Attention over a paged KV cache: softmax(q kᵀ / sqrt(head_dim) + mask) v, causal, with an optional sliding window.

    key_cache, value_cache   [num_blocks, block_size, kv_heads, head_dim], one pair a layer
    slot                     block_id * block_size + offset in the block
    queries                  [num_tokens, heads, head_dim]; query head h reads key head h // (heads / kv_heads)
    keys, values             [num_tokens, kv_heads, head_dim], the step's own

A query at position p sees keys at positions [max(0, p - window + 1), p]; if windows are chunks, it sees those at
[p - p mod window, p]. A query in a span of tokens that attend to
each other (`Spans`) also sees the keys up to the end of the span. With a soft cap a score s becomes cap · tanh(s / cap)
before the mask. A sink (arXiv 2309.17453) is one more score of a head, with a value of zero: it takes a part of the
softmax's sum. Linear biases (ALiBi, arXiv 2108.12409) add slope · (key position - p); they are part of the masks. There
are two kinds of sequences:

    decode   one query token. Sequences of similar length are gathered into one padded batch. The query heads that share
             a key head are placed on the query axis of the batch, so that keys need not be repeated for each head
    chunk    several query tokens, one sequence at a time, in tiles of queries. A tile gathers the keys visible to it. A
             prompt without computed prefix uses the step's own keys instead of gathering them from the cache

`plan_attention` makes these decisions once per step, with plain integers; `paged_attention` computes the attention in
every layer. Called by the worker (planning) and the decoder (computing).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.kernels.storage import as_moved, as_stored

TILE_QUERIES = 512
"""Maximum number of queries in a tile of a chunk; limits the size of the mask."""
BIASED_TILE_QUERIES = 64
"""Like `TILE_QUERIES`, with linear biases, which need a mask for each head."""
PADDING_SLOTS_MAX = 512
"""Maximum padding of a decode batch, in slots; with more, a new batch is cheaper."""
GATHER_BYTES_MAX = 4 * 2**20
"""Maximum bytes of gathered keys in a decode batch, so that they stay in the CPU's cache until they are read."""

Integers = NDArray[np.int64]
Spans = Sequence[tuple[int, int]]
"""Positions [start, end) of a sequence whose tokens attend to each other in both directions, such as those of a
image, in order. A step has all tokens of a span that are not in the cache yet, or none of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The properties of the model and the device that planning needs."""

    block_size: int
    bytes_per_slot: int
    """Bytes of the keys of one token in one layer."""
    dtype: torch.dtype
    device: torch.device
    alibi_slopes: Tensor | None = None
    """[kv_heads, heads / kv_heads] float32; None: no linear biases."""
    chunked_windows: bool = False
    """Whether windows are chunks."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Changes to the products of queries and keys before the softmax."""

    scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """The score of each head's sink, [heads]; None: there are none."""


PLAIN_SCORES = Scores()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences with one query each, padded to the number of blocks of the longest.

    `tokens` [n] int64: their indices in the step; None if they are the whole step in order.
    `blocks` [groups, n * width]: those of each group of block tables.
    `mask` [n, 1, 1, width * block_size], 0 or -inf; with linear biases [n, kv_heads, heads / kv_heads, …].
    """

    tokens: Tensor | None
    blocks: Tensor
    count: int
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTile:
    """Queries [start, end) of the step, with the keys in `blocks`; if None, with keys [key_start, end) of the step.

    `blocks` [groups, any]: those of each group of block tables. `mask` is added to the scores: 0 or -inf,
    [end - start, num_keys]. With linear biases, which it then includes, it is
    [kv_heads, heads / kv_heads, end - start, num_keys]. None: causal attention over the queries' own keys, where
    `key_start` is `start`.
    """

    start: int
    end: int
    key_start: int
    num_keys: int
    blocks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The planned attention of a step, for layers with the same window."""

    decodes: tuple[DecodeBatch, ...]
    tiles: tuple[ChunkTile, ...]


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the step's keys and values into their slots. `slot_mapping` [num_tokens] int64."""
    for new, cache in ((keys, key_cache), (values, value_cache)):
        as_moved(cache).flatten(0, 1).index_copy_(0, slot_mapping, as_moved(as_stored(new, cache.dtype)))


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scores: Scores = PLAIN_SCORES,
    group: int = 0,
) -> Tensor:
    """Returns the attention output [num_tokens, heads, head_dim]. The step's keys and values must be in the caches.

    If keys and values are the same, the key cache is passed for both. `group`: the group of block tables that has the
    caches' blocks.
    """
    if len(batch.decodes) == 1 and batch.decodes[0].tokens is None:
        return _decode(queries, key_cache, value_cache, batch.decodes[0], scores, group)
    attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for decode in batch.decodes:
        assert decode.tokens is not None
        ours = _decode(queries.index_select(0, decode.tokens), key_cache, value_cache, decode, scores, group)
        attended.index_copy_(0, decode.tokens, ours)
    for tile in batch.tiles:
        attended[tile.start : tile.end] = _chunk(queries, keys, values, key_cache, value_cache, tile, scores, group)
    return attended


def plan_attention(
    query_start_loc: Integers,
    seq_lens: Integers,
    block_tables: Integers,
    window: int | None,
    shape: AttentionShape,
    spans: Sequence[Spans] | None = None,
) -> AttentionBatch:
    """Returns the attention plan for S sequences.

    `query_start_loc` [S + 1]: index in the step of each sequence's first query; `seq_lens` [S]: number of keys of each
    sequence, including the step's; `block_tables` [groups, S, any]: at least as many block ids as the keys need;
    `spans`: those of each sequence, None if there are none.
    """
    counts = np.diff(query_start_loc)
    decoding = np.flatnonzero(counts == 1)
    tiles = [
        tile
        for index in np.flatnonzero(counts > 1).tolist()
        for tile in _tiles(
            int(query_start_loc[index]),
            int(counts[index]),
            int(seq_lens[index]),
            block_tables[:, index],
            window,
            shape,
            () if spans is None else spans[index],
        )
    ]
    groups = list(_group(seq_lens[decoding], shape)) if len(decoding) else []
    alone = len(groups) == 1 and not tiles
    decodes = []
    for group in groups:
        members = decoding if alone else decoding[group]
        tokens = None if alone else _tensor(query_start_loc[members], shape)
        decodes.append(_decode_batch(tokens, seq_lens[members], block_tables[:, members], window, shape))
    return AttentionBatch(tuple(decodes), tuple(tiles))


def first_keys(positions: Integers, window: int | None, chunked: bool) -> Integers:
    """Returns the position of the first key that a query at each of the positions sees."""
    if window is None:
        return np.zeros_like(positions)
    return positions - positions % window if chunked else np.maximum(positions - window + 1, 0)


def _group(seq_lens: Integers, shape: AttentionShape) -> Iterator[Integers]:
    """Yields the indices of each batch, longest sequences first, with little padding and within `GATHER_BYTES_MAX`."""
    order = np.argsort(-seq_lens, kind="stable")
    slots_max = max(1, GATHER_BYTES_MAX // shape.bytes_per_slot)
    first, padding = 0, 0
    for place in range(1, len(order)):
        longest = int(seq_lens[order[first]])
        padding += longest - int(seq_lens[order[place]])
        if padding > PADDING_SLOTS_MAX or (place + 1 - first) * longest > slots_max:
            yield order[first:place]
            first, padding = place, 0
    yield order[first:]


def _decode_batch(
    tokens: Tensor | None, seq_lens: Integers, block_tables: Integers, window: int | None, shape: AttentionShape
) -> DecodeBatch:
    starts = first_keys(seq_lens - 1, window, shape.chunked_windows)
    first_blocks, last_blocks = starts // shape.block_size, (seq_lens - 1) // shape.block_size
    width = int((last_blocks - first_blocks).max()) + 1
    # A sequence is padded with its own last block, so that no other sequence's block is read.
    columns = np.minimum(first_blocks[:, None] + np.arange(width), last_blocks[:, None])
    blocks = np.take_along_axis(block_tables, columns[None], axis=2)
    positions = (first_blocks * shape.block_size)[:, None] + np.arange(width * shape.block_size)
    visible = (positions >= starts[:, None]) & (positions < seq_lens[:, None])
    mask = _mask(visible, shape)[:, None, None, :]
    if shape.alibi_slopes is not None:
        distances = (positions - (seq_lens - 1)[:, None])[:, None, None, :]
        mask = mask + _biases(distances, shape.alibi_slopes[None, :, :, None], shape)
    return DecodeBatch(tokens, _tensor(blocks.reshape(len(blocks), -1), shape), len(seq_lens), mask)


def _tiles(
    start: int,
    count: int,
    seq_len: int,
    block_tables: Integers,
    window: int | None,
    shape: AttentionShape,
    spans: Spans,
) -> Iterator[ChunkTile]:
    """Yields the tiles of one sequence's queries, which are the last `count` of its positions.

    `block_tables` [groups, any] and `spans`: those of the sequence.
    """
    context = seq_len - count
    spans = [span for span in spans if span[0] < seq_len and span[1] > context]
    assert all(span[1] <= seq_len for span in spans), "a step cuts a span"
    biased = shape.alibi_slopes is not None
    rows_max = BIASED_TILE_QUERIES if biased else TILE_QUERIES
    if context == 0 and (window is None or window >= count) and not biased and not spans:
        yield ChunkTile(start=start, end=start + count, key_start=start, num_keys=count, blocks=None, mask=None)
        return
    for offset in range(0, count, rows_max):
        rows = min(rows_max, count - offset)
        first_query, end = context + offset, context + offset + rows
        query_positions = np.arange(first_query, end)[:, None]
        first_of_each = first_keys(query_positions, window, shape.chunked_windows)
        oldest = int(first_of_each[0, 0])
        ours = [span for span in spans if span[0] < end and span[1] > first_query]
        end = max((end, *(span[1] for span in ours)))
        if context == 0:
            key_start, blocks = oldest, None
        else:
            first_block = oldest // shape.block_size
            key_start = first_block * shape.block_size
            blocks = _tensor(block_tables[:, first_block : -(-end // shape.block_size)], shape)
        key_positions = np.arange(key_start, end)
        visible = key_positions <= query_positions
        for span in ours:
            visible |= _within(query_positions, span) & _within(key_positions, span)
        if window is not None:
            visible &= key_positions >= first_of_each
        mask = _mask(visible, shape)
        if shape.alibi_slopes is not None:
            mask = mask + _biases(key_positions - query_positions, shape.alibi_slopes[:, :, None, None], shape)
        yield ChunkTile(
            start=start + offset,
            end=start + offset + rows,
            key_start=start + key_start,
            num_keys=end - key_start,
            blocks=blocks,
            mask=mask,
        )


def _decode(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, batch: DecodeBatch, scores: Scores, group: int
) -> Tensor:
    """Returns the attention output [n, heads, head_dim] for queries [n, heads, head_dim]."""
    keys = _gather(key_cache, batch.blocks[group], batch.count, queries.dtype)
    values = keys
    if value_cache is not key_cache:
        values = _gather(value_cache, batch.blocks[group], batch.count, queries.dtype)
    kv_heads, head_dim = key_cache.shape[2:]
    grouped = queries.reshape(batch.count, kv_heads, -1, head_dim)
    sinks = None if scores.sinks is None else scores.sinks.view(1, kv_heads, -1, 1)
    return attend(grouped, keys, values, batch.mask, scores, sinks).reshape(queries.shape)


def _chunk(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tile: ChunkTile,
    scores: Scores,
    group: int,
) -> Tensor:
    """Returns the tile's attention output [rows, heads, head_dim].

    Key heads are the batch axis, the query heads of a key head are the head axis, so that expanding the keys makes no
    copy on a CPU.
    """
    if tile.blocks is None:
        ends = tile.key_start, tile.key_start + tile.num_keys
        keys, values = (rounded(x[ends[0] : ends[1]], key_cache.dtype).transpose(0, 1) for x in (keys, values))
    else:
        keys = gather_tile(key_cache, tile, queries.dtype, group)
        values = keys if value_cache is key_cache else gather_tile(value_cache, tile, queries.dtype, group)
    rows, kv_heads = tile.end - tile.start, keys.shape[0]
    grouped = queries[tile.start : tile.end].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    expanded = [x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (keys, values)]
    if tile.mask is not None and grouped.device.type == "cuda":
        # With a mask, PyTorch's memory-efficient kernel for CUDA gives wrong results for keys without a stride
        # (https://github.com/pytorch/pytorch/issues/191937).
        expanded = [x.contiguous() for x in expanded]
    sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1, 1)
    attended = attend(grouped, expanded[0], expanded[1], tile.mask, scores, sinks)
    return attended.permute(2, 0, 1, 3).reshape(rows, -1, queries.shape[-1])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x rounded to the cache's type, as later steps read it, so that the chunks of a prompt do not matter."""
    return as_stored(x, dtype).to(x.dtype)


def gather_tile(cache: Tensor, tile: ChunkTile, dtype: torch.dtype, group: int = 0) -> Tensor:
    """Returns the keys or values of a tile that has blocks, [kv_heads, num_keys, head_dim]."""
    assert tile.blocks is not None
    return _gather(cache, tile.blocks[group], 1, dtype)[0, :, : tile.num_keys]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scores: Scores,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the attention of queries [a, b, rows, head_dim] over keys and values [a, b, keys, head_dim].

    Without a mask the attention is causal, with as many keys as rows. `sinks`: those of `scores`, in a shape that
    broadcasts to [a, b, rows, 1].
    """
    if scores.softcap is None and sinks is None:
        causal = mask is None
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=scores.scale
        )
    scale = queries.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    raw = (queries @ keys.transpose(-1, -2)).to(torch.float32).mul_(scale / (scores.softcap or 1.0))
    if scores.softcap is not None:
        raw = raw.tanh_().mul_(scores.softcap)
    visible = raw.new_full(raw.shape[-2:], float("-inf")).triu_(1) if mask is None else mask
    raw = raw + visible
    if sinks is None:
        return raw.softmax(dim=-1).to(values.dtype) @ values
    columns = torch.cat([raw, sinks.to(torch.float32).expand(*raw.shape[:-1], 1)], dim=-1)
    return columns.softmax(dim=-1)[..., :-1].to(values.dtype) @ values


def _gather(cache: Tensor, blocks: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Returns the keys or values in `count` equally long lists of blocks, [count, kv_heads, slots, head_dim]."""
    gathered = as_moved(cache).flatten(1).index_select(0, blocks).view(cache.dtype).to(dtype)
    return gathered.view(count, -1, *cache.shape[2:]).transpose(1, 2)


def _mask(visible: NDArray[np.bool_], shape: AttentionShape) -> Tensor:
    hidden = torch.from_numpy(~visible).to(shape.device)
    return torch.zeros(hidden.shape, dtype=shape.dtype, device=shape.device).masked_fill_(hidden, float("-inf"))


def _within(positions: Integers, span: tuple[int, int]) -> NDArray[np.bool_]:
    return (positions >= span[0]) & (positions < span[1])


def _biases(distances: Integers, slopes: Tensor, shape: AttentionShape) -> Tensor:
    """Returns the linear biases of every head, in the broadcast shape of distances and slopes."""
    return (torch.from_numpy(distances).to(shape.device, torch.float32) * slopes).to(shape.dtype)


def _tensor(values: "Sequence[int] | NDArray[Any]", shape: AttentionShape) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(shape.device)
