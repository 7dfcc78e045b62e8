"""GPTQ (arXiv 2210.17323): rounds column after column; the columns that follow compensate the error of each.

With the Hessian H = XᵀX of a matrix's inputs and the upper Cholesky factor U of its inverse, rounding column j with
error e changes the columns k > j by -e U[j, k] / U[j, j].

In activation order, the columns with the largest H[j, j] come first, while all others can still compensate their
errors, and groups are formed in that order. Called by `algorithms`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from antiphon.services.engine.quantizer.grid import INT4_MIDDLE, Ranges, Rounded, symmetric
from antiphon.services.engine.quantizer.layouts import DAMPING

_MOST_DAMPING = 1.0
_STEPS, _LEAST = 10, 0.6


def gptq_rounded(
    weight: Tensor, products: Tensor, size: int, dtype: torch.dtype, *, activation_order: bool = False
) -> Rounded:
    """Rounds `weight` [out, in] float32 to 4 bits in symmetric groups of `size` inputs. `products`: see `Statistics`.

    Raises ArithmeticError if the products are not positive definite even with damping.
    """
    if not activation_order:
        return _in_order(weight, products, size, dtype)
    order = products.diagonal().argsort(descending=True, stable=True)
    place = order.argsort()
    rounded = _in_order(weight[:, order], products[order][:, order], size, dtype)
    return replace(rounded, values=rounded.values[:, place], groups=place // size)


def _in_order(weight: Tensor, products: Tensor, size: int, dtype: torch.dtype) -> Rounded:
    """Rounds the columns in their order."""
    left, used = weight.clone(), products.diagonal() > 0
    left[:, ~used] = 0
    factor = _inverse_factor(products, used)
    importance = products.diagonal()
    values, scales = torch.empty(weight.shape, dtype=torch.uint8), []
    for first in range(0, weight.shape[1], size):
        group = slice(first, first + size)
        block, corner = left[:, group].clone(), factor[group, group]
        ranges = _range(block, importance[group], dtype)
        errors = torch.empty_like(block)
        for column in range(size):
            chosen = ranges.values(block[:, column : column + 1])
            values[:, first + column] = chosen[:, 0].to(torch.uint8)
            rounded = (chosen - ranges.zeros) * ranges.scales
            errors[:, column] = (block[:, column] - rounded[:, 0]) / corner[column, column]
            block[:, column + 1 :] -= errors[:, column, None] * corner[column, column + 1 :]
        left[:, first + size :] -= errors @ factor[group, first + size :]
        scales.append(ranges.scales)
    zeros = torch.full((weight.shape[0], len(scales)), INT4_MIDDLE, dtype=torch.uint8)
    return Rounded(values, torch.cat(scales, dim=1).to(dtype), zeros)


def _inverse_factor(products: Tensor, used: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped products."""
    hessian = products.to(torch.float64)
    mean = hessian.diagonal().mean()
    damping = DAMPING
    while damping <= _MOST_DAMPING:
        damped = hessian + torch.diag(torch.where(used, damping * mean, torch.clamp(mean, min=1.0)))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
        damping *= 10
    raise ArithmeticError(
        "the products of a matrix's inputs are not positive: the model gives values that are no numbers"
    )


def _range(block: Tensor, importance: Tensor, dtype: torch.dtype) -> Ranges:
    """Returns for each output the symmetric range with the least error, weighted by the channels' importance."""
    largest = block.abs().amax(dim=1, keepdim=True)
    best = symmetric(largest, dtype)
    least = torch.full_like(largest, torch.inf)
    for step in range(_STEPS + 1):
        ranges = symmetric(largest * (1 - (1 - _LEAST) * step / _STEPS), dtype)
        error = ((ranges.nearest(block) - block).square() * importance).sum(dim=1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = Ranges(torch.where(better, ranges.scales, best.scales), best.zeros)
    return best
