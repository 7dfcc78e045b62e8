"""Attention over a paged cache of latents in the absorbed form: a row of the cache is key and value of all heads.

    query (q, s) of a head, row (c, r) of a token:  score = scale · (q · c + s · r),  value = c

    queries    [num_tokens, heads, rank + rope_dim], contiguous: W_keyᵀ times the plain part, and the rotated part
    cache      [num_blocks, block_size, 1, rank + rope_dim], also 8-bit floats
    attended   [num_tokens, heads, rank], which W_value of each head multiplies afterwards

A row is read once for its score and its value, for all heads of a program. The rank and the rotated part are separate
operands, because their sum is no power of two. The rows of a product are (query, head) pairs of one sequence. A
sequence with few queries is divided into splits of its keys, whose sums `decode_attention` combines; the others into
tiles of their queries. Both are divided further into blocks of pairs, so that the accumulators [pairs, rank] fit the
registers. Queries, work lists and the order of sums are those of `decode_attention` and `prefill_attention`.

If keys and values were computed from the rows, a pair of a query and a key would take query_dim + value_dim products
per head; here it takes 2 · rank + rope_dim (320 and 1088 for DeepSeek V3). But no keys and values of the context are
computed, so that prompt chunks behind a long context need no memory for them.

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
from antiphon.services.engine.backends.triton.kernels.scores import accumulate, multiply, split_range


@dataclass(frozen=True, slots=True)
class RowShape:
    """Widths of a row of the cache, and the factor on the scores."""

    rank: int
    rope_dim: int
    scale: float


@triton.jit
def _attend_rows(
    start, end, last_key, plain, turned, positions, best, total, acc, cache, table, c, t, scale,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, end) to the running softmax and returns its new state (best, total, acc).

    `start` is a multiple of TILE. If MASKED is false, so is `end`, and every query sees every key. If MASKED is true,
    keys past `last_key` are not read.
    """
    for first in range(start, end, TILE):
        keys = first + tl.arange(0, TILE)
        if MASKED:
            visible = keys <= last_key
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=visible, other=0)
            known, known_turned = visible[:, None] & (c < RANK)[None, :], visible[:, None] & (t < ROPE)[None, :]
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
            known, known_turned = (c < RANK)[None, :], (t < ROPE)[None, :]
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        rows = cache + slots[:, None] * (RANK + ROPE)
        latents = tl.load(rows + c[None, :], mask=known, other=0.0).to(plain.dtype)
        parts = tl.load(rows + RANK + t[None, :], mask=known_turned, other=0.0).to(plain.dtype)
        zero = tl.zeros((plain.shape[0], TILE), tl.float32)
        s = multiply(plain, tl.trans(latents), multiply(turned, tl.trans(parts), zero)) * (scale * LOG2E)
        if MASKED:
            s = tl.where(keys[None, :] <= positions[:, None], s, float("-inf"))
        best, total, acc = accumulate(s, latents, best, total, acc, plain.dtype)
    return best, total, acc


@triton.jit
def _latent_split_kernel(
    queries, cache, attended, partials, bests, totals,
    tables, rows, seq_lens, query_starts, query_lens, item_starts, items, num_items, table_stride, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    c, t = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    parts: tl.constexpr = (PAIRS + ROWS - 1) // ROWS
    num_tasks = tl.load(num_items) * parts
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        # Neighbouring programs take the heads of the same tokens.
        item, part = task // parts, task % parts  # pyright: ignore[reportOperatorIssue]
        packed = tl.load(items + item)
        sequence, split = packed >> 16, packed & 0xFFFF
        seq_len, num_queries = tl.load(seq_lens + sequence), tl.load(query_lens + sequence)
        if part * ROWS < num_queries * HEADS:
            pair = part * ROWS + tl.arange(0, ROWS)
            query, head = pair // HEADS, pair % HEADS
            asked = query < num_queries
            token = tl.load(query_starts + sequence).to(tl.int64) + query
            places = queries + (token * HEADS + head)[:, None] * (RANK + ROPE)
            plain = tl.load(places + c[None, :], mask=asked[:, None] & (c < RANK)[None, :], other=0.0)
            turned = tl.load(places + RANK + t[None, :], mask=asked[:, None] & (t < ROPE)[None, :], other=0.0)
            table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
            best = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, RANK_PAD), tl.float32)
            start, end = split_range(split, seq_len, SPLIT)
            best, total, acc = _attend_rows(
                start, end, end - 1, plain, turned, seq_len - num_queries + query, best, total, acc, cache,
                table, c, t, scale, BLOCK_SIZE, RANK, ROPE, TILE, True,
            )  # fmt: skip
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            stored = asked[:, None] & (c < RANK)[None, :]
            if tl.load(item_starts + sequence + 1) - tl.load(item_starts + sequence) == 1:
                place = (token * HEADS + head) * RANK
                tl.store(attended + place[:, None] + c[None, :], out.to(attended.dtype.element_ty), mask=stored)
            else:
                place = pair.to(tl.int64) + item * PAIRS
                tl.store(partials + place[:, None] * RANK + c[None, :], out, mask=stored)
                tl.store(bests + place, best, mask=asked)
                tl.store(totals + place, total, mask=asked)


@triton.jit
def _latent_prefill_kernel(
    queries, cache, attended, tables, rows, seq_lens, query_starts, query_lens, tiles, table_stride, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    packed = tl.load(tiles + tl.program_id(1))
    sequence, tile = packed >> 16, packed & 0xFFFF
    seq_len, num_queries = tl.load(seq_lens + sequence), tl.load(query_lens + sequence)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, head = tile * QUERIES + pair // HEADS, pair % HEADS
    asked = (query < num_queries) & (pair < QUERIES * HEADS)
    context = seq_len - num_queries
    first = context + tile * QUERIES + tl.program_id(0) * ROWS // HEADS
    last = tl.minimum(context + tile * QUERIES + (tl.program_id(0) * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    if first < seq_len:
        c, t = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
        token = tl.load(query_starts + sequence).to(tl.int64) + query
        places = queries + (token * HEADS + head)[:, None] * (RANK + ROPE)
        plain = tl.load(places + c[None, :], mask=asked[:, None] & (c < RANK)[None, :], other=0.0)
        turned = tl.load(places + RANK + t[None, :], mask=asked[:, None] & (t < ROPE)[None, :], other=0.0)
        table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
        positions = context + query
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, RANK_PAD), tl.float32)
        whole = (first + 1) // TILE * TILE
        best, total, acc = _attend_rows(
            0, whole, last, plain, turned, positions, best, total, acc, cache, table, c, t, scale,
            BLOCK_SIZE, RANK, ROPE, TILE, False,
        )  # fmt: skip
        best, total, acc = _attend_rows(
            whole, last + 1, last, plain, turned, positions, best, total, acc, cache, table, c, t, scale,
            BLOCK_SIZE, RANK, ROPE, TILE, True,
        )  # fmt: skip
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (token * HEADS + head) * RANK
        stored = asked[:, None] & (c < RANK)[None, :]
        tl.store(attended + place[:, None] + c[None, :], out.to(attended.dtype.element_ty), mask=stored)


def attend_few_latents(queries: Tensor, cache: Tensor, attended: Tensor, work: DeviceWork, row: RowShape) -> None:
    """Writes what every sequence with few query tokens attends to into `attended`, in place."""
    few = work.few
    assert few is not None
    assert work.window is None, "latent attention has no sliding windows"
    heads = queries.shape[1]
    # Rounded up so that only a few variants of the kernels are compiled.
    pairs = power_of_two(few.max_queries) * heads
    shape = (few.max_items, pairs)
    partials = torch.empty((*shape, row.rank), dtype=torch.float32, device=queries.device)
    bests, totals = (torch.empty(shape, dtype=torch.float32, device=queries.device) for _ in range(2))
    rows, tile, warps, stages = _shape(pairs, queries.dtype.itemsize, cache.dtype.itemsize)
    launch_filling(
        few.max_items * ceil_div(pairs, rows), _latent_split_kernel, queries.device,
        queries, cache, attended, partials, bests, totals,
        work.tables, few.rows, few.seq_lens, few.query_starts, few.query_lens,
        few.item_starts, few.items, few.num_items, work.tables.stride(0), float(row.scale),
        warps=warps, stages=stages, PAIRS=pairs, ROWS=rows, TILE=tile, SPLIT=few.split_tokens,
        **_widths(cache, heads, row),
    )  # fmt: skip
    combine_splits(attended, partials, bests, totals, few, 1)


def attend_many_latents(queries: Tensor, cache: Tensor, attended: Tensor, work: DeviceWork, row: RowShape) -> None:
    """Writes the attention output of every sequence with many query tokens to `attended`."""
    many = work.many
    assert many is not None
    assert work.window is None, "latent attention has no sliding windows"
    heads = queries.shape[1]
    pairs = many.queries_a_tile * heads
    rows, tile, warps, stages = _shape(pairs, queries.dtype.itemsize, cache.dtype.itemsize)
    launch(
        _latent_prefill_kernel, (ceil_div(pairs, rows), many.num_tiles),
        queries, cache, attended, work.tables,
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
        "RANK_PAD": power_of_two(row.rank, 16),
        "ROPE": row.rope_dim,
        "ROPE_PAD": power_of_two(row.rope_dim, 16),
    }


def _shape(pairs: int, itemsize: int, stored_itemsize: int) -> tuple[int, int, int, int]:
    """Returns ((query, head) pairs of a program, keys in a tile, warps, stages) that fit registers and shared memory.

    `stored_itemsize`: bytes of a number in the cache; converting numbers of 8 bits takes registers.

    The compile gate checks them (`make kernels`) for the latents of DeepSeek, which have a rank of 512: with 64 pairs
    Hopper would use products of warp groups, and spill registers.
    """
    if INTERPRETED:
        # The interpreter runs programs one after another, so a few large ones are faster.
        return min(64, power_of_two(pairs, 16)), 64, 4, 1
    if itemsize > 2 or architecture() == "gfx942":
        return 16, 16, 8, 1
    most = 16 if stored_itemsize < itemsize else 32
    return min(most, power_of_two(pairs, 16)), 32, 8, 2
