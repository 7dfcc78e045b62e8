"""Functions that the attention kernels share: ranges of keys, scores of a tile of keys, update of the running softmax.

    s = scale · q·k;  with a soft cap: cap · tanh(s / cap);  with linear biases: + slope · (key - query position)
    m' = max(m, max s);  l' = l · 2^(m - m') + Σ 2^(s - m');  acc' = acc · 2^(m - m') + Σ 2^(s - m') v

Scores are multiplied by log2(e), so that the exponential is the hardware's 2^x. The running softmax is the online
normaliser calculation (arXiv 1805.02867) as used by FlashAttention-2 (arXiv 2307.08691).
"""

import triton
import triton.language as tl

from antiphon.services.engine.backends.triton.kernels.runtime import LOG2E, UPCAST
from antiphon.services.engine.kernels.splits import LONG_SPLIT, SHORT_SPLITS

_SHORT, _LONG = tl.constexpr(SHORT_SPLITS), tl.constexpr(LONG_SPLIT)


@triton.jit
def split_range(split, seq_len, SPLIT: tl.constexpr):
    """Returns the first key of a split and the key after its last one. See `kernels/splits`."""
    start = SPLIT * (tl.minimum(split, _SHORT) + _LONG * tl.maximum(split - _SHORT, 0))
    size = tl.where(split < _SHORT, SPLIT, _LONG * SPLIT)
    return start, tl.minimum(start + size, seq_len)


@triton.jit
def blocks_of(table, first, keys, visible, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Returns the blocks of a tile's keys, of which `first`, a multiple of TILE, is visible; one if it has them all."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + first // BLOCK_SIZE)
    else:
        return tl.load(table + keys // BLOCK_SIZE, mask=visible, other=0)


@triton.jit
def load_rows(
    cache, blocks, offsets, visible, head, d,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns keys or values [tokens, D padded] of one head. Padding is 0; if MASKED, invisible tokens are 0 too.

    `blocks`: of each token, or one of all. TOKEN: distance of tokens in the cache, which are further apart than their
    heads where layers share a tensor.
    """
    slots = blocks.to(tl.int64) * BLOCK_SIZE + offsets
    places = cache + head * D + (slots * TOKEN)[:, None] + d[None, :]
    if MASKED:
        return tl.load(places, mask=visible[:, None] & (d < D)[None, :], other=0.0)
    elif d.shape[0] != D:
        return tl.load(places, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def load_columns(rows, columns, visible, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Returns columns of each row (pointers), 0 from WIDTH on. If MASKED, invisible rows are 0 and not read."""
    places = rows[:, None] + columns[None, :]
    if MASKED and columns.shape[0] != WIDTH:
        return tl.load(places, mask=visible[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(places, mask=visible[:, None], other=0.0)
    elif columns.shape[0] != WIDTH:
        return tl.load(places, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def multiply(a, b, acc):
    """Returns acc + a b. b, which may be an 8-bit float, is converted to the type of a."""
    b = b.to(a.dtype)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def make_scores(q, k, scale, softcap, slopes, distances, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Returns scores [queries, keys] times log2(e), without mask. `distances`: key positions minus query positions."""
    zero = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    scores = multiply(q, tl.trans(k), zero)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1) does not overflow and is exact enough if the cap is a few tens.
        scores = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E * scale / softcap)) + 1.0))
    else:
        scores = scores * (scale * LOG2E)
    if ALIBI:
        scores += (slopes * LOG2E)[:, None] * distances.to(tl.float32)
    return scores


@triton.jit
def first_key(positions, window, WINDOW: tl.constexpr):
    """Returns the first key that queries see: of a window that slides (WINDOW 1), or of a chunk (WINDOW 2)."""
    if WINDOW == 2:
        return positions - positions % window
    else:
        return tl.maximum(positions - window + 1, 0)


@triton.jit
def in_window(keys, positions, distances, window, WINDOW: tl.constexpr):
    """Returns which keys are not before the first one that each query sees, [queries, keys]."""
    if WINDOW == 2:
        return keys[None, :] >= first_key(positions, window, WINDOW)[:, None]
    else:
        return distances > -window


@triton.jit
def accumulate(scores, v, best, total, acc, dtype: tl.constexpr):
    """Adds a tile with masked scores to the running softmax. Returns (best [rows], total [rows], acc [rows, D])."""
    best, total, weights, shrink = weigh(scores, best, total)  # pyright: ignore[reportGeneralTypeIssues]
    return best, total, multiply(weights.to(dtype), v, acc * shrink[:, None])


@triton.jit
def weigh(scores, best, total):
    """Returns the new best and total, the weights of the scores [rows, keys], and the factor on what was summed."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row without any visible key has the best score -inf, and -inf minus -inf would be NaN.
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(best - anchor)
    return new_best, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def with_sink(total, best, sinks, heads, asked):
    """Returns the total of the running softmax plus each row's sink (a score without a value)."""
    sink = tl.load(sinks + heads, mask=asked, other=0.0) * LOG2E
    # Rows without any visible key have the best score -inf and the values 0.
    return total + tl.exp2(sink - tl.where(best == float("-inf"), sink, best))
