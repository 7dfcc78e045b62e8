"""Matrix products with quantized weights, which are read in their stored form and dequantized in registers.

    y = x Wᵀ + b (+ residual),   W[n, c] = (number[n, c] - zero[n, group]) · scale[n, group]

    int8          8 bits a number, with or without groups
    int4          4 bits, an index among 16 levels; two columns a byte, see `KernelWeight`
    fp8           float8_e4m3, with or without groups (blocks)
    int8_dynamic  8 bits; each row of x is rounded to 8 bits with a scale of its own, and sums are exact integers

If the columns of W are stored in another order than that of x (`QuantizedWeight.order`), x is first copied in the order
of the columns.

    x, residual, y [n, ·] float32 | bfloat16 | float16

Three forms. `quantized_linear` chooses the first or the last by a rule, and `autotune` any by measuring:

    few rows    a kernel that reads W in its stored form. The numbers without scale are exact in the type of x, and
                scales are applied to float32 sums, so results are at least as exact as those of the dequantized matrix
                (`models/layers/linear.QuantizedLinear`, the reference). The columns are divided among several programs
                if there are few outputs, so that all multiprocessors take part in reading W. Sums are in a fixed order:
                a row's result does not depend on the other rows of the step.
    swapped     the same kernel computes W xᵀ: tensor cores read a tile of W from the registers in which it was
                dequantized, for 16 to 128 rows of x, so a step of up to 128 rows dequantizes every number once
    many rows   W is dequantized in the type of x, and the vendor's library multiplies. That reads and writes the matrix
                once more, but the few-rows form takes longer with each tile of rows, because it dequantizes in
                registers for every tile. int8_dynamic has larger tiles for many rows, with the same results.

References: Marlin (arXiv 2408.11743) for memory-bound products of few rows, and for groups' scales; swapped operands as
in CUTLASS's products of mixed types, and `wgmma` in NVIDIA's PTX documentation for the operand in registers; LLM.int8
(arXiv 2208.07339) and SmoothQuant (arXiv 2211.10438) for rows in 8 bits. The conversion of float8 through the bits of
float16 is exact, and works on devices without that type.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.products.rows import order_rows, round_rows
from antiphon.services.engine.backends.triton.kernels.products.unpacking import add_piece, load_levels
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight, dequantized, float8_factor
from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    architecture,
    ceil_div,
    launch,
    num_processors,
    power_of_two,
)

FEW_ROWS = 16
"""Rows of a tile in the form for few rows: the minimum of a tensor core product."""
_TILES_MAX = 2
"""Tiles up to which the form for few rows is used. On an H100 a tile took 0.03 ms (int8, fp8) or 0.04 ms (int4) for a
matrix of 4096 x 14336, and reading and writing this matrix takes 0.1 ms."""
_MANY_ROWS = 256
"""Rows from which int8_dynamic has its largest tiles."""
_PROGRAMS_A_PROCESSOR, _PROGRAMS_A_PROCESSOR_INT4 = 4, 8
"""Number of programs on each multiprocessor that were fastest on an H100; those of int4 read half as many bytes."""
_SPLITS_MAX = 8
_SWAPPED_ROWS, _SWAPPED_NARROW_ROWS = 128, 32
"""Most rows of a tile with swapped operands, and most of one with few outputs."""
_JOINED = 64
"""Outputs of a program that adds partial sums."""
_EVEN_SHARE = 128
"""A power of two, by which whole numbers are divided exactly."""


@triton.jit
def _finish(acc, r, n, at, real, row_scales, scales, bias, residual, out, rows, width, GROUPED: tl.constexpr):
    """Scales the sums of all columns, adds bias and residual, and stores the result."""
    y = acc.to(tl.float32)
    if not GROUPED:
        y = y * tl.load(scales + at)[None, :]
    if row_scales is not None:
        y = y * tl.load(row_scales + r, mask=r < rows, other=0.0)[:, None]
    if bias is not None:
        y += tl.load(bias + at).to(tl.float32)[None, :]
    stored = real & (n < width)[None, :]
    place = r.to(tl.int64)[:, None] * width + n[None, :]
    if residual is not None:
        y += tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows"])
def _quantized_kernel(
    x, row_scales, values, scales, zeros, levels, bias, residual, out, partial, rows, width,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, MIDDLE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, FLOAT8: tl.constexpr, SPAN: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Multiplies SPAN columns. If that is not all, the sums go to `partial` [splits, rows, width].

    SWAPPED: W is the left operand of the products and rows of x the right one, so sums are [WIDE, ROWS].
    """
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = (r < rows)[:, None]
    source = x + tl.where(r < rows, r, 0).to(tl.int64)[:, None] * COLUMNS
    # Rows past the end of W are replaced by its last row, because a mask would prevent wide loads.
    at = tl.minimum(n, width - 1)
    lines = values + at.to(tl.int64)[:, None] * STRIDE
    table = levels
    if levels is not None:
        table = load_levels(levels)
    acc = tl.zeros((WIDE, ROWS) if SWAPPED else (ROWS, WIDE), tl.int32 if KIND == "int8_dynamic" else tl.float32)
    start = tl.program_id(2) * SPAN
    end = tl.minimum(start + SPAN, COLUMNS)
    if GROUP > 0:
        # Scales are read one piece ahead, so that no product waits for them.
        scale = tl.load(scales + tl.minimum(start, COLUMNS - 1) // GROUP * width + at)
        for first in range(start, end, PIECE):
            group = first // GROUP * width + at
            following = tl.load(scales + tl.minimum(first + PIECE, COLUMNS - 1) // GROUP * width + at)
            zero = None if zeros is None else tl.load(zeros + group)[:, None]
            total = tl.zeros(acc.shape, tl.float32)
            total = add_piece(
                total, source, lines, first, real, zero, table, COLUMNS, PIECE, MIDDLE, KIND, FLOAT8, SWAPPED
            )
            acc += total * (scale[:, None] if SWAPPED else scale[None, :])
            scale = following
    else:
        zero = None if zeros is None else tl.load(zeros + at)[:, None]
        for first in range(start, end, PIECE):
            acc = add_piece(acc, source, lines, first, real, zero, table, COLUMNS, PIECE, MIDDLE, KIND, FLOAT8, SWAPPED)
    if SWAPPED:
        acc = tl.trans(acc)
    if partial is None:
        _finish(acc, r, n, at, real, row_scales, scales, bias, residual, out, rows, width, GROUP > 0)
    else:
        place = (tl.program_id(2) * rows + r).to(tl.int64)[:, None] * width + n[None, :]
        tl.store(partial + place, acc, mask=real & (n < width)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _join_kernel(
    partial, row_scales, scales, bias, residual, out, rows, width,
    ROWS: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of each output (split-K) in a fixed order."""
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = (r < rows)[:, None]
    place = r.to(tl.int64)[:, None] * width + n[None, :]
    mask = real & (n < width)[None, :]
    acc = tl.load(partial + place, mask=mask, other=0)
    for split in range(1, SPLITS):
        acc += tl.load(partial + split * rows.to(tl.int64) * width + place, mask=mask, other=0)
    at = tl.minimum(n, width - 1)
    _finish(acc, r, n, at, real, row_scales, scales, bias, residual, out, rows, width, GROUPED)


def quantized_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns y, see the module, by the form for its number of rows. All tensors are contiguous."""
    return (tiles_linear if in_tiles(x.shape[0], weight) else library_linear)(x, weight, bias, residual)


def tiles_linear(x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Returns y by the kernel that reads W in its stored form, for any number of rows."""
    return _stored_linear(x, weight, bias, residual, _shape(x.shape[0], weight, num_processors(x.device)))


def swapped_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns y by the same kernel with swapped operands, for any number of rows: up to 128 share what is unpacked."""
    shape = _swapped_shape(x.shape[0], weight, x.dtype.itemsize, num_processors(x.device))
    return _stored_linear(x, weight, bias, residual, shape)


def _stored_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None, residual: Tensor | None, shape: "_Shape"
) -> Tensor:
    rows, columns = x.shape[0], weight.columns
    x = _columns_of(x, weight, residual)
    out = torch.empty((rows, weight.width), dtype=x.dtype, device=x.device)
    x, row_scales = round_rows(x) if weight.kind == "int8_dynamic" else (x, None)
    partial = None
    if shape.splits > 1:
        sums = torch.int32 if weight.kind == "int8_dynamic" else torch.float32
        partial = torch.empty((shape.splits, rows, weight.width), dtype=sums, device=x.device)
    span = ceil_div(ceil_div(columns, shape.splits), weight.piece) * weight.piece
    grid = ceil_div(rows, shape.rows), ceil_div(weight.width, shape.wide)
    launch(
        _quantized_kernel, (*grid, shape.splits),
        x, row_scales, weight.values, weight.scales, weight.zeros, weight.levels, bias, residual, out, partial, rows,
        weight.width,
        warps=shape.warps, stages=shape.stages, ROWS=shape.rows, WIDE=shape.wide, SPAN=span, SWAPPED=shape.swapped,
        **weight.constants,
    )  # fmt: skip
    if partial is not None:
        launch(
            _join_kernel, (ceil_div(rows, FEW_ROWS), ceil_div(weight.width, _JOINED)),
            partial, row_scales, weight.scales, bias, residual, out, rows, weight.width,
            warps=4, ROWS=FEW_ROWS, WIDE=_JOINED, SPLITS=shape.splits, GROUPED=weight.group_size > 0,
        )  # fmt: skip
    return out


def library_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns y by the vendor's library: W is dequantized first.

    int8_dynamic: the numbers of rows and of W are multiplied in the type of x, which has them exactly; divided by 128,
    so that float16 has their sums.
    """
    x = _columns_of(x, weight, residual)
    if weight.kind != "int8_dynamic":
        y = F.linear(x, dequantized(weight, x.dtype), bias)
        return y if residual is None else y.add_(residual)
    rounded, row_scales = round_rows(x)
    numbers = weight.values[:, : weight.columns].to(x.dtype).div_(_EVEN_SHARE)
    sums = F.linear(rounded.to(x.dtype).div_(_EVEN_SHARE), numbers)
    y = sums.to(torch.float32).mul_(weight.scales * _EVEN_SHARE**2).mul_(row_scales[:, None])
    for added in (bias, residual):
        if added is not None:
            y.add_(added)
    return y.to(x.dtype)


def scaled_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns y by the vendor's library for numbers in float8_e4m3: the rows of x are rounded too.

    For weights of kind fp8 without groups; on a GPU for sizes that 16 divides, of compute capability 8.9 or newer.
    """
    x = _columns_of(x, weight, residual)
    rounded, row_scales = round_rows(x, torch.float8_e4m3fn)
    numbers = weight.values[:, : weight.columns].view(torch.float8_e4m3fn)
    y = F.scaled_mm(
        rounded, numbers.t(), row_scales[:, None], F.ScalingType.RowWise, weight.scales[None] / float8_factor(),
        F.ScalingType.RowWise, output_dtype=x.dtype,
    )  # fmt: skip
    for added in (bias, residual):
        if added is not None:
            y.add_(added)
    return y


def _columns_of(x: Tensor, weight: KernelWeight, residual: Tensor | None) -> Tensor:
    """Checks what a product is given. Returns x [n, in] in the order of the columns of W."""
    assert weight.columns == x.shape[1] or weight.order is not None, (weight.columns, x.shape)
    assert x.is_contiguous(), x.stride()
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    return x if weight.order is None else order_rows(x, weight.order)


def in_tiles(rows: int, weight: KernelWeight) -> bool:
    """Whether the rule has the kernel compute a number of rows, not the library."""
    return weight.kind == "int8_dynamic" or rows <= few_rows(weight)


def few_rows(weight: KernelWeight) -> int:
    """Returns the maximum rows of the form for few rows. Choosing levels takes longer than reading the matrix."""
    return FEW_ROWS if weight.levels is not None or weight.kind == "int8_dynamic" else _TILES_MAX * FEW_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Rows and outputs of a program, warps, stages of the pipeline, and programs among which columns are divided."""

    rows: int
    wide: int
    warps: int
    stages: int
    splits: int = 1
    swapped: bool = False


def _shape(rows: int, weight: KernelWeight, processors: int) -> _Shape:
    """Returns the shape of a product.

    Triton 3.6 cannot compile a pipeline of the loads for few rows for gfx942.
    """
    deep = architecture() != "gfx942"
    if weight.kind == "int8_dynamic" and rows > few_rows(weight):
        large = rows >= _MANY_ROWS and not INTERPRETED
        tall, wide = (128, 128) if large else (64, 128 if INTERPRETED else 64)
        programs = ceil_div(rows, tall) * ceil_div(weight.width, wide)
        splits = _splits(weight, processors // programs)
        return _Shape(rows=tall, wide=wide, warps=8 if large else 4, stages=3 if deep else 2, splits=splits)
    # The interpreter runs programs one after another, so a few large ones are faster.
    wide = 128 if INTERPRETED else 32
    each = _PROGRAMS_A_PROCESSOR_INT4 if weight.kind == "int4" else _PROGRAMS_A_PROCESSOR
    wanted = power_of_two(max(1, processors * each // ceil_div(weight.width, wide)))
    return _Shape(rows=FEW_ROWS, wide=wide, warps=4, stages=4 if deep else 1, splits=_splits(weight, wanted))


def _swapped_shape(rows: int, weight: KernelWeight, itemsize: int, processors: int) -> _Shape:
    """Returns the shape of a product with swapped operands for rows of a type with `itemsize` bytes."""
    # Products of float32 are computed in registers, which hold a small tile.
    tall = min(power_of_two(rows, FEW_ROWS), _SWAPPED_ROWS if itemsize <= 2 or INTERPRETED else FEW_ROWS)
    # Every program reads all of x, so with many rows each has more outputs.
    large = tall > _SWAPPED_NARROW_ROWS or INTERPRETED
    wide = (128 if large else 64) if itemsize <= 2 or INTERPRETED else 32
    programs = ceil_div(rows, tall) * ceil_div(weight.width, wide)
    each = max(1, min(_PROGRAMS_A_PROCESSOR, 128 // tall))
    return _Shape(
        rows=tall,
        wide=wide,
        warps=8 if large else 4,
        stages=(3 if large else 4) if architecture() != "gfx942" else 1,
        splits=_splits(weight, processors * each // programs),
        swapped=True,
    )


def _splits(weight: KernelWeight, wanted: int) -> int:
    """Returns among how many programs columns are divided, a power of two, so that each has at least four pieces."""
    most = max(1, min(wanted, _SPLITS_MAX, weight.columns // (4 * weight.piece)))
    return 1 << (most.bit_length() - 1)
