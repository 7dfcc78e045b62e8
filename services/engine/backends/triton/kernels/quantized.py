"""Matrix products with quantized weights, which are read in their stored form and dequantized in registers.

    y = x Wᵀ + b (+ residual),   W[n, c] = (number[n, c] - zero[n, group]) · scale[n, group]

    int8          8 bits a number, with or without groups
    int4          4 bits, an index among 16 levels; two columns a byte, see `KernelWeight`
    fp8           float8_e4m3, with or without groups (blocks)
    int8_dynamic  8 bits; each row of x is rounded to 8 bits with a scale of its own, and sums are exact integers

If the columns of W are stored in another order than that of x (`QuantizedWeight.order`), x is first copied in the order
of the columns.

    x, residual, y [n, ·] float32 | bfloat16 | float16

Two forms, of which `quantized_linear` chooses one by a rule and `autotune` by measuring:

    few rows    a kernel that reads W in its stored form. The numbers without scale are exact in the type of x, and
                scales are applied to float32 sums, so results are at least as exact as those of the dequantized matrix
                (`models/layers/linear.QuantizedLinear`, the reference). The columns are divided among several programs
                if there are few outputs, so that all multiprocessors take part in reading W. Sums are in a fixed order:
                a row's result does not depend on the other rows of the step.
    many rows   W is dequantized in the type of x, and the vendor's library multiplies. That reads and writes the matrix
                once more, but the few-rows form takes longer with each tile of rows, because it dequantizes in
                registers for every tile. int8_dynamic has larger tiles for many rows, with the same results.

References: Marlin (arXiv 2408.11743) for memory-bound products of few rows, and for groups' scales; LLM.int8 (arXiv
2208.07339) and SmoothQuant (arXiv 2211.10438) for rows in 8 bits. The conversion of float8 through the bits of float16
is exact, and works on devices without that type.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    architecture,
    ceil_div,
    launch,
    num_processors,
    power_of_two,
)
from antiphon.services.engine.backends.triton.kernels.scores import multiply
from antiphon.services.engine.quantization.weight import INT4_MAX, INT4_MIDDLE, QuantizedWeight, WeightKind

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
_JOINED, _DEQUANTIZED = 64, 16
"""Outputs of a program that adds partial sums, and of one that dequantizes."""
_FLOAT8_FACTOR = 256.0
"""A float8_e4m3 number is this times the float16 number with its bits, because of the exponents' different biases."""
_EVEN_SHARE = 128
"""A power of two, by which whole numbers are divided exactly."""
_PIECE = 128
_WIDE_PIECE = 32
"""Like `_PIECE`, for float32, whose products are computed in registers."""
_PIECE_MIN = 32
_HALF_INT8 = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds a small float32 to the nearest integer, ties to even."""


@triton.jit
def _float8_numbers(bits, NATIVE: tl.constexpr):
    """Returns the float8_e4m3 numbers with these bits in float32, divided by `_FLOAT8_FACTOR` unless NATIVE."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    numbers = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(magnitude == 0x7F, float("nan"), numbers)


@triton.jit
def _pick(places, bit: tl.constexpr, low, high):
    return tl.where((places & bit) == 0, low, high)


@triton.jit
def _level_numbers(places, zero, levels):
    """Returns the levels of 4-bit indices [WIDE, columns] minus the zero points [WIDE, 1], in float32.

    `levels` are 16 numbers, chosen by the bits of an index: reading a table for each index would take far longer.
    """
    if levels is None:
        numbers = places.to(tl.float32)
    else:
        a, b = _pick(places, 1, levels[0], levels[1]), _pick(places, 1, levels[2], levels[3])
        c, d = _pick(places, 1, levels[4], levels[5]), _pick(places, 1, levels[6], levels[7])
        low = _pick(places, 4, _pick(places, 2, a, b), _pick(places, 2, c, d))
        a, b = _pick(places, 1, levels[8], levels[9]), _pick(places, 1, levels[10], levels[11])
        c, d = _pick(places, 1, levels[12], levels[13]), _pick(places, 1, levels[14], levels[15])
        numbers = _pick(places, 8, low, _pick(places, 4, _pick(places, 2, a, b), _pick(places, 2, c, d)))
    return numbers - zero


@triton.jit
def load_levels(levels):
    """Returns the 16 levels, as numbers that stay in registers."""
    return (
        tl.load(levels), tl.load(levels + 1), tl.load(levels + 2), tl.load(levels + 3),
        tl.load(levels + 4), tl.load(levels + 5), tl.load(levels + 6), tl.load(levels + 7),
        tl.load(levels + 8), tl.load(levels + 9), tl.load(levels + 10), tl.load(levels + 11),
        tl.load(levels + 12), tl.load(levels + 13), tl.load(levels + 14), tl.load(levels + 15),
    )  # fmt: skip


@triton.jit
def _row_part(source, c, real, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Returns the columns c of rows of x, zeros after the last column; `real` [ROWS, 1]: which rows exist."""
    mask = real if COLUMNS % PIECE == 0 else real & (c < COLUMNS)[None, :]
    return tl.load(source + c[None, :], mask=mask, other=0)


@triton.jit
def add_piece(
    total, source, lines, first, real, zero, levels, COLUMNS: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Returns `total` plus the unscaled products of the PIECE columns from `first` on."""
    if KIND == "int4":
        c = tl.arange(0, PIECE // 2)
        packed = tl.load(lines + (first // 2 + c)[None, :])
        low = _row_part(source, first + c, real, COLUMNS, PIECE)
        high = _row_part(source, first + PIECE // 2 + c, real, COLUMNS, PIECE)
        total = multiply(low, tl.trans(_level_numbers(packed & 15, zero, levels).to(low.dtype)), total)
        total = multiply(high, tl.trans(_level_numbers(packed >> 4, zero, levels).to(low.dtype)), total)
    else:
        c = first + tl.arange(0, PIECE)
        w, part = tl.load(lines + c[None, :]), _row_part(source, c, real, COLUMNS, PIECE)
        if KIND == "int8_dynamic":
            total = tl.dot(part, tl.trans(w), total, out_dtype=tl.int32)
        else:
            numbers = _float8_numbers(w, FLOAT8) if KIND == "fp8" else w.to(tl.float32) - zero
            total = multiply(part, tl.trans(numbers.to(part.dtype)), total)
    return total


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
):  # fmt: skip
    """Multiplies SPAN columns. If that is not all, the sums go to `partial` [splits, rows, width]."""
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = (r < rows)[:, None]
    source = x + tl.where(r < rows, r, 0).to(tl.int64)[:, None] * COLUMNS
    # Rows past the end of W are replaced by its last row, because a mask would prevent wide loads.
    at = tl.minimum(n, width - 1)
    lines = values + at.to(tl.int64)[:, None] * STRIDE
    table = levels
    if levels is not None:
        table = load_levels(levels)
    acc = tl.zeros((ROWS, WIDE), tl.int32 if KIND == "int8_dynamic" else tl.float32)
    zero = tl.full((WIDE, 1), MIDDLE, tl.float32)
    if zeros is not None and GROUP == 0:
        zero = tl.load(zeros + at)[:, None]
    start = tl.program_id(2) * SPAN
    end = tl.minimum(start + SPAN, COLUMNS)
    if GROUP > 0:
        # Scales are read one piece ahead, so that no product waits for them.
        scale = tl.load(scales + tl.minimum(start, COLUMNS - 1) // GROUP * width + at)
        for first in range(start, end, PIECE):
            group = first // GROUP * width + at
            following = tl.load(scales + tl.minimum(first + PIECE, COLUMNS - 1) // GROUP * width + at)
            if zeros is not None:
                zero = tl.load(zeros + group)[:, None]
            total = tl.zeros((ROWS, WIDE), tl.float32)
            total = add_piece(total, source, lines, first, real, zero, table, COLUMNS, PIECE, KIND, FLOAT8)
            acc += total * scale[None, :]
            scale = following
    else:
        for first in range(start, end, PIECE):
            acc = add_piece(acc, source, lines, first, real, zero, table, COLUMNS, PIECE, KIND, FLOAT8)
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


@triton.jit
def _dequantize_kernel(
    values, scales, zeros, levels, out, width,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, MIDDLE: tl.constexpr,
    WIDE: tl.constexpr, KIND: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Writes some outputs' weights of one piece of columns."""
    n, first = tl.program_id(0) * WIDE + tl.arange(0, WIDE), tl.program_id(1) * PIECE
    at = tl.minimum(n, width - 1)
    lines = values + at.to(tl.int64)[:, None] * STRIDE
    lines_out = out + at.to(tl.int64)[:, None] * COLUMNS
    table = levels
    if levels is not None:
        table = load_levels(levels)
    scale_at = at if GROUP == 0 else first // GROUP * width + at
    scale = tl.load(scales + scale_at)[:, None]
    zero = tl.full((WIDE, 1), MIDDLE, tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + scale_at)[:, None]
    exists = (n < width)[:, None]
    if KIND == "int4":
        c = tl.arange(0, PIECE // 2)
        packed = tl.load(lines + (first // 2 + c)[None, :])
        low, high = _level_numbers(packed & 15, zero, table), _level_numbers(packed >> 4, zero, table)
        low_at = first + c
        high_at = low_at + PIECE // 2
        kind = out.dtype.element_ty
        tl.store(lines_out + low_at[None, :], (low * scale).to(kind), mask=exists & (low_at < COLUMNS)[None, :])
        tl.store(lines_out + high_at[None, :], (high * scale).to(kind), mask=exists & (high_at < COLUMNS)[None, :])
    else:
        c = first + tl.arange(0, PIECE)
        w = tl.load(lines + c[None, :])
        numbers = _float8_numbers(w, FLOAT8) if KIND == "fp8" else w.to(tl.float32) - zero
        mask = exists & (c < COLUMNS)[None, :]
        tl.store(lines_out + c[None, :], (numbers * scale).to(out.dtype.element_ty), mask=mask)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWeight:
    """A quantized matrix [out, in] in the kernel's layout."""

    kind: WeightKind
    values: Tensor
    """[out, bytes], the columns padded to whole pieces.

    int4: of the `piece` columns of a piece, byte j has column j in its lower and column j + piece / 2 in its upper
    half, so that both halves meet columns of x that are side by side.
    """
    scales: Tensor
    """float32 [groups, out], or [out] without groups."""
    zeros: Tensor | None
    """Like `scales`."""
    levels: Tensor | None
    """int4: the 16 numbers that indices stand for; None: the index itself, or, without zero points, the index - 8."""
    columns: int
    group_size: int
    """Number of columns that share a scale, a multiple of `piece`; 0: all columns."""
    piece: int
    rows_in_fp8: bool = False
    """See `QuantizedWeight`."""
    order: Tensor | None = None
    """int32 [columns]: the input of each column, -1 for padding; None: columns are the inputs."""

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.values.shape[0]

    @property
    def middle(self) -> float:
        """The value that is subtracted from every number if there are no zero points."""
        return float(INT4_MIDDLE) if self.kind == "int4" and self.levels is None else 0.0

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of the kernels that read the matrix."""
        return {
            "COLUMNS": self.columns,
            "STRIDE": self.values.shape[1],
            "GROUP": self.group_size,
            "PIECE": self.piece,
            "MIDDLE": self.middle,
            "KIND": self.kind,
            "FLOAT8": _has_float8(),
        }


def kernel_weight(weight: QuantizedWeight, dtype: torch.dtype) -> KernelWeight:
    """Returns the matrix in the kernel's layout for rows of a type, on the device of its tensors."""
    out, columns = weight.shape[0], weight.num_columns
    group = weight.group_size if 0 < weight.group_size < columns else 0
    most = _WIDE_PIECE if dtype.itemsize > 2 and not INTERPRETED else _PIECE
    piece = min(most, group & -group) if group else min(most, power_of_two(columns, _PIECE_MIN))
    padding = -columns % piece
    if weight.kind == "int4":
        places = F.pad(_places(weight), (0, padding)).view(out, -1, 2, piece // 2)
        values = (places[:, :, 0] | (places[:, :, 1] << 4)).flatten(1)
    else:
        values = F.pad(_bytes(weight.values), (0, padding))
    scales, zeros = (None if part is None else _by_group(part, group) for part in (weight.scales, weight.zeros))
    assert scales is not None
    factor = _float8_factor() if weight.kind == "fp8" else 1.0
    return KernelWeight(
        kind=weight.kind,
        values=values.contiguous().clone(),
        scales=scales * factor,
        zeros=zeros,
        levels=weight.levels,
        columns=columns,
        group_size=group,
        piece=piece,
        rows_in_fp8=weight.rows_in_fp8,
        order=weight.order,
    )


def quantized_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns y, see the module, by the form for its number of rows. All tensors are contiguous."""
    return (tiles_linear if in_tiles(x.shape[0], weight) else library_linear)(x, weight, bias, residual)


def tiles_linear(x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Returns y by the kernel that reads W in its stored form, for any number of rows."""
    rows, columns = x.shape[0], weight.columns
    x = _columns_of(x, weight, residual)
    out = torch.empty((rows, weight.width), dtype=x.dtype, device=x.device)
    x, row_scales = round_rows(x) if weight.kind == "int8_dynamic" else (x, None)
    shape = _shape(rows, weight, num_processors(x.device))
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
        warps=shape.warps, stages=shape.stages, ROWS=shape.rows, WIDE=shape.wide, SPAN=span, **weight.constants,
    )  # fmt: skip
    if partial is not None:
        launch(
            _join_kernel, (grid[0], ceil_div(weight.width, _JOINED)),
            partial, row_scales, weight.scales, bias, residual, out, rows, weight.width,
            warps=4, ROWS=shape.rows, WIDE=_JOINED, SPLITS=shape.splits, GROUPED=weight.group_size > 0,
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
        rounded, numbers.t(), row_scales[:, None], F.ScalingType.RowWise, weight.scales[None] / _float8_factor(),
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


def dequantized(weight: KernelWeight, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [out, columns] in a type."""
    out = torch.empty((weight.width, weight.columns), dtype=dtype, device=weight.values.device)
    launch(
        _dequantize_kernel, (ceil_div(weight.width, _DEQUANTIZED), ceil_div(weight.columns, weight.piece)),
        weight.values, weight.scales, weight.zeros, weight.levels, out, weight.width,
        warps=4, WIDE=_DEQUANTIZED, **weight.constants,
    )  # fmt: skip
    return out


def _float8_factor() -> float:
    """Returns what the scales of fp8 weights are multiplied by, because of how the kernel reads their numbers."""
    return 1.0 if _has_float8() else _FLOAT8_FACTOR


def _has_float8() -> bool:
    """Whether the device converts 8-bit floats by itself."""
    return architecture() in ("sm_90", "sm_100") and not INTERPRETED


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Rows and outputs of a program, warps, stages of the pipeline, and programs among which columns are divided."""

    rows: int
    wide: int
    warps: int
    stages: int
    splits: int = 1


def _shape(rows: int, weight: KernelWeight, processors: int) -> _Shape:
    """Returns the shape of a product.

    Triton 3.6 cannot compile a pipeline of the loads for few rows for gfx942.
    """
    deep = architecture() != "gfx942"
    if weight.kind == "int8_dynamic" and rows > few_rows(weight):
        if INTERPRETED or rows < _MANY_ROWS:
            return _Shape(rows=64, wide=128 if INTERPRETED else 64, warps=4, stages=3 if deep else 2)
        return _Shape(rows=128, wide=128, warps=8, stages=3 if deep else 2)
    # The interpreter runs programs one after another, so a few large ones are faster.
    wide = 128 if INTERPRETED else 32
    programs = ceil_div(weight.width, wide)
    each = _PROGRAMS_A_PROCESSOR_INT4 if weight.kind == "int4" else _PROGRAMS_A_PROCESSOR
    wanted = power_of_two(max(1, processors * each // programs))
    most = max(1, weight.columns // (4 * weight.piece))
    return _Shape(
        rows=FEW_ROWS,
        wide=wide,
        warps=4,
        stages=4 if deep else 1,
        splits=min(wanted, _SPLITS_MAX, 1 << (most.bit_length() - 1)),
    )


def _places(weight: QuantizedWeight) -> Tensor:
    """Returns the index among the 16 levels of each value of an int4 weight: [out, columns] uint8."""
    values = _bytes(weight.values)
    if weight.two_a_byte:
        values = torch.stack((values & INT4_MAX, values >> 4), dim=-1).flatten(1)[:, : weight.num_columns]
    return (values & INT4_MAX) ^ (INT4_MIDDLE if weight.has_sign else 0)


def _bytes(values: Tensor) -> Tensor:
    """Returns one-byte numbers unchanged, and the bits of 8-bit floats and of 4-bit indices as uint8."""
    return values.view(torch.uint8) if values.dtype.is_floating_point else values


def _by_group(parts: Tensor, group_size: int) -> Tensor:
    """Returns scales or zero points [out] or [out, groups] as [groups, out], or as [out] without groups."""
    if group_size:
        return parts.t().contiguous()
    return (parts if parts.dim() == 1 else parts[:, 0]).contiguous()
