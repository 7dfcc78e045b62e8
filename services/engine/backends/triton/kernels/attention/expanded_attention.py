"""Attention of many queries over latents in the expanded form: keys and values of each head are made of the rows.

    gathered    [rows of a piece, rank + rope_dim]: rows of latents (c, r), copied from the paged cache
    made        [rows of a piece, heads, nope_dim + value_dim]: W_key c and W_value c of each head, from the library
    query (q, s) of a head, row (c, r) of a token:  score = scale · (q · W_key c + s · r),  value = W_value c

    queries     [num_tokens, heads, nope_dim + rope_dim], rows may be further apart: only the plain parts q are read
    turned      [num_tokens, heads, rope_dim]: the rotated parts s
    attended    [num_tokens, heads, value_dim]

Sequences, pieces and tiles are those of `expanded_work`. A program takes a tile of queries of one head and the keys of
one piece. With several pieces, the running softmax of a tile (best, total, acc) goes from one to the next in memory.
The rotated part of a key is the same for all heads, so it is read from the gathered rows.

Reference: `kernels/latent_attention`. FlashAttention-2 (arXiv 2307.08691) with keys wider than values.
"""

import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.expanded_work import SEGMENT_WORDS, ExpandedWork, Piece
from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    LOG2E,
    architecture,
    ceil_div,
    launch,
    power_of_two,
)
from antiphon.services.engine.backends.triton.kernels.scores import accumulate, load_columns, multiply

_WORDS = tl.constexpr(SEGMENT_WORDS)
_GATHERED_AT_ONCE = 8


@triton.jit
def _gather_kernel(
    cache, gathered, tables, segments, table_stride,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    segment = segments + tl.program_id(1) * _WORDS
    first_key, num_keys = tl.load(segment + 4), tl.load(segment + 5)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, PAD)
    table = tables + tl.load(segment).to(tl.int64) * table_stride
    keys = first_key + row
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=row < num_keys, other=0)
    slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    mask = (row < num_keys)[:, None] & (c < WIDTH)[None, :]
    x = tl.load(cache + (slots * WIDTH)[:, None] + c[None, :], mask=mask, other=0.0)
    place = (tl.load(segment + 6) + row).to(tl.int64) * WIDTH
    tl.store(gathered + place[:, None] + c[None, :], x.to(gathered.dtype.element_ty), mask=mask)


@triton.jit
def _attend_made(
    start, end, num_seen, q, turned, positions, best, total, acc, keys, gathered, d, t, v, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, end) of a segment to the running softmax and returns its new state (best, total, acc).

    `positions`: the queries' places among the keys of the segment. If MASKED is false, every query sees every key. If
    MASKED is true, keys from `num_seen` on are not read.
    """
    for first in range(start, end, TILE):
        key = first + tl.arange(0, TILE)
        seen = key < num_seen
        rows = keys + key.to(tl.int64) * (HEADS * (NOPE + VALUE))
        k = load_columns(rows, d, seen, NOPE, MASKED)
        r = load_columns(gathered + key.to(tl.int64) * (RANK + ROPE), t, seen, ROPE, MASKED)
        values = load_columns(rows + NOPE, v, seen, VALUE, MASKED)
        s = multiply(turned, tl.trans(r), tl.zeros((q.shape[0], TILE), tl.float32))
        s = multiply(q, tl.trans(k), s) * (scale * LOG2E)
        if MASKED:
            # Queries may see keys behind those of the segment, which are another piece's.
            s = tl.where(seen[None, :] & (key[None, :] <= positions[:, None]), s, float("-inf"))
        best, total, acc = accumulate(s, values, best, total, acc, q.dtype)
    return best, total, acc


@triton.jit
def _expanded_prefill_kernel(
    queries, turned, made, gathered, attended, sums, bests, totals, segments, tiles, query_stride, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    packed = tl.load(tiles + tl.program_id(1))
    segment, tile = segments + (packed >> 16) * _WORDS, packed & 0xFFFF
    seq_len, num_queries = tl.load(segment + 1), tl.load(segment + 3)
    first_key, num_keys = tl.load(segment + 4), tl.load(segment + 5)
    d, t, v = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    r = tl.arange(0, QUERIES)
    query = tile * QUERIES + r
    asked = query < num_queries
    token = tl.load(segment + 2).to(tl.int64) + query
    places = queries + token * query_stride + head * (NOPE + ROPE)
    q = tl.load(places[:, None] + d[None, :], mask=asked[:, None] & (d < NOPE)[None, :], other=0.0)
    places = turned + (token * HEADS + head) * ROPE
    s = tl.load(places[:, None] + t[None, :], mask=asked[:, None] & (t < ROPE)[None, :], other=0.0)
    # Places of the first and the last query among the keys of the segment.
    first = seq_len - num_queries + tile * QUERIES - first_key
    last = tl.minimum(first + QUERIES, seq_len - first_key) - 1
    row = tl.load(segment + 6).to(tl.int64)
    keys = made + row * (HEADS * (NOPE + VALUE)) + head * (NOPE + VALUE)
    parts = gathered + row * (RANK + ROPE) + RANK
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, VALUE_PAD), tl.float32)
    place = token * HEADS + head
    stored = asked[:, None] & (v < VALUE)[None, :]
    if sums is not None:
        goes_on = asked & (first_key > 0)
        best = tl.load(bests + place, mask=goes_on, other=float("-inf"))
        total = tl.load(totals + place, mask=goes_on, other=0.0)
        acc = tl.load(sums + (place * VALUE)[:, None] + v[None, :], mask=stored & (first_key > 0), other=0.0)
    end = tl.minimum(last + 1, num_keys)
    whole = tl.maximum(tl.minimum(first + 1, num_keys), 0) // TILE * TILE
    best, total, acc = _attend_made(
        0, whole, end, q, s, first + r, best, total, acc, keys, parts, d, t, v, scale,
        HEADS, RANK, NOPE, ROPE, VALUE, TILE, False,
    )  # fmt: skip
    best, total, acc = _attend_made(
        whole, end, end, q, s, first + r, best, total, acc, keys, parts, d, t, v, scale,
        HEADS, RANK, NOPE, ROPE, VALUE, TILE, True,
    )  # fmt: skip
    if sums is not None:
        later = last >= num_keys
        tl.store(bests + place, best, mask=asked & later)
        tl.store(totals + place, total, mask=asked & later)
        tl.store(sums + (place * VALUE)[:, None] + v[None, :], acc, mask=stored & later)
        stored = stored & (last < num_keys)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(attended + (place * VALUE)[:, None] + v[None, :], out.to(attended.dtype.element_ty), mask=stored)


def gather_rows(cache: Tensor, gathered: Tensor, tables: Tensor, piece: Piece) -> None:
    """Copies the rows of a piece from the cache, which may have 8-bit floats, into `gathered`, see the module."""
    width = cache.shape[3]
    launch(
        _gather_kernel, (ceil_div(piece.most_keys, _GATHERED_AT_ONCE), piece.num_segments),
        cache, gathered, tables, piece.segments, tables.stride(0),
        warps=4, BLOCK_SIZE=cache.shape[1], WIDTH=width, PAD=power_of_two(width), ROWS=_GATHERED_AT_ONCE,
    )  # fmt: skip


def attend_made(
    queries: Tensor,
    turned: Tensor,
    made: Tensor,
    gathered: Tensor,
    attended: Tensor,
    sums: tuple[Tensor, Tensor, Tensor] | None,
    work: tuple[ExpandedWork, Piece],
    scale: float,
) -> None:
    """Attends to the keys of a piece; queries that see no key behind it are finished and written to `attended`.

    `sums`: of queries that are not finished, [num_tokens, heads, value_dim] and twice [num_tokens, heads] float32; None
    if there is only one piece. Pieces must come in order.
    """
    heads, query_dim = queries.shape[1:]
    rope, value = turned.shape[2], attended.shape[2]
    nope, (expanded, piece) = query_dim - rope, work
    assert queries.stride(2) == 1, "queries must be contiguous"
    assert queries.stride(1) == query_dim, "the heads of a query must be contiguous"
    tile, warps, stages = _shape(max(nope, value), queries.dtype.itemsize)
    launch(
        _expanded_prefill_kernel, (heads, piece.num_tiles),
        queries, turned, made, gathered, attended, *(sums or (None, None, None)), piece.segments, piece.tiles,
        queries.stride(0), float(scale),
        warps=warps, stages=stages, HEADS=heads, RANK=gathered.shape[1] - rope, NOPE=nope,
        NOPE_PAD=power_of_two(nope, 16), ROPE=rope, ROPE_PAD=power_of_two(rope, 16), VALUE=value,
        VALUE_PAD=power_of_two(value, 16), QUERIES=expanded.queries_a_tile, TILE=tile,
    )  # fmt: skip


def _shape(width: int, itemsize: int) -> tuple[int, int, int]:
    """Returns (keys in a tile, warps, stages) that fit registers and shared memory, as the compile gate checks.

    `width`: of a key without its rotated part or of a value, whichever is wider.
    """
    if INTERPRETED:
        return 64, 4, 1
    if itemsize > 2:
        return 16, 8, 1
    if architecture() == "gfx942":
        return 32, 8, 1
    if width > 128:
        return 32, 8, 2
    return (32, 8, 2) if architecture() == "sm_80" else (64, 8, 3)
