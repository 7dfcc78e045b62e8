"""Chooses tokens from logits, vectorised over rows: penalties, candidate filters, one draw by inverse CDF.

    penalised(x) = x / r if x > 0 else x · r      for tokens of prompt and output     r: repetition penalty
                   - frequency · count - presence · [count > 0]                       count: in the output
    w_i          = exp((x_i - max x) / temperature)                                   in [0, 1], 1 for the best token
    candidates   top-k of w, of these the fewest that sum to top-p of their total, of these those with w >= min-p and
                 w >= top-a / Σ w over all tokens, which is: probability >= top-a · (greatest probability)^2
    token        first i, in vocabulary order, with w_1 + … + w_i > u · sum of w      over the candidates

If several tokens have the weight at a threshold, all of them are candidates, so a result never depends on how a sort
breaks ties. Sums are computed in float64 and row by row, so that a row's token does not depend on the other rows.
`SamplingColumns` is the one list of the parameters that are arrays. Called by the sampler.

    logits, weights [S, vocab] float32; everything else [S]
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from antiphon.shared.parameters.sampling import TOKEN_IDS_MAX, SamplingParams

GREEDY_BELOW = 1e-5
"""Below this temperature sampling is greedy."""
NO_TOP_K = TOKEN_IDS_MAX - 1
"""`top_k` of rows without a limit: more tokens than any vocabulary has."""
HEAD_CANDIDATES = 256
"""Number of most likely tokens that are sorted, unless top-k needs more.

They usually contain the whole nucleus (top-p) of a row; rows with a larger nucleus are searched in full.
"""
_DRAW_BLOCK = 512
"""Tokens in a block of the draw, which first finds the block and then the token."""
_LEAST_EXPONENT, _LEAST_WEIGHT = -87.0, 2e-38
"""Weights below `_LEAST_WEIGHT` > exp(`_LEAST_EXPONENT`) are 0. On a CPU, exp of smaller exponents, above all of the
-inf of forbidden tokens, takes ten to twenty times as long as that of others."""
_COARSE_BITS = 15
"""Low bits of a weight's bit pattern that are ignored in the first pass over a wide nucleus."""

Array = TypeVar("Array")
Changed = TypeVar("Changed")


class Column(NamedTuple):
    """The type of a column's numbers, on the host and on a device, and a row's number for a request's parameters."""

    dtype: DTypeLike
    value: Callable[[SamplingParams], float]


def _column(dtype: DTypeLike, value: Callable[[SamplingParams], float]) -> dict[str, Any]:
    return {"column": Column(dtype, value)}


def _top_k(params: SamplingParams) -> int:
    return min(params.top_k, NO_TOP_K) if params.top_k > 0 else NO_TOP_K


@dataclass(frozen=True, slots=True)
class SamplingColumns(Generic[Array]):  # positional: built from `COLUMNS`, in their order
    """The parameters with which tokens are chosen, one array for each, with one element for each row.

    The state table, a step's batch and its copy on a GPU have these columns. They are arrays of NumPy or tensors.
    """

    temperature: Array = field(metadata=_column(np.float32, lambda params: params.temperature))
    top_k: Array = field(metadata=_column(np.int32, _top_k))
    top_p: Array = field(metadata=_column(np.float64, lambda params: params.top_p))
    min_p: Array = field(metadata=_column(np.float32, lambda params: params.min_p))
    top_a: Array = field(metadata=_column(np.float32, lambda params: params.top_a))
    repetition: Array = field(metadata=_column(np.float32, lambda params: params.repetition_penalty))
    frequency: Array = field(metadata=_column(np.float32, lambda params: params.frequency_penalty))
    presence: Array = field(metadata=_column(np.float32, lambda params: params.presence_penalty))
    seeds: Array = field(metadata=_column(np.int64, lambda params: (params.seed + 2**63) % 2**64 - 2**63))
    """The 64 bits of the seed as a number with a sign, because tensors have no unsigned one."""

    def map(self, change: Callable[[Array], Changed]) -> "SamplingColumns[Changed]":
        """Returns the columns with `change` applied to each array."""
        return SamplingColumns(*(change(getattr(self, name)) for name in COLUMNS))


COLUMNS: dict[str, Column] = {one.name: one.metadata["column"] for one in fields(SamplingColumns)}


def new_columns(num_rows: int) -> SamplingColumns[NDArray[Any]]:
    """Returns columns of zeros."""
    return SamplingColumns(*(np.zeros(num_rows, dtype=one.dtype) for one in COLUMNS.values()))


def set_row(columns: SamplingColumns[NDArray[Any]], row: int, params: SamplingParams) -> None:
    """Writes the parameters of a request into a row."""
    for name, one in COLUMNS.items():
        getattr(columns, name)[row] = one.value(params)


def apply_penalties(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Returns new logits. `counts` [S, vocab] int32: occurrences in the output; `in_prompt` [S, vocab] bool."""
    in_output = counts > 0
    factors = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
    scaled = torch.where(logits > 0, logits / factors, logits * factors)
    return scaled - frequency[:, None] * counts - presence[:, None] * in_output


def relative_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns unnormalised probabilities: 1 for the best token, 0 for NaN and below 2e-38. Temperatures are above 0."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    weights = scaled.clamp_(min=_LEAST_EXPONENT).exp_()
    return torch.threshold_(weights, _LEAST_WEIGHT, 0.0).nan_to_num_(nan=0.0)


def candidate_threshold(weights: Tensor, columns: SamplingColumns[Tensor]) -> Tensor:
    """Returns the least weight [S] of a candidate."""
    threshold, top_k, top_p = columns.min_p, columns.top_k.long(), columns.top_p
    if columns.top_a.any():
        # The best token's weight is 1; a smaller sum is that of a broken model, in which no token would be left.
        total = weights.sum(dim=-1, dtype=torch.float64).clamp(min=1.0)
        threshold = torch.maximum(threshold, (columns.top_a / total).to(threshold.dtype))
    filtered = torch.nonzero((top_k < weights.shape[1]) | (top_p < 1.0)).squeeze(1)
    if not len(filtered):
        return threshold
    rows = (weights[filtered], top_k[filtered], top_p[filtered])
    edges = _edges(*rows, num_sorted=max(HEAD_CANDIDATES, _widest(top_k[filtered], weights.shape[1])))
    return threshold.index_put((filtered,), torch.maximum(edges, threshold[filtered]))


def draw(weights: Tensor, threshold: Tensor, uniforms: Tensor) -> Tensor:
    """Returns tokens [S] int64 for `uniforms` float64 in [0, 1).

    First finds the block of tokens in which the running sum exceeds the target, then the token in that block.
    """
    kept = torch.where(weights >= threshold[:, None], weights, 0.0) if threshold.any() else weights
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
    # Keeps the token inside the vocabulary if a row has no positive weight, which happens only with a broken model.
    return (block * _DRAW_BLOCK + offset).clamp(max=kept.shape[1] - 1).squeeze(1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Returns the target, at most the greatest number below the total.

    Rounding may make the target equal to the total, which no running sum exceeds.
    """
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _widest(top_k: Tensor, vocab_size: int) -> int:
    """Returns the largest top-k of the rows with a limit; 0 if there are none."""
    limited = top_k[top_k < vocab_size]
    return int(limited.max()) if len(limited) else 0


def _edges(weights: Tensor, top_k: Tensor, top_p: Tensor, num_sorted: int) -> Tensor:
    """Returns the least weight [S] that top-k and top-p allow.

    Uses the `num_sorted` best tokens, and a search of the whole row if these are too few for its top-p.
    """
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
    """Returns the least weight of the fewest tokens that sum to `wanted`, for one row [vocab], without sorting the row.

    The bit patterns of positive floats have the same order as the floats, so their high bits divide the tokens into
    classes of similar weight. Only the class in which the sum is reached is sorted.
    """
    classes = weights.view(torch.int32) >> _COARSE_BITS
    sums = torch.bincount(classes, weights=weights.to(torch.float64)).flip(0).cumsum(0)
    wanted = torch.minimum(wanted, sums[-1])
    place = torch.searchsorted(sums, wanted)
    above = torch.where(place > 0, sums[(place - 1).clamp(min=0)], 0.0)
    members = weights[classes == len(sums) - 1 - place].sort(descending=True).values
    reached = torch.searchsorted(members.cumsum(0, dtype=torch.float64), wanted - above)
    return members[reached.clamp(max=len(members) - 1)]
