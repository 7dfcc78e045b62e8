"""Parts that both attention kernels share: how a tile of keys enters the running softmax.

    s = scale · q·k;  with a soft cap: cap · tanh(s / cap);  with linear biases: + slope · (key - query position)
    m' = max(m, max s);  l' = l · 2^(m - m') + Σ 2^(s - m');  acc' = acc · 2^(m - m') + Σ 2^(s - m') v

Scores are kept times log2(e), so that the exponential is the hardware's 2^x. The running softmax is that of online
normaliser calculation (arXiv 1805.02867) as used by FlashAttention-2 (arXiv 2307.08691).
"""

import triton
import triton.language as tl

from services.engine.triton.runtime import LOG2E, UPCAST


@triton.jit
def load_rows(
    cache, blocks, offsets, visible, head, d,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values [tokens, D padded] of one head; what is padding or, if masked, not visible is 0."""
    slots = blocks.to(tl.int64) * BLOCK_SIZE + offsets
    places = cache + ((slots * KV_HEADS + head) * D)[:, None] + d[None, :]
    if MASKED:
        return tl.load(places, mask=visible[:, None] & (d < D)[None, :], other=0.0)
    elif d.shape[0] != D:
        return tl.load(places, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def multiply(a, b, acc):
    """Acc + a b; b takes the type of a, an 8-bit float included."""
    b = b.to(a.dtype)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def make_scores(q, k, scale, softcap, slopes, distances, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores [queries, keys] times log2(e), before any mask; `distances` are key minus query positions."""
    zero = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    scores = multiply(q, tl.trans(k), zero)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1): no overflow, and exact enough where the cap is a few tens.
        scores = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E * scale / softcap)) + 1.0))
    else:
        scores = scores * (scale * LOG2E)
    if ALIBI:
        scores += (slopes * LOG2E)[:, None] * distances.to(tl.float32)
    return scores


@triton.jit
def accumulate(scores, v, best, total, acc, dtype: tl.constexpr):
    """One tile of the running softmax: (best [rows], total [rows], acc [rows, D]) and the tile's masked scores."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet has no best score: nothing minus nothing must not be a number.
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(best - anchor)
    total = total * shrink + tl.sum(weights, 1)
    acc = multiply(weights.to(dtype), v, acc * shrink[:, None])
    return new_best, total, acc
