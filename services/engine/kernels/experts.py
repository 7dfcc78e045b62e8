"""A mixture of experts: y = Σ_e w_e · expert_e(x) over the experts that a router picked for each token.

    expert(x) = W_down (act(gate) · up),  [gate | up] = W_gate_up x; products may have biases
    x [n, hidden], W_gate_up [2m, hidden], W_down [hidden, m]; y like x
    logits [n, experts] → scores in float32: their softmax, or the sigmoid of each
    weights: the k largest scores, divided by their sum if `normalise`, times a scale

The weights may multiply the experts' inputs in place of their outputs: y = Σ_e expert_e(w_e · x).

A correction [experts] is added to the scores only for the selection (arXiv 2408.15664). With groups (arXiv 2412.19437),
each group has the sum of its best scores, usually the best two, and the experts are selected from the groups with the
highest sums.

The plain reference: tokens are grouped by expert, and each expert multiplies its group once. Called by the expert MLP.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from antiphon.services.engine.kernels.activation import Activation

Product = Callable[[Tensor], Tensor]
"""x [n, in] → x Wᵀ + b [n, out] with the matrix W of one expert, in any form."""


_TOTAL_MIN = 1e-20
"""Minimum divisor of weights: the sigmoids of very negative logits are zero."""


def route(
    logits: Tensor,
    num_per_token: int,
    normalise: bool,
    *,
    sigmoid: bool = False,
    correction: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    best_of_group: int = 2,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns weights [n, k] in the logits' type and experts [n, k] int64, in the order of the choice, best first.

    `groups`: number of groups, and number of groups from which a token's experts are selected, by the sum of the
    `best_of_group` highest scores in each.
    """
    wide = logits.to(torch.float32)
    scores = wide.sigmoid() if sigmoid else wide.softmax(dim=-1)
    ranks = scores if correction is None else scores + correction
    if groups[0] > groups[1]:
        ranks = _within_groups(ranks, *groups, best_of_group)
    experts = ranks.topk(num_per_token, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_TOTAL_MIN)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(logits.dtype), experts


def _within_groups(ranks: Tensor, count: int, chosen: int, best_of_group: int) -> Tensor:
    """Returns ranks [n, experts], -inf outside of each row's chosen groups."""
    grouped = ranks.unflatten(-1, (count, -1))
    best = grouped.topk(min(best_of_group, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(chosen, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def mixed_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Sequence[Product],
    down: Sequence[Product],
    activation: Activation,
    weighted_inputs: bool = False,
) -> Tensor:
    """Returns y [n, hidden], see the module.

    `weights`, `experts` [n, k] as returned by `route`; `activation`: gate_up [n, 2m] → [n, m] (`activation.gated_by`).
    """
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    shares = weights.flatten().index_select(0, order).unsqueeze(1)
    mixed = torch.zeros_like(x)
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        group = slice(first, first + count)
        inputs = x.index_select(0, tokens[group])
        if weighted_inputs:
            inputs = (inputs * shares[group]).to(x.dtype)
        outputs = down[expert](activation(gate_up[expert](inputs)))
        mixed.index_add_(0, tokens[group], (outputs if weighted_inputs else outputs * shares[group]).to(x.dtype))
        first += count
    return mixed
