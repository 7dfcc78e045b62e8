"""What is done to the rows of x before products: rounding to 8 bits, and copying in the order of a matrix's columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch, power_of_two

_HALF_INT8 = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds a small float32 to the nearest integer, ties to even."""


@triton.jit
def _round_rows_kernel(
    x, rounded, row_scales, COLUMNS: tl.constexpr, PIECE: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr
):
    """Rounds a row of x to 8 bits, whole numbers or floating point; the largest number becomes LARGEST."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((PIECE,), tl.float32)
    for first in range(0, COLUMNS, PIECE):
        c = first + tl.arange(0, PIECE)
        part = tl.load(x + row * COLUMNS + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(part))
    scale = tl.div_rn(tl.max(largest, 0), LARGEST)
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(row_scales + row, scale)
    for first in range(0, COLUMNS, PIECE):
        c = first + tl.arange(0, PIECE)
        part = tl.load(x + row * COLUMNS + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
        shares = tl.div_rn(part, scale)
        if WHOLE:
            shares = (shares + _HALF_INT8) - _HALF_INT8
        tl.store(rounded + row * COLUMNS + c, shares.to(rounded.dtype.element_ty), mask=c < COLUMNS)


@triton.jit
def _order_rows_kernel(x, order, ordered, inputs, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Copies a row of x in the order of the columns of a matrix, with zeros for padding."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    source = tl.load(order + c, mask=c < COLUMNS, other=-1)
    part = tl.load(x + row * inputs + source, mask=source >= 0, other=0.0)
    tl.store(ordered + row * COLUMNS + c, part, mask=c < COLUMNS)


def order_rows(x: Tensor, order: Tensor) -> Tensor:
    """Returns x [n, in] as [n, columns]: the inputs that `order` [columns] names, zeros for -1."""
    rows, inputs = x.shape
    columns = len(order)
    ordered = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    piece = min(1024, power_of_two(columns, 16))
    grid = rows, ceil_div(columns, piece)
    launch(_order_rows_kernel, grid, x, order, ordered, inputs, warps=4, COLUMNS=columns, PIECE=piece)
    return ordered


def round_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Returns the rows of x [n, in] in 8 bits, of type int8 or float8_e4m3fn, and the scale of each, [n] float32."""
    rows, columns = x.shape
    rounded = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    piece = min(2048, power_of_two(columns, 16))
    whole = dtype == torch.int8
    launch(
        _round_rows_kernel, (rows,), x, rounded, scales,
        warps=4, COLUMNS=columns, PIECE=piece, LARGEST=127.0 if whole else torch.finfo(dtype).max, WHOLE=whole,
    )  # fmt: skip
    return rounded, scales
