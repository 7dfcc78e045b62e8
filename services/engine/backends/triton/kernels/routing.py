"""Chooses the experts of each token and their weights in one launch; the reference is `kernels/experts.route`.

    logits [n, experts] → scores in float32: their softmax, or the sigmoid of each
    the k best by score + correction, from the groups with the highest sums of their best scores
    weights: their scores, divided by their sum if `normalise`, times `scale` and a factor of the expert

One program a token: its scores stay in registers, [groups, experts of a group]. Among equal scores the expert with the
lowest number is chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import launch, power_of_two
from antiphon.services.engine.models.description import Experts

_NONE = tl.constexpr(float("-inf"))
_TOTAL_MIN = tl.constexpr(1e-20)
"""Least divisor of weights, as in the reference."""


@triton.jit
def _within_groups(ranks, g, p, CHOSEN: tl.constexpr, BEST: tl.constexpr):
    """Returns the ranks [groups, experts of a group], -inf outside of the CHOSEN groups.

    `g` [groups, 1], `p` [1, experts of a group]: their numbers.
    """
    left, total = ranks, tl.zeros((ranks.shape[0],), tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(left, 1)
        total += best
        at = tl.argmax(left, 1)
        left = tl.where(p == at[:, None], _NONE, left)
    numbers = tl.arange(0, ranks.shape[0])
    kept = tl.zeros((ranks.shape[0],), tl.int32)
    for _ in tl.static_range(CHOSEN):
        at = tl.argmax(total, 0)
        kept = tl.where(numbers == at, 1, kept)
        total = tl.where(numbers == at, _NONE, total)
    return tl.where(kept[:, None] > 0, ranks, _NONE)


@triton.jit
def _route_kernel(
    logits, correction, factors, weights, chosen,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST: tl.constexpr,
    PER_TOKEN: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """PLACES, ROWS, WIDE: PER_TOKEN, GROUPS and the experts of a group, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    g, p = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    expert = g * (EXPERTS // GROUPS) + p
    real = (g < GROUPS) & (p < EXPERTS // GROUPS)
    x = tl.load(logits + token * EXPERTS + expert, mask=real, other=_NONE).to(tl.float32)
    if SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = tl.div_rn(powers, tl.sum(tl.sum(powers, 1), 0))
    ranks = scores
    if correction is not None:
        ranks += tl.load(correction + expert, mask=real, other=0.0)
    ranks = tl.where(real, ranks, _NONE)
    if CHOSEN_GROUPS < GROUPS:
        ranks = _within_groups(ranks, g, p, CHOSEN_GROUPS, BEST)
    place = tl.arange(0, PLACES)
    found, shares = tl.zeros((PLACES,), tl.int32), tl.zeros((PLACES,), tl.float32)
    for k in tl.static_range(PER_TOKEN):
        best = tl.max(tl.max(ranks, 1), 0)
        # Scores that are not numbers equal none: the last expert is then taken, which exists.
        at = tl.min(tl.min(tl.where(ranks == best, expert, EXPERTS - 1), 1), 0)
        share = tl.sum(tl.sum(tl.where(expert == at, scores, 0.0), 1), 0)
        found, shares = tl.where(place == k, at, found), tl.where(place == k, share, shares)
        ranks = tl.where(expert == at, _NONE, ranks)
    if NORMALISE:
        shares = tl.div_rn(shares, tl.maximum(tl.sum(shares, 0), _TOTAL_MIN))
    shares = shares * SCALE
    if factors is not None:
        shares = shares * tl.load(factors + found)
    stored = place < PER_TOKEN
    tl.store(chosen + token * PER_TOKEN + place, found, mask=stored)
    tl.store(weights + token * PER_TOKEN + place, shares.to(weights.dtype.element_ty), mask=stored)


def route_tokens(
    logits: Tensor, experts: Experts, correction: Tensor | None, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns weights [n, k] in the type of `logits` [n, experts], and experts [n, k] int32, the best first.

    `correction`, `factors` [experts] float32: see `Experts.correction` and `Experts.beside_mlp`.
    """
    n, per_token = logits.shape[0], experts.num_per_token
    weights = torch.empty((n, per_token), dtype=logits.dtype, device=logits.device)
    chosen = torch.empty((n, per_token), dtype=torch.int32, device=logits.device)
    launch(
        _route_kernel, (n,), logits.contiguous(), correction, factors, weights, chosen,
        warps=1,
        EXPERTS=experts.num_experts,
        GROUPS=experts.num_groups,
        CHOSEN_GROUPS=experts.num_chosen_groups,
        BEST=min(experts.best_of_group, experts.num_experts // experts.num_groups),
        PER_TOKEN=per_token,
        PLACES=power_of_two(per_token),
        ROWS=power_of_two(experts.num_groups),
        WIDE=power_of_two(experts.num_experts // experts.num_groups),
        SIGMOID=experts.scoring == "sigmoid",
        NORMALISE=experts.normalise,
        SCALE=float(experts.scale),
    )  # fmt: skip
    return weights, chosen
