"""Paged attention for sequences with few query tokens: the keys are divided into splits.

Each split produces a partial result; a second kernel combines the partial results of a sequence.

    partial o_s = Σ_t 2^(s_t - m_s) v_t / l_s        over the keys t of split s, see `scores`
    o           = Σ_s 2^(m_s - m) l_s o_s / Σ_s 2^(m_s - m) l_s

    queries      [num_tokens, heads, head_dim], rows may be further apart; key head h serves a group of G query heads
    caches       [num_blocks, block_size, kv_heads, head_dim], also 8-bit floats; tokens may be further apart
    attended     [num_tokens, heads, head_dim]

A split is a fixed range of positions (`kernels/splits`), and splits are combined in their order, so a
sequence's result does not depend on the other sequences of the step. Programs take (split, key head) pairs from a list
made by the host. One grid therefore fits sequences of any length, as a captured graph requires, and long sequences do
not delay others. The query heads of a group and the query tokens (up to 9 with draft tokens) form the rows of one
matrix product.

Reference: `kernels/paged_attention`. The split is that of Flash-Decoding (Dao et al., 2023), with one work list instead
of a grid sized for the longest sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import DeviceWork, FewWork, Geometry
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import token_distance
from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    architecture,
    launch,
    launch_filling,
    power_of_two,
)
from antiphon.services.engine.backends.triton.kernels.scores import (
    accumulate,
    blocks_of,
    first_key,
    in_window,
    load_rows,
    make_scores,
    split_range,
    with_sink,
)

_COMBINED_AT_ONCE, _NARROW = 16, 256


@triton.jit
def _split_kernel(
    queries, key_cache, value_cache, attended, partials, bests, totals,
    tables, rows, seq_lens, query_starts, query_lens, item_starts, items, num_items, slopes, sinks,
    query_stride, table_stride, window, scale, softcap,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    r, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    query, member = r // GROUP, r % GROUP
    num_tasks = tl.load(num_items) * KV_HEADS
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        # Neighbouring programs take the heads of the same tokens, which are adjacent in memory.
        item, head = task // KV_HEADS, task % KV_HEADS  # pyright: ignore[reportOperatorIssue]
        packed = tl.load(items + item)
        sequence, split = packed >> 16, packed & 0xFFFF
        seq_len, num_queries = tl.load(seq_lens + sequence), tl.load(query_lens + sequence)
        positions = seq_len - num_queries + query
        asked = (query < num_queries) & (r < QUERIES * GROUP)
        token = tl.load(query_starts + sequence).to(tl.int64) + query
        heads = head * GROUP + member
        places = token * query_stride + heads * D
        q = tl.load(queries + places[:, None] + d[None, :], mask=asked[:, None] & (d < D)[None, :], other=0.0)
        slope = tl.load(slopes + heads, mask=asked, other=0.0) if ALIBI else 0.0
        table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, D_PAD), tl.float32)
        start, end = split_range(split, seq_len, SPLIT)
        if WINDOW:
            start = tl.maximum(start, first_key(seq_len - num_queries, window, WINDOW) // TILE * TILE)
        for first in range(start, end, TILE):
            keys = first + tl.arange(0, TILE)
            visible = keys < end
            blocks = blocks_of(table, first, keys, visible, BLOCK_SIZE, TILE)
            k = load_rows(key_cache, blocks, keys % BLOCK_SIZE, visible, head, d, BLOCK_SIZE, TOKEN, D, True)
            v = load_rows(value_cache, blocks, keys % BLOCK_SIZE, visible, head, d, BLOCK_SIZE, TOKEN, D, True)
            distances = keys[None, :] - positions[:, None]
            s = make_scores(q, k.to(q.dtype), scale, softcap, slope, distances, SOFTCAP, ALIBI)
            seen = visible[None, :] & (distances <= 0)
            if WINDOW:
                seen = seen & in_window(keys, positions, distances, window, WINDOW)
            best, total, acc = accumulate(tl.where(seen, s, float("-inf")), v, best, total, acc, q.dtype)
        alone = tl.load(item_starts + sequence + 1) - tl.load(item_starts + sequence) == 1
        # With several splits, the sink is added when they are combined.
        sum_of_all = total if sinks is None else tl.where(alone, with_sink(total, best, sinks, heads, asked), total)
        out = acc / tl.where(total == 0.0, 1.0, sum_of_all)[:, None]
        stored = asked[:, None] & (d < D)[None, :]
        if alone:
            place = (token * (KV_HEADS * GROUP) + heads) * D
            tl.store(attended + place[:, None] + d[None, :], out.to(attended.dtype.element_ty), mask=stored)
        else:
            place = r.to(tl.int64) + (item * KV_HEADS + head) * (QUERIES * GROUP)
            tl.store(partials + place[:, None] * D + d[None, :], out, mask=stored)
            tl.store(bests + place, best, mask=asked)
            tl.store(totals + place, total, mask=asked)


@triton.jit
def _combine_kernel(
    attended, partials, bests, totals, query_starts, query_lens, item_starts, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, QUERIES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    sequence, query, heads = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D_PAD)
    first = tl.load(item_starts + sequence)
    count = tl.load(item_starts + sequence + 1) - first
    # A padding sequence of a captured graph has no splits.
    if (count > 1) & (query < tl.load(query_lens + sequence)):
        row = (heads // GROUP) * (QUERIES * GROUP) + query * GROUP + heads % GROUP
        best, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
        acc = tl.zeros((D_PAD,), tl.float32)
        for start in range(0, count, AT_ONCE):
            s = start + tl.arange(0, AT_ONCE)
            place = (first + s).to(tl.int64) * (KV_HEADS * QUERIES * GROUP) + row
            mine = tl.load(bests + place, mask=s < count, other=float("-inf"))
            sums = tl.load(totals + place, mask=s < count, other=0.0)
            mask = (s < count)[:, None] & (d < D)[None, :]
            parts = tl.load(partials + place[:, None] * D + d[None, :], mask=mask, other=0.0)
            new_best = tl.maximum(best, tl.max(mine, 0))
            anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights, shrink = tl.exp2(mine - anchor) * sums, tl.exp2(best - anchor)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
            best = new_best
        if sinks is not None:
            total = with_sink(total, best, sinks, heads, True)
        out = acc / tl.where(total == 0.0, 1.0, total)
        place = ((tl.load(query_starts + sequence) + query).to(tl.int64) * tl.num_programs(2) + heads) * D
        tl.store(attended + place + d, out.to(attended.dtype.element_ty), mask=d < D)


def attend_few(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, attended: Tensor, work: DeviceWork, g: Geometry
) -> None:
    """Writes the attention output of every sequence with few query tokens into `attended`, in place."""
    few = work.few
    assert few is not None
    heads, head_dim = queries.shape[1:]
    kv_heads, group = g.kv_heads, heads // g.kv_heads
    # Rounded up so that only a few variants of the kernels are compiled.
    each = power_of_two(few.max_queries)
    rows = power_of_two(each * group, 16)
    shape = (few.max_items, kv_heads * each * group)
    partials = torch.empty((*shape, head_dim), dtype=torch.float32, device=queries.device)
    # Separate tensors: a view that starts inside another tensor may be unaligned and would need another kernel variant.
    bests, totals = (torch.empty(shape, dtype=torch.float32, device=queries.device) for _ in range(2))
    tile, warps, stages = _shape(head_dim, rows, queries.dtype.itemsize, key_cache.dtype.itemsize)
    shared = {"KV_HEADS": kv_heads, "GROUP": group, "D": head_dim, "D_PAD": power_of_two(head_dim, 16)}
    launch_filling(
        few.max_items * kv_heads, _split_kernel, queries.device,
        queries, key_cache, value_cache, attended, partials, bests, totals,
        work.tables, few.rows, few.seq_lens, few.query_starts, few.query_lens,
        few.item_starts, few.items, few.num_items, g.slopes, g.sinks,
        queries.stride(0), work.tables.stride(0), work.window or 0, float(g.scale), float(g.softcap or 0.0),
        warps=warps, stages=stages, BLOCK_SIZE=key_cache.shape[1], TOKEN=token_distance(key_cache, value_cache),
        QUERIES=each, ROWS=rows, TILE=tile, SPLIT=few.split_tokens, WINDOW=work.window_kind,
        SOFTCAP=g.softcap is not None, ALIBI=g.slopes is not None, **shared,
    )  # fmt: skip
    combine_splits(attended, partials, bests, totals, few, kv_heads, g.sinks)


def _shape(head_dim: int, rows: int, itemsize: int, stored_itemsize: int) -> tuple[int, int, int]:
    """Returns (keys in a tile, warps, stages) that fit registers and shared memory, as the compile gate checks.

    `rows` of the product; bytes of a number in a query, and in the cache. With five stages, keys and values have two
    buffers each, so that a tile is copied while the one before is computed.
    """
    if INTERPRETED:
        # The interpreter runs a tile at a time, so a few large ones are faster.
        return 64, 4, 1
    if architecture() == "gfx942":
        return (64 if head_dim <= 128 and itemsize <= 2 else 32, 4, 3) if head_dim <= 256 else (16, 8, 1)
    if head_dim > 256 and itemsize > 2:
        return 16, 8, 1
    # Numbers of 8 bits are copied as they are and take registers when they are converted.
    tile = 32 if head_dim <= 128 and itemsize == stored_itemsize == 2 else 16
    return tile, 4 if rows <= 16 else 8, 5 if itemsize == stored_itemsize else 7


def combine_splits(
    attended: Tensor,
    partials: Tensor,
    bests: Tensor,
    totals: Tensor,
    few: FewWork,
    kv_heads: int,
    sinks: Tensor | None = None,
) -> None:
    """Writes the output of the sequences with several splits into `attended` [num_tokens, heads, D], in place.

    `partials` [items, kv_heads · queries · group, D], `bests`, `totals` without D: what the splits gave, float32.
    `queries` is the largest number of query tokens, rounded up to a power of two.
    """
    heads, width = attended.shape[1:]
    launch(
        _combine_kernel, (few.count, few.max_queries, heads),
        attended, partials, bests, totals, few.query_starts, few.query_lens, few.item_starts, sinks,
        warps=2 if width <= _NARROW else 4, KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=width,
        D_PAD=power_of_two(width, 16), QUERIES=power_of_two(few.max_queries), AT_ONCE=_COMBINED_AT_ONCE,
    )  # fmt: skip
