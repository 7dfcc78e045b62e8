"""Samples one token for each row of logits, in four kernel launches. Defined by `kernels/sampling` and `philox`.

    1  survey   per chunk of the vocabulary: max and Σ exp of the original logits, best of the adjusted logits
    2  weigh    for sampled (not greedy) rows: weights relative to the row's best token; per chunk and power of two, the
                number and the sum of the weights that are at least that power
    3  collect  for rows with a threshold: the weights and tokens at least as great as the greatest power of two from
                which the threshold follows, in vocabulary order; nothing if they are more than `_COLLECTED`
    4  choose   per row: log normaliser; greedy rows take the best token, others find the candidates' threshold among
                the collected weights, or else among all, and draw

    adjusted    penalties for rows that have them, then -inf for tokens that the row's bitmask forbids
    threshold   the maximum of min-p, top-a / Σ w, the greatest t with #{w >= t} >= top-k, and the greatest t with
                Σ{w >= t} >= top-p · Σ of the weights that top-k keeps
    token       the first, in vocabulary order, at which the running sum of the candidates exceeds u times their sum

Weights are not negative, and the bit patterns of such floats have the same order as the floats. So a threshold is found
exactly, without sorting, by narrowing a range of patterns with a few pivots in each pass over the row. Sums are float64
in a fixed order, row by row. So a row's token does not depend on the other rows and equals the reference's, except for
the last bit of an exponential. u is Philox-4x32-10 of (seed, output position), see `kernels/philox`.

    logits [n, vocab] float32 | bfloat16 | float16; counts, in_prompt [rows, vocab] int32, int8
    bitmask [n, words] int32
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch, power_of_two
from antiphon.services.engine.kernels.sampling import GREEDY_BELOW, SamplingColumns

_CHUNK = 4096
_WEIGHED = 256
"""Number of tokens of a chunk that are compared with the powers of two at a time."""
_POWERS = 32
"""Powers of two: 1, 1/2, 1/4, …; the last is 0, which all weights reach."""
_COLLECTED = 4096
"""Most weights of a row that are collected. A row with more candidates is searched where its weights are."""
_SEARCHED = 1024
"""Number of tokens of a row that a pass of the threshold search loads at a time."""
_PIVOTS = 7
"""Pivots of a pass. They divide the range in eight, so a pass finds three of the threshold's thirty bits."""
_ONE = 0x3F800000
"""Bit pattern of 1.0, the greatest weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Adjustments of some rows' logits. All tensors are always given, so that one kernel variant serves all steps.

    `counts` of output tokens and `in_prompt` have a row for each batch slot of the worker. `bitmask` has a row for each
    sampled row with forbidden tokens, with one bit for each token, lowest bit first; 1 means allowed. `penalty_rows`
    and `mask_rows` [n] int32 are the row in these tensors of each sampled row; -1: none.
    """

    counts: Tensor
    in_prompt: Tensor
    bitmask: Tensor
    penalty_rows: Tensor
    mask_rows: Tensor


@triton.jit
def _adjust(x, row, i, inside, counts, in_prompt, bitmask, penalty_rows, mask_rows, repetitions, frequencies, presences,
            vocab, words):  # fmt: skip
    """Returns the logits `x` of the tokens `i` after penalties and bitmask; NaN becomes -inf."""
    penalty_row, mask_row = tl.load(penalty_rows + row), tl.load(mask_rows + row)
    if penalty_row >= 0:
        place = penalty_row.to(tl.int64) * vocab + i
        count = tl.load(counts + place, mask=inside, other=0)
        known = (count > 0) | (tl.load(in_prompt + place, mask=inside, other=0) != 0)
        factor = tl.where(known, tl.load(repetitions + row), 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x -= tl.load(frequencies + row) * count.to(tl.float32) + tl.where(count > 0, tl.load(presences + row), 0.0)
    if mask_row >= 0:
        word = tl.load(bitmask + mask_row.to(tl.int64) * words + i // 32, mask=inside, other=0)
        x = tl.where(((word >> (i % 32)) & 1) != 0, x, float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _survey_kernel(
    logits, counts, in_prompt, bitmask, penalty_rows, mask_rows, repetitions, frequencies, presences,
    tops, sums, bests, winners, vocab, words, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < vocab
    raw = tl.load(logits + row.to(tl.int64) * vocab + i, mask=inside, other=float("-inf")).to(tl.float32)
    x = _adjust(raw, row, i, inside, counts, in_prompt, bitmask, penalty_rows, mask_rows, repetitions, frequencies,
                presences, vocab, words)  # fmt: skip
    raw = tl.where(raw == raw, raw, float("-inf"))
    top, best = tl.max(raw, 0), tl.max(x, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.exp(raw - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(bests + place, best)
    tl.store(winners + place, tl.min(tl.where(inside & (x == best), i, vocab), 0))


@triton.jit
def _power(p, POWERS: tl.constexpr):
    """Returns the powers of two with these indices, see `_POWERS`."""
    return tl.where(p == POWERS - 1, 0.0, ((127 - p) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _weigh_kernel(
    logits, counts, in_prompt, bitmask, penalty_rows, mask_rows, repetitions, frequencies, presences,
    bests, temperatures, weights, numbers, totals, vocab, words,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GREEDY_BELOW: tl.constexpr, COLLECTED: tl.constexpr,
    PIECE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature >= GREEDY_BELOW:
        c, num_chunks = tl.arange(0, CHUNKS), tl.num_programs(1)
        best = tl.max(tl.load(bests + row * num_chunks + c, mask=c < num_chunks, other=float("-inf")), 0)
        p = tl.arange(0, POWERS)
        number, total = tl.zeros((POWERS,), tl.int32), tl.zeros((POWERS,), tl.float64)
        for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, PIECE):
            i = first + tl.arange(0, PIECE)
            inside = i < vocab
            place = row.to(tl.int64) * vocab + i
            x = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
            x = _adjust(x, row, i, inside, counts, in_prompt, bitmask, penalty_rows, mask_rows, repetitions,
                        frequencies, presences, vocab, words)  # fmt: skip
            w = tl.exp(tl.div_rn(x - best, temperature))
            w = tl.where(w == w, w, 0.0)
            tl.store(weights + place + row.to(tl.int64) * COLLECTED, w, mask=inside)
            reached = inside[:, None] & (w[:, None] >= _power(p, POWERS)[None, :])
            number += tl.sum(reached.to(tl.int32), 0)
            total += tl.sum(tl.where(reached, w.to(tl.float64)[:, None], 0.0), 0)
        place = (row * num_chunks + chunk) * POWERS + p
        tl.store(numbers + place, number)
        tl.store(totals + place, total)


@triton.jit
def _least(min_p, top_a, whole):
    """Returns the threshold of min-p and top-a. `whole`: the sum of all weights of the row."""
    return tl.maximum(min_p, (top_a / tl.maximum(whole, 1.0)).to(tl.float32))


@triton.jit
def _first_power(reached, POWERS: tl.constexpr):
    """Returns the index of the greatest power of two for which `reached` [POWERS] is true; the last one if none is."""
    p = tl.arange(0, POWERS)
    return tl.min(tl.where(reached, p, POWERS - 1), 0)


@triton.jit
def _collect_kernel(
    weights, numbers, totals, temperatures, top_ks, top_ps, min_ps, top_as, tokens, sizes, sums, vocab, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GREEDY_BELOW: tl.constexpr, COLLECTED: tl.constexpr,
    POWERS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(temperatures + row) >= GREEDY_BELOW:
        c, p = tl.arange(0, CHUNKS), tl.arange(0, POWERS)
        place = (row * num_chunks + c)[:, None] * POWERS + p[None, :]
        known = (c < num_chunks)[:, None]
        number = tl.load(numbers + place, mask=known, other=0)
        num_reached = tl.sum(number, 0)
        total = tl.sum(tl.load(totals + place, mask=known, other=0.0), 0)
        whole = tl.sum(tl.where(p == POWERS - 1, total, 0.0), 0)
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        least = _least(tl.load(min_ps + row), tl.load(top_as + row), whole)
        power = _first_power(_power(p, POWERS) <= least, POWERS)
        if top_p < 1.0:
            # A little more, because sums in another order may differ in their last bits.
            power = _first_power(total >= top_p * whole * (1.0 + 1e-9), POWERS)
        if top_k < vocab:
            # What top-k keeps is needed as a whole, because top-p is a share of its sum.
            power = _first_power(num_reached >= top_k, POWERS)
        size = tl.sum(tl.where(p == power, num_reached, 0), 0)
        size = tl.where((size <= COLLECTED) & ((top_k < vocab) | (top_p < 1.0) | (least > 0.0)), size, 0)
        if chunk == 0:
            tl.store(sizes + row, size)
            tl.store(sums + row, whole)
        if size > 0:
            mine = weights + row.to(tl.int64) * (vocab + COLLECTED)
            i = chunk * CHUNK + tl.arange(0, CHUNK)
            w = tl.load(mine + i, mask=i < vocab, other=-1.0)
            taken = w >= tl.sum(tl.where(p == power, _power(p, POWERS), 0.0), 0)
            before = tl.sum(tl.where((c < chunk)[:, None] & (p == power)[None, :], number, 0))
            target = before + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(mine + vocab + target, w, mask=taken)
            tl.store(tokens + row.to(tl.int64) * COLLECTED + target, i, mask=taken)


@triton.jit
def _uniform(seed, position):
    """Returns 53 random bits of (seed, position) as a float64 in [0, 1)."""
    bits = seed.to(tl.uint64, bitcast=True)
    k0, k1 = (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    zero = c0 ^ c0
    c1, c2, c3, left, right = zero, zero, zero, zero + 0xD2511F53, zero + 0xCD9E8D57
    for _ in tl.static_range(10):  # pyright: ignore[reportGeneralTypeIssues]
        a, b = c0, c2
        c0, c2 = tl.umulhi(b, right) ^ c1 ^ k0, tl.umulhi(a, left) ^ c3 ^ k1
        c1, c3 = b * right, a * left
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    high, low = (c0 >> 5).to(tl.int64), (c1 >> 6).to(tl.int64)
    return ((high << 26) | low).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _below(target, total):
    """Returns the minimum of the target and the greatest float64 below the total; 0 if the total is 0."""
    under = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    return tl.where(total > 0.0, tl.minimum(target, under), 0.0)


@triton.jit
def _edge(weights, wanted, vocab, COUNTED: tl.constexpr, PIECE: tl.constexpr, PIVOTS: tl.constexpr, ONE: tl.constexpr):
    """Returns the top-k or top-p threshold of a row.

    The tokens with at least this weight reach `wanted`, by their number if COUNTED, else by the sum of their weights;
    without the smallest weight among them they do not. The range [low, high) of bit patterns is narrowed until it has
    one pattern or contains the weight of at most one token.
    """
    low, high = tl.program_id(0) * 0, tl.program_id(0) * 0 + (ONE + 1)
    p = tl.arange(0, PIVOTS + 1)
    num_low, within = vocab, vocab
    while (high - low > 1) & (within > 1):
        # Pivots are low + step, low + 2 step, …; the last one is high, which is known not to reach `wanted`.
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + (p + 1) * step, high)
        counts = tl.zeros((PIECE, PIVOTS + 1), tl.int32)
        sums = tl.zeros((PIECE, PIVOTS + 1), tl.float64)
        for first in range(0, vocab, PIECE):
            i = first + tl.arange(0, PIECE)
            w = tl.load(weights + i, mask=i < vocab, other=0.0)
            above = w.to(tl.int32, bitcast=True)[:, None] >= pivots[None, :]
            counts += above.to(tl.int32)
            if not COUNTED:
                sums += tl.where(above, w.to(tl.float64)[:, None], 0.0)
        many = tl.sum(counts, 0)
        reached = many.to(tl.float64) if COUNTED else tl.sum(sums, 0)
        enough = (reached >= wanted) & (pivots < high)
        # Counts fall as pivots rise: the highest pivot that reaches `wanted` has the least count of those that do, the
        # lowest pivot that does not has the greatest count of those that do not.
        from_low = tl.min(tl.where(enough, many, num_low), 0)
        from_high = tl.max(tl.where(enough, 0, many), 0)
        low, high = tl.max(tl.where(enough, pivots, low), 0), tl.min(tl.where(enough, high, pivots), 0)
        num_low, within = from_low, from_low - from_high
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _edges(
    weights, threshold, top_k, top_p, whole, size, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr, PIVOTS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Returns the maximum of the threshold and those of top-k and top-p. `whole`: the sum of all weights of the row."""
    if top_k < vocab:
        edge = _edge(weights, top_k.to(tl.float64), size, True, PIECE, PIVOTS, ONE)
        threshold = tl.maximum(threshold, edge)
        whole = tl.sum(_sums_from(weights, edge, size, CHUNK, CHUNKS), 0)
    if top_p < 1.0:
        threshold = tl.maximum(threshold, _edge(weights, top_p * whole, size, False, PIECE, PIVOTS, ONE))
    return threshold


@triton.jit
def _sums_from(weights, threshold, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns for each chunk the sum of the weights that are at least the threshold, [CHUNKS] float64."""
    c = tl.arange(0, CHUNKS)
    sums = tl.zeros((CHUNKS,), tl.float64)
    for chunk in range(0, tl.cdiv(vocab, CHUNK)):
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        w = tl.load(weights + i, mask=i < vocab, other=0.0)
        sums = tl.where(c == chunk, tl.sum(tl.where(w >= threshold, w, 0.0).to(tl.float64), 0), sums)
    return sums


@triton.jit
def _draw(weights, sums, threshold, uniform, vocab, CHUNK: tl.constexpr):
    """Draws a token: finds the chunk in which the running sum exceeds the target, then the token in that chunk.

    `sums`: of each chunk's weights that are at least the threshold.
    """
    ends = tl.cumsum(sums, 0)
    total = tl.max(ends, 0)
    target = _below(uniform * total, total)
    passed = ends <= target
    chunk = tl.sum(passed.to(tl.int32), 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(weights + i, mask=i < vocab, other=0.0)
    running = tl.cumsum(tl.where(w >= threshold, w, 0.0).to(tl.float64), 0)
    left = _below(target - tl.max(tl.where(passed, ends, 0.0), 0), tl.max(running, 0))
    return chunk * CHUNK + tl.sum((running <= left).to(tl.int32), 0)


@triton.jit
def _choose_kernel(
    logits, tops, sums, bests, winners, weights, collected, sizes, wholes, totals, temperatures, top_ks, top_ps, min_ps,
    top_as, seeds, positions, tokens, logprobs, vocab, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr, PIVOTS: tl.constexpr, ONE: tl.constexpr,
    GREEDY_BELOW: tl.constexpr, COLLECTED: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    place, known = row * num_chunks + c, c < num_chunks
    top = tl.load(tops + place, mask=known, other=float("-inf"))
    anchor = tl.max(top, 0)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    norm = anchor + tl.log(tl.sum(tl.exp(top - anchor) * tl.load(sums + place, mask=known, other=0.0), 0))
    best = tl.load(bests + place, mask=known, other=float("-inf"))
    is_best = known & (best == tl.max(best, 0))
    token = tl.min(tl.where(is_best, tl.load(winners + place, mask=known, other=vocab), vocab), 0)
    if tl.load(temperatures + row) >= GREEDY_BELOW:
        whole, size = tl.load(wholes + row), tl.load(sizes + row)
        threshold = _least(tl.load(min_ps + row), tl.load(top_as + row), whole)
        mine = weights + row.to(tl.int64) * (vocab + COLLECTED) + tl.where(size > 0, vocab, 0)
        among = tl.where(size > 0, size, vocab)
        threshold = _edges(mine, threshold, tl.load(top_ks + row), tl.load(top_ps + row), whole, among, vocab,
                           CHUNK, CHUNKS, PIECE, PIVOTS, ONE)  # fmt: skip
        if (threshold > 0.0) | (size > 0):
            parts = _sums_from(mine, threshold, among, CHUNK, CHUNKS)
        else:
            parts = tl.load(totals + place * POWERS + POWERS - 1, mask=known, other=0.0)
        uniform = _uniform(tl.load(seeds + row), tl.load(positions + row))
        token = _draw(mine, parts, threshold, uniform, among, CHUNK)
        if size > 0:
            token = tl.load(collected + row.to(tl.int64) * COLLECTED + tl.minimum(token, size - 1))
    # Keeps the token inside the vocabulary if a row has no positive weight, which happens only with a broken model.
    token = tl.minimum(token, vocab - 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + row.to(tl.int64) * vocab + token).to(tl.float32) - norm)


def choose_tokens(
    logits: Tensor,
    columns: SamplingColumns[Tensor],
    positions: Tensor,
    adjustments: Adjustments,
    any_draws: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns tokens [n] int64 and their log probabilities [n] float32 under the logits before adjustments.

    `positions` [n] int32: index in the output of each row's token. `any_draws`: whether any row is not greedy; if none
    is, no memory is allocated for weights.
    """
    assert logits.is_contiguous(), "logits must be contiguous"
    rows, vocab = logits.shape
    device = logits.device
    chunk = min(_CHUNK, power_of_two(vocab, 16))
    chunks = ceil_div(vocab, chunk)
    # Separate tensors: a view that starts inside another tensor may be unaligned and would need another kernel variant.
    tops, sums, bests = (torch.empty((rows, chunks), dtype=torch.float32, device=device) for _ in range(3))
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    drawn = rows if any_draws else 0
    weights = torch.empty((drawn, vocab + _COLLECTED), dtype=torch.float32, device=device)
    numbers = torch.empty((drawn, chunks, _POWERS), dtype=torch.int32, device=device)
    totals = torch.empty((drawn, chunks, _POWERS), dtype=torch.float64, device=device)
    collected = torch.empty((drawn, _COLLECTED), dtype=torch.int32, device=device)
    sizes = torch.empty(drawn, dtype=torch.int32, device=device)
    wholes = torch.empty(drawn, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    adjusting = (
        logits, adjustments.counts, adjustments.in_prompt, adjustments.bitmask,
        adjustments.penalty_rows, adjustments.mask_rows, columns.repetition, columns.frequency, columns.presence,
    )  # fmt: skip
    words = adjustments.bitmask.shape[1]
    given: dict[str, Any] = {"CHUNK": chunk, "CHUNKS": power_of_two(chunks), "GREEDY_BELOW": GREEDY_BELOW}
    given |= {"COLLECTED": _COLLECTED, "POWERS": _POWERS}
    launch(_survey_kernel, (rows, chunks), *adjusting, tops, sums, bests, winners, vocab, words, warps=8, CHUNK=chunk)
    launch(
        _weigh_kernel, (drawn, chunks), *adjusting, bests, columns.temperature, weights, numbers, totals, vocab, words,
        warps=8, PIECE=min(_WEIGHED, chunk), **given,
    )  # fmt: skip
    filters = columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.top_a
    launch(
        _collect_kernel, (drawn, chunks), weights, numbers, totals, *filters, collected, sizes, wholes, vocab, chunks,
        warps=8, **given,
    )  # fmt: skip
    launch(
        _choose_kernel, (rows,), logits, tops, sums, bests, winners, weights, collected, sizes, wholes, totals,
        *filters, columns.seeds, positions, tokens, logprobs, vocab, chunks,
        warps=16, PIECE=min(_SEARCHED, chunk), PIVOTS=_PIVOTS, ONE=_ONE, **given,
    )  # fmt: skip
    return tokens, logprobs
