"""Choosing tokens from logits, vectorised over rows: penalties, candidate filters, one draw by inverse CDF.

    penalised(x) = x / r if x > 0 else x · r      for tokens of prompt and output     r: repetition penalty
                   - frequency · count - presence · [count > 0]                       count: in the output
    w_i          = exp((x_i - max x) / temperature)                                   in (0, 1], the best token's is 1
    candidates   top-k of w, of those the fewest with share top-p of their sum, of those w >= min-p
    token        first i, in vocabulary order, with w_1 + … + w_i > u · sum of w      over the candidates

Equal weights at an edge are all candidates: a result never depends on how a sort breaks ties. Sums run in float64 and
row by row, so that a row's token does not depend on the rows beside it. Called by the sampler.

    logits, weights [S, vocab] float32; everything else [S]
"""

import torch
from torch import Tensor

HEAD_CANDIDATES = 256
"""Most likely tokens that usually hold the whole nucleus: only rows where they do not are searched in full."""
_DRAW_BLOCK = 512
"""Tokens that a draw skips at once."""
_COARSE_BITS = 15
"""Low bits of a weight's pattern that the first look at a wide nucleus leaves out."""


def apply_penalties(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """New logits. `counts` [S, vocab] int32: of each token in the output; `in_prompt` [S, vocab] bool."""
    in_output = counts > 0
    factors = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
    scaled = torch.where(logits > 0, logits / factors, logits * factors)
    return scaled - frequency[:, None] * counts - presence[:, None] * in_output


def relative_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities; the best token's is 1. Temperatures above 0. What is not a number weighs nothing."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    return torch.exp(scaled).nan_to_num_(nan=0.0)


def candidate_threshold(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least weight [S] of a candidate. `top_k` int64, the vocabulary's size for all; `top_p` float64, 1 for all."""
    threshold = min_p.to(weights.dtype)
    filtered = torch.nonzero((top_k < weights.shape[1]) | (top_p < 1.0)).squeeze(1)
    if not len(filtered):
        return threshold
    rows = (weights[filtered], top_k[filtered], top_p[filtered])
    edges = _edges(*rows, num_sorted=max(HEAD_CANDIDATES, _widest(top_k[filtered], weights.shape[1])))
    return threshold.index_put((filtered,), torch.maximum(edges, threshold[filtered]))


def draw(weights: Tensor, threshold: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [S] int64 for `uniforms` float64 in [0, 1).

    First the block of tokens in which the running sum passes the target, then the token in that block.
    """
    kept = torch.where(weights >= threshold[:, None], weights, 0.0)
    whole = kept.shape[1] // _DRAW_BLOCK * _DRAW_BLOCK
    sums = kept[:, :whole].unflatten(1, (whole // _DRAW_BLOCK, _DRAW_BLOCK)).sum(dim=-1, dtype=torch.float64)
    rest = kept[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)
    ends = torch.cat((sums, rest), dim=1).cumsum(dim=-1)
    target = _below(uniforms[:, None] * ends[:, -1:], ends[:, -1:])
    block = torch.searchsorted(ends, target, right=True)
    offsets = torch.arange(_DRAW_BLOCK, device=kept.device)
    tokens = block * _DRAW_BLOCK + offsets
    inside = tokens < kept.shape[1]
    members = torch.where(inside, kept.gather(1, tokens.clamp(max=kept.shape[1] - 1)), 0.0)
    running = members.cumsum(dim=-1, dtype=torch.float64)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    offset = torch.searchsorted(running, _below(target - before, running[:, -1:]), right=True)
    # A row without any weight, which only a broken model gives, still gets a token of the vocabulary.
    return (block * _DRAW_BLOCK + offset).clamp(max=kept.shape[1] - 1).squeeze(1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Rounding may lift a target to the sum itself, which no token is above."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _widest(top_k: Tensor, vocab_size: int) -> int:
    """The largest top-k of rows that have one."""
    limited = top_k[top_k < vocab_size]
    return int(limited.max()) if len(limited) else 0


def _edges(weights: Tensor, top_k: Tensor, top_p: Tensor, num_sorted: int) -> Tensor:
    """Edges of top-k and top-p [S]: from the `num_sorted` best tokens, or a full search where these do not suffice."""
    vocab_size = weights.shape[1]
    num_sorted = min(num_sorted, vocab_size)
    best = weights.topk(num_sorted, dim=-1).values
    k_edge = torch.where(top_k < vocab_size, best.gather(1, top_k.clamp(max=num_sorted)[:, None] - 1).squeeze(1), 0.0)
    kept = torch.where(weights >= k_edge[:, None], weights, 0.0).sum(dim=-1, dtype=torch.float64)
    wanted = top_p * kept
    reached = best.cumsum(dim=-1, dtype=torch.float64) >= wanted[:, None]
    enough = reached.any(dim=-1)
    p_edge = best.gather(1, reached.to(torch.int8).argmax(dim=-1, keepdim=True)).squeeze(1)
    edges = torch.where((top_p < 1.0) & enough, torch.maximum(k_edge, p_edge), k_edge)
    for row in torch.nonzero((top_p < 1.0) & ~enough).squeeze(1).tolist():
        edges[row] = torch.maximum(_wide_edge(weights[row], wanted[row]), k_edge[row])
    return edges


def _wide_edge(weights: Tensor, wanted: Tensor) -> Tensor:
    """The least weight of the fewest tokens that sum to `wanted`, for one row [vocab], without sorting it.

    Patterns of positive floats are ordered like the floats: their high bits divide the tokens into classes of similar
    weight. The class in which the sum is reached is sorted, and nothing else.
    """
    classes = weights.view(torch.int32) >> _COARSE_BITS
    sums = torch.bincount(classes, weights=weights.to(torch.float64)).flip(0).cumsum(0)
    wanted = torch.minimum(wanted, sums[-1])
    place = torch.searchsorted(sums, wanted)
    above = torch.where(place > 0, sums[(place - 1).clamp(min=0)], 0.0)
    members = weights[classes == len(sums) - 1 - place].sort(descending=True).values
    reached = torch.searchsorted(members.cumsum(0, dtype=torch.float64), wanted - above)
    return members[reached.clamp(max=len(members) - 1)]
