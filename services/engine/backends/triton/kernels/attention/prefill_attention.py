"""Paged attention for sequences with many query tokens: tiles of queries against all keys visible to them.

    o = softmax(scale · q kᵀ + mask) v, with a running softmax over tiles of keys, see `scores`

    shapes as in `decode_attention`; the queries are the last positions of a sequence, all its keys are in the cache

A tile holds some queries with all query heads that share a key head, as rows of one product. So keys are read once for
the group of heads, and with 64 rows or more Hopper can use warp-group products. The keys are processed in up to three
ranges: keys that a sliding window hides from some rows, keys visible to every row, which need no mask, and keys around
the diagonal.

    keys  0 … oldest key of last query | … first query  | … last query
          masked (window only)         | no mask        | masked (diagonal)

With `horizons` [n] int32 a query sees the keys up to its horizon, at its own position or behind it: the tokens of an
image see the whole image. The last range then ends at the farthest horizon of the tile's queries.

Reference: `kernels/paged_attention`. FlashAttention-2 (arXiv 2307.08691) over a block table (arXiv 2309.06180).
"""

import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import DeviceWork, Geometry
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import token_distance
from antiphon.services.engine.backends.triton.kernels.runtime import architecture, launch, power_of_two
from antiphon.services.engine.backends.triton.kernels.scores import (
    accumulate,
    first_key,
    in_window,
    load_rows,
    make_scores,
    with_sink,
)


@triton.jit
def _attend_run(
    start, end, last_key, q, positions, seen_to, best, total, acc, key_cache, value_cache, table, head, d, slope,
    window, scale, softcap,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MUTUAL: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, end) to the running softmax and returns its new state (best, total, acc).

    `start` is a multiple of TILE. If MASKED is false, so is `end`, and every row sees every key. If MASKED is true,
    keys past `last_key` are ignored. If MUTUAL is true, a row sees the keys up to `seen_to`, not up to its position.
    """
    for first in range(start, end, TILE):
        keys = first + tl.arange(0, TILE)
        visible = keys <= last_key
        if MASKED:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=visible, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        k = load_rows(key_cache, blocks, keys % BLOCK_SIZE, visible, head, d, BLOCK_SIZE, TOKEN, D, MASKED)
        v = load_rows(value_cache, blocks, keys % BLOCK_SIZE, visible, head, d, BLOCK_SIZE, TOKEN, D, MASKED)
        distances = keys[None, :] - positions[:, None]
        s = make_scores(q, k.to(q.dtype), scale, softcap, slope, distances, SOFTCAP, ALIBI)
        if MASKED:
            seen = keys[None, :] <= seen_to[:, None] if MUTUAL else distances <= 0
            if WINDOW:
                seen = seen & in_window(keys, positions, distances, window, WINDOW)
            s = tl.where(seen, s, float("-inf"))
        best, total, acc = accumulate(s, v, best, total, acc, q.dtype)
    return best, total, acc


@triton.jit
def _prefill_kernel(
    queries, key_cache, value_cache, attended, tables, rows, seq_lens, query_starts, query_lens, tiles, slopes,
    sinks, horizons,
    query_stride, table_stride, window, scale, softcap,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    packed = tl.load(tiles + tl.program_id(1))
    sequence, tile = packed >> 16, packed & 0xFFFF
    seq_len, num_queries = tl.load(seq_lens + sequence), tl.load(query_lens + sequence)
    context = seq_len - num_queries
    r, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    query, heads = tile * QUERIES + r // GROUP, head * GROUP + r % GROUP
    asked = (query < num_queries) & (r < QUERIES * GROUP)
    # Rows are counted from the tile's first token: numbers of 32 bits, which are cheap to compute twice.
    token = tl.load(query_starts + sequence).to(tl.int64) + tile * QUERIES
    stored = asked[:, None] & (d < D)[None, :]
    places = queries + token * query_stride + (r // GROUP * query_stride + heads * D)[:, None]
    q = tl.load(places + d[None, :], mask=stored, other=0.0)
    slope = tl.load(slopes + heads, mask=asked, other=0.0) if ALIBI else 0.0
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    first = context + tile * QUERIES
    last = tl.minimum(first + QUERIES, seq_len) - 1
    positions = context + query
    seen_to, farthest = positions, last
    if horizons is not None:
        seen_to = tl.load(horizons + token + r // GROUP, mask=asked, other=0)
        farthest = tl.max(seen_to, 0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    whole = (first + 1) // TILE * TILE
    start = 0
    if WINDOW:
        start = first_key(first, window, WINDOW) // TILE * TILE
        edge = tl.minimum(tl.cdiv(first_key(last, window, WINDOW), TILE) * TILE, whole)
        best, total, acc = _attend_run(
            start, edge, last, q, positions, seen_to, best, total, acc, key_cache, value_cache, table, head, d, slope,
            window, scale, softcap, BLOCK_SIZE, TOKEN, D, TILE, True, WINDOW, SOFTCAP, ALIBI, horizons is not None,
        )  # fmt: skip
        start = tl.maximum(start, edge)
    best, total, acc = _attend_run(
        start, whole, last, q, positions, seen_to, best, total, acc, key_cache, value_cache, table, head, d, slope,
        window, scale, softcap, BLOCK_SIZE, TOKEN, D, TILE, False, WINDOW, SOFTCAP, ALIBI, False,
    )  # fmt: skip
    best, total, acc = _attend_run(
        tl.maximum(start, whole), farthest + 1, farthest, q, positions, seen_to, best, total, acc, key_cache,
        value_cache, table, head, d, slope, window, scale, softcap, BLOCK_SIZE, TOKEN, D, TILE, True, WINDOW, SOFTCAP,
        ALIBI, horizons is not None,
    )  # fmt: skip
    if sinks is not None:
        total = with_sink(total, best, sinks, heads, asked)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = attended + token * (KV_HEADS * GROUP * D) + (r // GROUP * (KV_HEADS * GROUP * D) + heads * D)[:, None]
    tl.store(places + d[None, :], out.to(attended.dtype.element_ty), mask=stored)


def attend_many(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, attended: Tensor, work: DeviceWork, g: Geometry
) -> None:
    """Writes the attention output of every sequence with many query tokens into `attended`, in place."""
    many = work.many
    assert many is not None
    heads, head_dim = queries.shape[1:]
    group = heads // g.kv_heads
    each = many.queries_a_tile
    tile, warps, stages = _shape(power_of_two(head_dim, 16), queries.dtype.itemsize)
    launch(
        _prefill_kernel, (g.kv_heads, many.num_tiles),
        queries, key_cache, value_cache, attended, work.tables,
        many.rows, many.seq_lens, many.query_starts, many.query_lens, many.tiles, g.slopes, g.sinks,
        many.horizons,
        queries.stride(0), work.tables.stride(0), work.window or 0, float(g.scale), float(g.softcap or 0.0),
        warps=warps, stages=stages, BLOCK_SIZE=key_cache.shape[1], TOKEN=token_distance(key_cache, value_cache),
        KV_HEADS=g.kv_heads, GROUP=group, D=head_dim, D_PAD=power_of_two(head_dim, 16), QUERIES=each,
        ROWS=power_of_two(each * group, 16), TILE=tile,
        WINDOW=work.window_kind, SOFTCAP=g.softcap is not None, ALIBI=g.slopes is not None,
    )  # fmt: skip


def _shape(head_dim: int, itemsize: int) -> tuple[int, int, int]:
    """Returns (keys in a tile, warps, stages) that fit registers and shared memory, as the compile gate checks."""
    if itemsize > 2:
        return 16, 8, 1
    if head_dim > 256:
        return 16, 8, {"sm_80": 2, "sm_90": 3, "sm_100": 3, "gfx942": 1}[architecture()]
    if architecture() in ("sm_90", "sm_100"):
        return {16: (128, 8, 3), 32: (128, 8, 3), 64: (128, 8, 3), 128: (64, 8, 3)}.get(head_dim, (32, 8, 2))
    if architecture() == "gfx942":
        return (64, 8, 2) if head_dim <= 64 else (32, 8, 2)
    return (64, 8, 3) if head_dim <= 64 else (32, 8, 3)
