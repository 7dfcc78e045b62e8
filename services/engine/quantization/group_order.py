"""The order in which the inputs of a matrix are stored so that those that share a scale lie side by side.

GPTQ with activation order rounds the most important inputs first and groups them in that order, so a group has inputs
from all over the matrix. Products need the columns of a group side by side: the columns of the matrix are sorted by
group while it is loaded, and each product reads its inputs in the same order. Called by `formats.grouped` and `weight`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupOrder:
    """Columns sorted by group."""

    order: Tensor
    """int32 [columns]: the input of each stored column. -1: padding, which makes the group a multiple of `size`."""
    groups: Tensor
    """int64 [blocks]: the group whose scale each block of `size` columns has."""
    size: int
    """Columns of a block; the last one may be shorter."""

    def taken(self, columns: Tensor) -> Tensor:
        """Returns the columns of a matrix [out, in] in the order of `self.order`: [out, columns].

        Columns of padding have arbitrary numbers.
        """
        return columns[:, self.order.clamp(min=0)].contiguous()


def group_order(groups: Tensor, size: int, multiple: int) -> GroupOrder:
    """Returns the order for inputs whose groups are `groups` [in] int64.

    If `size` is a multiple of `multiple` and all groups but one have `size` inputs, each block is one of these groups.
    Otherwise (for a part of a matrix, which has only some inputs of each group) every group is padded to a multiple of
    `multiple` columns.
    """
    counts = torch.bincount(groups)
    short = (counts > 0) & (counts != size)
    if size % multiple == 0 and int(short.sum()) <= 1 and int(counts.max()) <= size:
        # A short group is the last one.
        rank = torch.where(short, len(counts), torch.arange(len(counts)))
        order = rank[groups].argsort(stable=True)
        return GroupOrder(order.to(torch.int32), groups[order[::size]], size)
    padded = -(-counts // multiple) * multiple
    order = torch.full((int(padded.sum()),), -1, dtype=torch.int32)
    inputs = groups.argsort(stable=True)
    # An input's column is its place among all inputs, plus the padding of the groups before it.
    padding = (padded - counts).cumsum(0) - (padded - counts)
    order[torch.arange(len(inputs)) + padding[groups[inputs]]] = inputs.to(torch.int32)
    block = math.gcd(*padded[padded > 0].tolist())
    return GroupOrder(order, torch.arange(len(counts)).repeat_interleave(padded // block), block)
