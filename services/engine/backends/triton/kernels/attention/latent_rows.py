"""One kernel between the projections of latent attention and its scores: latent norm, rotation, writing to the cache.

    row of a token     [norm(latent) | rotate(key part)] is stored in its slot as round(clamp(x)), see `kernels/storage`
    query of a head    its last rope_dim numbers are rotated and stored in `turned`

    projected   [n, … | rank | rope_dim], rows may be further apart: latents and the rotated parts of keys
    queries     [n, heads, nope_dim + rope_dim], rows may be further apart
    turned      [n, heads, rope_dim], contiguous
    cache       [num_blocks, block_size, 1, rank + rope_dim]
    positions, slots   [n] int32; slot -1: the row is not written
    table       [positions, 2, rotary_dim / 2], see `rope_kv`; dimensions behind the first rotary_dim are not rotated

The first program of a token makes its row, the others each take some heads of its queries.

References: `kernels/rms_norm`, `kernels/rotary`, `kernels/storage`. arXiv 2405.04434.
"""

import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import largest_stored
from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch, power_of_two

_HEADS_AT_ONCE = 8


@triton.jit
def _latent_rows_kernel(
    projected, queries, turned, positions, slots, table, norm, cache, eps, projected_stride, row_start,
    query_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, ROTARY: tl.constexpr, AT_ONCE: tl.constexpr, INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, ROPE_PAD)
    turns = t < ROTARY
    if INTERLEAVED:
        partner, pair, is_first = t ^ 1, t // 2, t % 2 == 0
    else:
        is_first = t < ROTARY // 2
        pair = tl.where(is_first, t, t - ROTARY // 2)
        partner = tl.where(is_first, t + ROTARY // 2, pair)
    partner = tl.where(turns, partner, t)
    angles = table + tl.load(positions + token).to(tl.int64) * ROTARY + pair
    cos = tl.load(angles, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + ROTARY // 2, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(is_first, -sin, sin)
    if part == 0:
        slot = tl.load(slots + token).to(tl.int64)
        latent = projected + token * projected_stride + row_start
        i = tl.arange(0, RANK_PAD)
        x = tl.load(latent + i, mask=i < RANK, other=0.0).to(tl.float32)
        factor = tl.load(norm + i, mask=i < RANK, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)) * factor
        key = tl.load(latent + RANK + t, mask=t < ROPE, other=0.0).to(tl.float32)
        y = key * cos + tl.load(latent + RANK + partner, mask=t < ROPE, other=0.0).to(tl.float32) * sin
        if LARGEST > 0:
            # Rounded to the model's type first, as in `rope_kv`.
            x = tl.minimum(tl.maximum(x.to(projected.dtype.element_ty).to(tl.float32), -LARGEST), LARGEST)
            y = tl.minimum(tl.maximum(y.to(projected.dtype.element_ty).to(tl.float32), -LARGEST), LARGEST)
        row = cache + slot * (RANK + ROPE)
        tl.store(row + i, x.to(cache.dtype.element_ty), mask=(i < RANK) & (slot >= 0))
        tl.store(row + RANK + t, y.to(cache.dtype.element_ty), mask=(t < ROPE) & (slot >= 0))
    else:
        head = (part - 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        inside = (head < HEADS)[:, None] & (t < ROPE)[None, :]
        source = queries + token * query_stride + (head * (NOPE + ROPE) + NOPE)[:, None]
        query = tl.load(source + t[None, :], mask=inside, other=0.0).to(tl.float32)
        partners = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        rotated = query * cos[None, :] + partners * sin[None, :]
        place = turned + (token * HEADS + head)[:, None] * ROPE + t[None, :]
        tl.store(place, rotated.to(turned.dtype.element_ty), mask=inside)


def store_latents(
    projected: Tensor,
    queries: Tensor,
    turned: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    table: Tensor | None,
    interleaved: bool,
    norm: Tensor,
    eps: float,
) -> None:
    """Writes the rows of a step to the cache and rotates its queries into `turned`, see the module.

    `table`: None: nothing is rotated. `norm` [rank]: the weight of the latents' norm.
    """
    rank, (heads, query_dim) = norm.shape[0], queries.shape[1:]
    rope_dim, rotary = cache.shape[3] - rank, 0 if table is None else 2 * table.shape[2]
    assert turned.is_contiguous(), "rotated queries must be contiguous"
    assert turned.shape == (len(projected), heads, rope_dim), turned.shape
    assert rotary <= rope_dim, (rotary, rope_dim)
    assert projected.stride(1) == queries.stride(2) == 1, "rows must be contiguous"
    assert queries.stride(1) == query_dim, "the heads of a query must be contiguous"
    # Without rotation no program reads the table.
    table = norm if table is None else table
    launch(
        _latent_rows_kernel, (len(projected), 1 + ceil_div(heads, _HEADS_AT_ONCE)),
        projected, queries, turned, positions, slots, table, norm, cache, eps, projected.stride(0),
        projected.shape[1] - rank - rope_dim, queries.stride(0),
        warps=4, HEADS=heads, NOPE=query_dim - rope_dim, RANK=rank, RANK_PAD=power_of_two(rank), ROPE=rope_dim,
        ROPE_PAD=power_of_two(rope_dim), ROTARY=rotary, AT_ONCE=_HEADS_AT_ONCE, INTERLEAVED=interleaved,
        LARGEST=largest_stored(projected.dtype, cache.dtype),
    )  # fmt: skip
