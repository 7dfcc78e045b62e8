"""Clipped ranges: a part of the full range of a group's weights, chosen so that the outputs change least.

Values in a smaller range are closer together, so most weights are rounded less, and only the largest more. Called by
awq.
"""

import torch
from torch import Tensor

from antiphon.services.engine.quantizer.grid import Ranges, extremes, with_zeros

_CLIP_STEPS, _LEAST_CLIP = 10, 0.5


def clipped(weight: Tensor, size: int, products: Tensor, dtype: torch.dtype) -> Ranges:
    """Returns for each output and group the clipped range with the least output error, [out, groups, 1].

    The inputs of different groups are correlated, so the errors of groups may add up or cancel. Therefore the groups
    are chosen in turn, each given the errors that the other groups have at this point: those before it with their
    chosen ranges, those after it with full ranges.
    """
    grouped = weight.unflatten(1, (-1, size))
    low, high = extremes(grouped)
    chosen = with_zeros(low, high, dtype)
    errors = chosen.nearest(grouped).flatten(1) - weight
    for group in range(weight.shape[1] // size):
        columns = slice(group * size, (group + 1) * size)
        own, block = errors[:, columns], products[columns, columns]
        others = errors @ products[:, columns] - own @ block
        ends = low[:, group], high[:, group]
        ranges = _clipped_group(weight[:, columns], ends, block, others, dtype)
        chosen.scales[:, group], chosen.zeros[:, group] = ranges.scales, ranges.zeros
        errors[:, columns] = ranges.nearest(weight[:, columns]) - weight[:, columns]
    return chosen


def _clipped_group(
    weight: Tensor, ends: tuple[Tensor, Tensor], block: Tensor, others: Tensor, dtype: torch.dtype
) -> Ranges:
    """Returns the ranges [out, 1] of one group of weights [out, size], a part of their full range `ends`.

    `block` [size, size]: the products of the group's inputs. `others` [out, size]: the other groups' errors, multiplied
    by the products of their inputs and this group's.
    """
    best = with_zeros(*ends, dtype)
    least = torch.full_like(best.scales, torch.inf)
    for step in range(_CLIP_STEPS + 1):
        share = 1 - (1 - _LEAST_CLIP) * step / _CLIP_STEPS
        ranges = with_zeros(ends[0] * share, ends[1] * share, dtype)
        error = ranges.nearest(weight) - weight
        added = ((error @ block + 2 * others) * error).sum(dim=-1, keepdim=True)
        better = added < least
        least = torch.where(better, added, least)
        best = Ranges(torch.where(better, ranges.scales, best.scales), torch.where(better, ranges.zeros, best.zeros))
    return best
