"""One kernel between the query-key-value product and attention: QK norm, rotary embedding, writing to the KV cache.

    per head of the queries and keys:  x ← x / sqrt(mean(x²) + eps) · w           if the model norms them
                                       (a, b) ← (a cos φ - b sin φ, b cos φ + a sin φ)   see `kernels/rotary`
    per head of the values:            x ← x / sqrt(mean(x²) + eps)               if the model norms them too
    queries are overwritten in place; keys and values are stored in their slots as round(clamp(x)), `kernels/storage`

    qkv          [n, (heads + 2 kv_heads) · head_dim], queries, keys, values; a layer that reads the keys and values of
                 another one has queries only, [n, heads · head_dim], and norms for them
    positions    [n] int32, or with images [axes, n], of which each frequency uses one (M-RoPE, arXiv 2409.12191);
    slots        [n] int32, -1: key and value are not written
    table        [positions, 2, rotary_dim / 2], cosines and sines in the type of qkv; None: no rotation
    axes         [rotary_dim / 2] int32, which of a token's positions each frequency uses; None: positions are [n]
    norm         [heads + kv_heads, head_dim] or None

One program processes some heads of one token. Cosines and sines come from a table made once per model, because the
range reduction of arguments of some ten thousand radians is slow.

References: `kernels/rms_norm`, `kernels/rotary`, `kernels/storage`. Rotation: arXiv 2104.09864.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch, power_of_two

_HEADS_AT_ONCE = 8
_LARGEST = {"torch.float8_e4m3fn": 448.0, "torch.float8_e5m2": 57344.0, "torch.float16": 65504.0}


@triton.jit
def _load(qkv, norm, rows, head, columns, valid, turns, width, WIDTH: tl.constexpr, NORMED: tl.constexpr):
    """Returns the given columns of each head in float32, and the norm's factors for them (1 for value heads)."""
    inside = (valid & (head < width))[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(qkv + rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = x
    if NORMED:
        known = inside & turns[:, None]
        factor = tl.load(norm + (head * WIDTH)[:, None] + columns[None, :], mask=known, other=1.0).to(tl.float32)
    return x, factor


@triton.jit
def _store(qkv, keys, values, rows, slots, head, columns, x, inside, slot,
           HEADS: tl.constexpr, KV_HEADS: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """Writes the given columns of each head: queries in place, keys and values to their slot."""
    is_query, is_key = (head < HEADS)[:, None], ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    tl.store(qkv + rows[:, None] + columns[None, :], x.to(qkv.dtype.element_ty), mask=inside & is_query)
    if LARGEST > 0:
        # Rounded to the model's type first, so that the stored value does not depend on the precision of the norm.
        x = tl.minimum(tl.maximum(x.to(qkv.dtype.element_ty).to(tl.float32), -LARGEST), LARGEST)
    stored, places = x.to(keys.dtype.element_ty), slots[:, None] + columns[None, :]
    tl.store(keys + places, stored, mask=inside & is_key & (slot >= 0))
    tl.store(values + places, stored, mask=inside & is_value & (slot >= 0))


@triton.jit
def _rope_kernel(
    qkv, positions, slots, table, norm, keys, values, axes, axis_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKEN: tl.constexpr, ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, AT_ONCE: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr, VALUES_NORMED: tl.constexpr, NORM_LAST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    valid, turns = head < HEADS + 2 * KV_HEADS, head < HEADS + KV_HEADS
    slot = tl.load(slots + token).to(tl.int64)
    rows = token * ((HEADS + 2 * KV_HEADS) * D) + head * D
    own = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
    places = slot * TOKEN + own * D
    width = HEADS + 2 * KV_HEADS
    half = tl.arange(0, HALF_PAD)
    if INTERLEAVED:
        first, second = 2 * half, 2 * half + 1
    else:
        first, second = half, half + ROTARY // 2
    rest = ROTARY + tl.arange(0, REST_PAD)
    # The padding of a half must not overlap the other half, so its indices are moved after the end of the head.
    first, second = tl.where(half < ROTARY // 2, first, D), tl.where(half < ROTARY // 2, second, D)
    tail, tail_factor = _load(qkv, norm, rows, head, rest, valid, turns, width, D, NORMED)  # pyright: ignore[reportGeneralTypeIssues]
    squares = tl.sum(tail * tail, 1)
    if ROTARY > 0:
        a, a_factor = _load(qkv, norm, rows, head, first, valid, turns, width, D, NORMED)
        b, b_factor = _load(qkv, norm, rows, head, second, valid, turns, width, D, NORMED)
        squares += tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if NORMED:
        scale = tl.where(turns | VALUES_NORMED, 1.0 / tl.sqrt(squares / D + eps), 1.0)[:, None]
        tail = tail * scale * tail_factor
    inside = valid[:, None] & (rest < D)[None, :]
    _store(qkv, keys, values, rows, places, head, rest, tail, inside, slot, HEADS, KV_HEADS, LARGEST)
    if ROTARY > 0:
        if NORMED:
            a, b = a * scale, b * scale
        if NORMED and not NORM_LAST:
            a, b = a * a_factor, b * b_factor
        if axes is not None:
            axis = tl.load(axes + half, mask=half < ROTARY // 2, other=0)
            angle = tl.load(positions + axis * axis_stride + token).to(tl.int64) * ROTARY + half
        else:
            angle = tl.load(positions + token).to(tl.int64) * ROTARY + half
        cos = tl.load(table + angle, mask=half < ROTARY // 2, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(table + angle + ROTARY // 2, mask=half < ROTARY // 2, other=0.0).to(tl.float32)[None, :]
        turned_a = tl.where(turns[:, None], a * cos - b * sin, a)
        turned_b = tl.where(turns[:, None], b * cos + a * sin, b)
        if NORM_LAST:
            # The rotation does not change the mean square.
            turned_a, turned_b = turned_a * a_factor, turned_b * b_factor
        inside = valid[:, None] & (half < ROTARY // 2)[None, :]
        _store(qkv, keys, values, rows, places, head, first, turned_a, inside, slot, HEADS, KV_HEADS, LARGEST)
        _store(qkv, keys, values, rows, places, head, second, turned_b, inside, slot, HEADS, KV_HEADS, LARGEST)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: int,
    table: Tensor | None,
    interleaved: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
    norm_last: bool = False,
    values_normed: bool = False,
    axes: Tensor | None = None,
) -> None:
    """Norms and rotates queries and keys, and writes keys and values to the cache, see the module.

    `norm_last`: the norm comes after the rotation. `values_normed`: values are normed, as queries and keys are. `axes`
    is not used for positions [n].
    """
    head_dim = key_cache.shape[3]
    kv_heads = 0 if qkv.shape[1] == heads * head_dim else key_cache.shape[2]
    assert qkv.is_contiguous(), "qkv must be contiguous"
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim, qkv.shape
    assert norm is not None or not values_normed, "values are normed only if queries and keys are"
    assert positions.dim() == 1 or axes is not None, "several positions of a token need axes"
    rotary = 0 if table is None else 2 * table.shape[2]
    launch(
        _rope_kernel, (qkv.shape[0], ceil_div(heads + 2 * kv_heads, _HEADS_AT_ONCE)),
        qkv, positions, slots, table, norm, key_cache, value_cache, axes if positions.dim() > 1 else None,
        positions.stride(0), eps,
        warps=4, HEADS=heads, KV_HEADS=kv_heads, D=head_dim, TOKEN=token_distance(key_cache, value_cache),
        ROTARY=rotary, HALF_PAD=power_of_two(rotary // 2), REST_PAD=power_of_two(head_dim - rotary),
        AT_ONCE=_HEADS_AT_ONCE, INTERLEAVED=interleaved, NORMED=norm is not None, VALUES_NORMED=values_normed,
        NORM_LAST=norm is not None and norm_last, LARGEST=largest_stored(qkv.dtype, key_cache.dtype),
    )  # fmt: skip


def token_distance(key_cache: Tensor, value_cache: Tensor) -> int:
    """Returns how many numbers a token is behind the one before it, in both caches [blocks, block size, heads, D]."""
    blocks, tokens, *within = key_cache.stride()
    assert key_cache.stride() == value_cache.stride(), "keys and values must lie alike"
    assert blocks == key_cache.shape[1] * tokens, "blocks must follow one another"
    assert tuple(within) == (key_cache.shape[3], 1), "the heads of a token must be contiguous"
    return tokens


def largest_stored(dtype: torch.dtype, cache_dtype: torch.dtype) -> float:
    """Returns the largest number of the cache's type, to which values are clamped; 0.0 if they need no clamping."""
    return 0.0 if cache_dtype == dtype else _LARGEST.get(str(cache_dtype), 0.0)


def make_table(frequencies: Tensor, scale: float, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Returns cosines and sines [num_positions, 2, rotary_dim / 2], computed in float32 and rounded to `dtype`."""
    positions = torch.arange(num_positions, device=frequencies.device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1).to(dtype)
