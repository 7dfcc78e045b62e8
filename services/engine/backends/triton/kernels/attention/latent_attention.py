"""Attention over a paged cache of latents in the absorbed form: a row of the cache is key and value of all heads.

    query (q, s) of a head, row (c, r) of a token:  score = scale · (q · c + s · r),  value = c

    absorbed   [num_tokens, heads, rank], contiguous: W_keyᵀ times the plain part of a query
    turned     [num_tokens, heads, rope_dim], contiguous: the rotated part
    cache      [num_blocks, block_size, 1, rank + rope_dim], also 8-bit floats
    attended   [num_tokens, heads, rank], which W_value of each head multiplies afterwards

A row is read once for its score and its value, for all heads of a program. It consists of three operands: the rotated
part and two halves of the latent, because their sum is no power of two, and because results of half the width are
stored with fewer registers. The rows of a product are (query, head) pairs of one sequence, on Hopper up to 64, which a
warp group multiplies at once. A sequence with few queries is divided into splits of its keys, whose sums
`decode_attention` combines; the others into tiles of their queries. Both are divided further into blocks of pairs, so
that the accumulators [pairs, rank] fit the registers. Work lists and the order of sums are those of `decode_attention`
and `prefill_attention`.

Sequences with many queries take fewer products if keys and values are computed from the rows, see `expanded_work`.

Reference: `kernels/latent_attention`. Multi-head latent attention: arXiv 2405.04434.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import DeviceWork
from antiphon.services.engine.backends.triton.kernels.attention.decode_attention import combine_splits
from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    LOG2E,
    architecture,
    ceil_div,
    launch,
    launch_filling,
    power_of_two,
)
from antiphon.services.engine.backends.triton.kernels.scores import load_columns, multiply, split_range, weigh


@dataclass(frozen=True, slots=True)
class RowShape:
    """Widths of a row of the cache, and the factor on the scores."""

    rank: int
    rope_dim: int
    scale: float


@triton.jit
def _attend_rows(
    start, end, left, right, turned, positions, best, total, left_acc, right_acc, cache, table, scale,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, end) to the running softmax and returns its new state (best, total, two halves of acc)."""
    HALF: tl.constexpr = left.shape[1]
    c, t = tl.arange(0, HALF), tl.arange(0, turned.shape[1])
    for first in range(start, end, TILE):
        keys = first + tl.arange(0, TILE)
        visible = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=visible, other=0)
        rows = cache + (blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * (RANK + ROPE)
        lefts = load_columns(rows, c, visible, HALF if RANK >= HALF else RANK, True).to(left.dtype)
        rights = load_columns(rows + HALF, c, visible, RANK - HALF, True).to(left.dtype)
        parts = load_columns(rows + RANK, t, visible, ROPE, True).to(left.dtype)
        s = multiply(turned, tl.trans(parts), tl.zeros((left.shape[0], TILE), tl.float32))
        s = multiply(left, tl.trans(lefts), s)
        s = multiply(right, tl.trans(rights), s) * (scale * LOG2E)
        s = tl.where(keys[None, :] <= positions[:, None], s, float("-inf"))
        best, total, weights, shrink = weigh(s, best, total)
        weights = weights.to(left.dtype)
        left_acc = multiply(weights, lefts, left_acc * shrink[:, None])
        right_acc = multiply(weights, rights, right_acc * shrink[:, None])
    return best, total, left_acc, right_acc


@triton.jit
def _load_query(
    absorbed, turned, place, pair, asked,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Returns two halves of the absorbed queries of pairs, and their rotated part. `place`: that of pair 0."""
    c, t = tl.arange(0, HALF), tl.arange(0, ROPE_PAD)
    rows = absorbed + place * RANK + pair * RANK
    left = load_columns(rows, c, asked, HALF if RANK >= HALF else RANK, True)
    right = load_columns(rows + HALF, c, asked, RANK - HALF, True)
    return left, right, load_columns(turned + place * ROPE + pair * ROPE, t, asked, ROPE, True)


@triton.jit
def _store_halves(out, place, pair, left, right, factor, asked, RANK: tl.constexpr):
    """Writes the halves times the factor of each pair. `place`: that of pair 0 in `out`."""
    HALF: tl.constexpr = left.shape[1]
    c = tl.arange(0, HALF)
    places = out + place * RANK + (pair * RANK)[:, None] + c[None, :]
    lefts, rights = asked[:, None], asked[:, None]
    if RANK != 2 * HALF:
        lefts, rights = lefts & (c < RANK)[None, :], rights & (c + HALF < RANK)[None, :]
    tl.store(places, (left * factor[:, None]).to(out.dtype.element_ty), mask=lefts)
    tl.store(places + HALF, (right * factor[:, None]).to(out.dtype.element_ty), mask=rights)


@triton.jit
def _latent_split_kernel(
    absorbed, turned, cache, attended, partials, bests, totals,
    tables, rows, seq_lens, query_starts, query_lens, item_starts, items, num_items, table_stride, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (PAIRS + ROWS - 1) // ROWS
    num_tasks = tl.load(num_items) * parts
    # What is computed once for all tasks would take registers in the loop over keys.
    for task in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), num_tasks, tl.num_programs(0), disable_licm=True
    ):
        # Neighbouring programs take the heads of the same tokens.
        item, part = task // parts, task % parts  # pyright: ignore[reportOperatorIssue]
        packed = tl.load(items + item)
        sequence, split = packed >> 16, packed & 0xFFFF
        seq_len, num_queries = tl.load(seq_lens + sequence), tl.load(query_lens + sequence)
        if part * ROWS < num_queries * HEADS:
            # Heads of a query are adjacent, so a pair's number is its place behind the sequence's first one.
            pair = part * ROWS + tl.arange(0, ROWS)
            asked = pair < num_queries * HEADS
            place = tl.load(query_starts + sequence).to(tl.int64) * HEADS
            left, right, turning = _load_query(  # pyright: ignore[reportGeneralTypeIssues]
                absorbed, turned, place, pair, asked, RANK, HALF, ROPE, ROPE_PAD
            )  # fmt: skip
            table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
            best = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            left_acc, right_acc = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
            start, end = split_range(split, seq_len, SPLIT)
            best, total, left_acc, right_acc = _attend_rows(
                start, end, left, right, turning, seq_len - num_queries + pair // HEADS, best, total,
                left_acc, right_acc, cache, table, scale, BLOCK_SIZE, RANK, ROPE, TILE,
            )  # fmt: skip
            factor = 1.0 / tl.where(total == 0.0, 1.0, total)
            if tl.load(item_starts + sequence + 1) - tl.load(item_starts + sequence) == 1:
                _store_halves(attended, place, pair, left_acc, right_acc, factor, asked, RANK)
            else:
                kept = tl.cast(item, tl.int64) * PAIRS
                _store_halves(partials, kept, pair, left_acc, right_acc, factor, asked, RANK)
                tl.store(bests + kept + pair, best, mask=asked)
                tl.store(totals + kept + pair, total, mask=asked)


@triton.jit
def _latent_prefill_kernel(
    absorbed, turned, cache, attended, tables, rows, seq_lens, query_starts, query_lens, tiles, table_stride, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    packed = tl.load(tiles + tl.program_id(1))
    sequence, tile = packed >> 16, packed & 0xFFFF
    seq_len, num_queries = tl.load(seq_lens + sequence), tl.load(query_lens + sequence)
    start = tl.program_id(0) * ROWS
    pair = start + tl.arange(0, ROWS)
    query = tile * QUERIES + pair // HEADS
    asked = (query < num_queries) & (pair < QUERIES * HEADS)
    context = seq_len - num_queries
    first = context + tile * QUERIES + start // HEADS
    last = tl.minimum(context + tile * QUERIES + (start + ROWS - 1) // HEADS, seq_len - 1)
    if first < seq_len:
        place = (tl.load(query_starts + sequence).to(tl.int64) + tile * QUERIES) * HEADS
        left, right, turning = _load_query(  # pyright: ignore[reportGeneralTypeIssues]
            absorbed, turned, place, pair, asked, RANK, HALF, ROPE, ROPE_PAD
        )  # fmt: skip
        table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        left_acc, right_acc = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
        best, total, left_acc, right_acc = _attend_rows(
            0, last + 1, left, right, turning, context + query, best, total, left_acc, right_acc, cache, table, scale,
            BLOCK_SIZE, RANK, ROPE, TILE,
        )  # fmt: skip
        factor = 1.0 / tl.where(total == 0.0, 1.0, total)
        _store_halves(attended, place, pair, left_acc, right_acc, factor, asked, RANK)


def attend_few_latents(
    absorbed: Tensor, turned: Tensor, cache: Tensor, attended: Tensor, work: DeviceWork, row: RowShape
) -> None:
    """Writes what every sequence with few query tokens attends to into `attended`, in place."""
    few = work.few
    assert few is not None
    assert work.window is None, "latent attention has no sliding windows"
    heads = turned.shape[1]
    # Rounded up so that only a few variants of the kernels are compiled.
    pairs = power_of_two(few.max_queries) * heads
    shape = (few.max_items, pairs)
    partials = torch.empty((*shape, row.rank), dtype=torch.float32, device=turned.device)
    bests, totals = (torch.empty(shape, dtype=torch.float32, device=turned.device) for _ in range(2))
    rows, tile, warps, stages = _shape(pairs, turned.dtype.itemsize, cache.dtype.itemsize)
    launch_filling(
        few.max_items * ceil_div(pairs, rows), _latent_split_kernel, turned.device,
        absorbed, turned, cache, attended, partials, bests, totals,
        work.tables, few.rows, few.seq_lens, few.query_starts, few.query_lens,
        few.item_starts, few.items, few.num_items, work.tables.stride(0), float(row.scale),
        warps=warps, stages=stages, PAIRS=pairs, ROWS=rows, TILE=tile, SPLIT=few.split_tokens,
        **_widths(cache, heads, row),
    )  # fmt: skip
    combine_splits(attended, partials, bests, totals, few, 1)


def attend_many_latents(
    absorbed: Tensor, turned: Tensor, cache: Tensor, attended: Tensor, work: DeviceWork, row: RowShape
) -> None:
    """Writes the attention output of every sequence in the list for many query tokens to `attended`."""
    many = work.many
    assert many is not None
    assert work.window is None, "latent attention has no sliding windows"
    heads = turned.shape[1]
    pairs = many.queries_a_tile * heads
    rows, tile, warps, stages = _shape(pairs, turned.dtype.itemsize, cache.dtype.itemsize)
    launch(
        _latent_prefill_kernel, (ceil_div(pairs, rows), many.num_tiles),
        absorbed, turned, cache, attended, work.tables,
        many.rows, many.seq_lens, many.query_starts, many.query_lens, many.tiles,
        work.tables.stride(0), float(row.scale),
        warps=warps, stages=stages, QUERIES=many.queries_a_tile, ROWS=rows, TILE=tile, **_widths(cache, heads, row),
    )  # fmt: skip


def _widths(cache: Tensor, heads: int, row: RowShape) -> dict[str, int]:
    """Returns the compile-time arguments that both kernels share."""
    return {
        "BLOCK_SIZE": cache.shape[1],
        "HEADS": heads,
        "RANK": row.rank,
        "HALF": power_of_two(ceil_div(row.rank, 2), 16),
        "ROPE": row.rope_dim,
        "ROPE_PAD": power_of_two(row.rope_dim, 16),
    }


def _shape(pairs: int, itemsize: int, stored_itemsize: int) -> tuple[int, int, int, int]:
    """Returns ((query, head) pairs of a program, keys in a tile, warps, stages) that fit registers and shared memory.

    `stored_itemsize`: bytes of a number in the cache; converting numbers of 8 bits takes registers.

    The compile gate checks them (`make kernels`) for the latents of DeepSeek, which have a rank of 512. With 64 pairs
    Hopper uses products of warp groups. Blackwell would keep their results in its tensor memory, where those of 64
    pairs do not fit. Without warp groups, five stages give rows two buffers, so that a tile is copied while the one
    before is computed.
    """
    if INTERPRETED:
        # The interpreter runs programs one after another, so a few large ones are faster.
        return min(64, power_of_two(pairs, 16)), 64, 4, 1
    if itemsize > 2 or architecture() == "gfx942":
        return 16, 16, 8, 1
    if stored_itemsize < itemsize:
        return 16, 32, 8, 5
    if architecture() == "sm_90" and pairs >= 64:
        return 64, 32, 8, 2
    return min(32, power_of_two(pairs, 16)), 32, 8, 5
