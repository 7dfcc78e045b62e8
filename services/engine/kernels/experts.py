"""A mixture of experts: y = Σ_e w_e · expert_e(x) over the experts that a router picked for each token.

    expert(x) = W_down (silu(gate) · up),  [gate | up] = W_gate_up x
    x [n, hidden], W_gate_up [2m, hidden], W_down [hidden, m]; y like x
    logits [n, experts]; weights: the k largest of softmax(logits) in float32, divided by their sum if `normalise`

The plain reference: tokens are grouped by expert, and each expert multiplies its group once. Called by the expert MLP.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.engine.kernels.activation import Activation, gated

Product = Callable[[Tensor], Tensor]
"""x [n, in] → x Wᵀ [n, out] with the matrix W of one expert, in whatever form it is stored."""


def route(logits: Tensor, num_per_token: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Returns weights [n, k] in the logits' type and experts [n, k] int64, in order of decreasing weight."""
    weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(num_per_token, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def mixed_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Sequence[Product],
    down: Sequence[Product],
    activation: Activation,
) -> Tensor:
    """Returns y [n, hidden], see the module. `weights`, `experts` [n, k] as returned by `route`."""
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
        inner = gated(activation, gate_up[expert](x.index_select(0, tokens[group])))
        mixed.index_add_(0, tokens[group], down[expert](inner) * shares[group])
        first += count
    return mixed
