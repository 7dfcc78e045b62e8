"""Matrix products with quantized weights, which are read in their stored form and dequantized in registers.

    y = x Wᵀ + b (+ residual),   W[n, c] = (number[n, c] - zero[n, group]) · scale[n, group]

    int8          8 bits a number, with or without groups
    int4          4 bits, an index among 16 levels; two columns a byte, see `KernelWeight`
    fp8           float8_e4m3, with or without groups (blocks)
    int8_dynamic  8 bits; each row of x is rounded to 8 bits with a scale of its own, and sums are exact integers

If the columns of W are in another order than its inputs (`QuantizedWeight.order`), x is copied in this order first.

    x, residual, y [n, ·] float32 | bfloat16 | float16

The numbers without scale are exact in the type of x, and scales are applied to float32 sums, so results are at least as
exact as those of the dequantized matrix (`models/linear.QuantizedLinear`, the reference). There is a decode form, whose
programs have 16 rows and few outputs each, so that all multiprocessors take part in reading W, and a prefill form with
larger tiles. A program sums over all columns of its outputs, in order, and tiles have fixed sizes within a form. So a
row's result does not depend on the other rows of the step (and with int8_dynamic not even on the form).

References: Marlin (arXiv 2408.11743) for memory-bound products of few rows, and for groups' scales; LLM.int8 (arXiv
2208.07339) and SmoothQuant (arXiv 2211.10438) for rows in 8 bits. The conversion of float8 through the bits of float16
is exact, and works on devices without that type.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from services.engine.quantization.weight import INT4_MAX, INT4_MIDDLE, QuantizedWeight, WeightKind
from services.engine.triton.runtime import INTERPRETED, architecture, ceil_div, launch, power_of_two
from services.engine.triton.scores import multiply

FEW_ROWS = 16
"""Maximum rows of the decode form: the minimum of a tensor core product."""
_MANY_ROWS = 256
"""Rows from which the prefill form has its largest tiles."""
_FLOAT8_FACTOR = 256.0
"""A float8_e4m3 number is this times the float16 number with its bits, because of the exponents' different biases."""
_PIECE = 128
_WIDE_PIECE = 32
"""Like `_PIECE`, for float32, whose products are computed in registers."""
_PIECE_MIN = 32
_HALF_INT8 = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds a small float32 to the nearest integer, ties to even."""


@triton.jit
def _float8_numbers(bits):
    """Returns the float8_e4m3 numbers with these bits, divided by `_FLOAT8_FACTOR`, in float32."""
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    numbers = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(magnitude == 0x7F, float("nan"), numbers)


@triton.jit
def _level_numbers(places, zero, levels):
    """Returns the levels of 4-bit indices [WIDE, columns] minus the zero points [WIDE, 1], in float32."""
    numbers = places.to(tl.float32) if levels is None else tl.load(levels + places.to(tl.int32))
    return numbers - zero


@triton.jit
def _row_part(source, c, real, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Returns the columns c of rows of x, zeros after the last column; `real` [ROWS, 1]: which rows exist."""
    mask = real if COLUMNS % PIECE == 0 else real & (c < COLUMNS)[None, :]
    return tl.load(source + c[None, :], mask=mask, other=0)


@triton.jit
def _add_piece(
    total, source, lines, first, real, zero, levels, COLUMNS: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr
):
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
            numbers = _float8_numbers(w) if KIND == "fp8" else w.to(tl.float32) - zero
            total = multiply(part, tl.trans(numbers.to(part.dtype)), total)
    return total


@triton.jit(do_not_specialize=["rows"])
def _quantized_kernel(
    x, row_scales, values, scales, zeros, levels, bias, residual, out, rows, width,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, MIDDLE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = (r < rows)[:, None]
    source = x + tl.where(r < rows, r, 0).to(tl.int64)[:, None] * COLUMNS
    # Rows past the end of W are replaced by its last row, because a mask would prevent wide loads.
    at = tl.minimum(n, width - 1)
    lines = values + at.to(tl.int64)[:, None] * STRIDE
    acc = tl.zeros((ROWS, WIDE), tl.int32 if KIND == "int8_dynamic" else tl.float32)
    zero = tl.full((WIDE, 1), MIDDLE, tl.float32)
    if zeros is not None and GROUP == 0:
        zero = tl.load(zeros + at)[:, None]
    for first in range(0, COLUMNS, PIECE):
        if GROUP > 0:
            group = first // GROUP * width + at
            if zeros is not None:
                zero = tl.load(zeros + group)[:, None]
            total = tl.zeros((ROWS, WIDE), tl.float32)
            total = _add_piece(total, source, lines, first, real, zero, levels, COLUMNS, PIECE, KIND)
            acc += total * tl.load(scales + group)[None, :]
        else:
            acc = _add_piece(acc, source, lines, first, real, zero, levels, COLUMNS, PIECE, KIND)
    y = acc.to(tl.float32)
    if GROUP == 0:
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


@triton.jit
def _round_rows_kernel(x, rounded, row_scales, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Rounds a row of x to 8 bits; the largest number becomes 127."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((PIECE,), tl.float32)
    for first in range(0, COLUMNS, PIECE):
        c = first + tl.arange(0, PIECE)
        part = tl.load(x + row * COLUMNS + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(part))
    scale = tl.div_rn(tl.max(largest, 0), 127.0)
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(row_scales + row, scale)
    for first in range(0, COLUMNS, PIECE):
        c = first + tl.arange(0, PIECE)
        part = tl.load(x + row * COLUMNS + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
        nearest = (tl.div_rn(part, scale) + _HALF_INT8) - _HALF_INT8
        tl.store(rounded + row * COLUMNS + c, nearest.to(tl.int8), mask=c < COLUMNS)


@triton.jit
def _order_rows_kernel(x, order, ordered, inputs, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Copies a row of x in the order of the columns of a matrix, with zeros for padding."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    source = tl.load(order + c, mask=c < COLUMNS, other=-1)
    part = tl.load(x + row * inputs + source, mask=source >= 0, other=0.0)
    tl.store(ordered + row * COLUMNS + c, part, mask=c < COLUMNS)


@dataclass(frozen=True, slots=True)
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
    factor = _FLOAT8_FACTOR if weight.kind == "fp8" else 1.0
    return KernelWeight(
        kind=weight.kind,
        values=values.contiguous().clone(),
        scales=scales * factor,
        zeros=zeros,
        levels=weight.levels,
        columns=columns,
        group_size=group,
        piece=piece,
        order=weight.order,
    )


def quantized_linear(
    x: Tensor, weight: KernelWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns y, see the module. All tensors are contiguous."""
    rows, columns = x.shape[0], weight.columns
    assert columns == x.shape[1] or weight.order is not None, (columns, x.shape)
    assert x.is_contiguous(), x.stride()
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    out = torch.empty((rows, weight.width), dtype=x.dtype, device=x.device)
    x = x if weight.order is None else order_rows(x, weight.order)
    x, row_scales = round_rows(x) if weight.kind == "int8_dynamic" else (x, None)
    tile_rows, wide, warps, stages = _shape(rows, weight, out.dtype.itemsize)
    launch(
        _quantized_kernel, (ceil_div(rows, tile_rows), ceil_div(weight.width, wide)),
        x, row_scales, weight.values, weight.scales, weight.zeros, weight.levels, bias, residual, out, rows,
        weight.width,
        warps=warps, stages=stages, COLUMNS=columns, STRIDE=weight.values.shape[1], GROUP=weight.group_size,
        PIECE=weight.piece, MIDDLE=weight.middle, ROWS=tile_rows, WIDE=wide, KIND=weight.kind,
    )  # fmt: skip
    return out


def order_rows(x: Tensor, order: Tensor) -> Tensor:
    """Returns x [n, in] as [n, columns]: the inputs that `order` [columns] names, zeros for -1."""
    rows, inputs = x.shape
    columns = len(order)
    ordered = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    piece = min(1024, power_of_two(columns, 16))
    grid = rows, ceil_div(columns, piece)
    launch(_order_rows_kernel, grid, x, order, ordered, inputs, warps=4, COLUMNS=columns, PIECE=piece)
    return ordered


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of x [n, in] in 8 bits, [n, in] int8, and the scale of each, [n] float32."""
    rows, columns = x.shape
    rounded = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    piece = min(2048, power_of_two(columns, 16))
    launch(_round_rows_kernel, (rows,), x, rounded, scales, warps=4, COLUMNS=columns, PIECE=piece)
    return rounded, scales


def _shape(rows: int, weight: KernelWeight, itemsize: int) -> tuple[int, int, int, int]:
    """Returns (rows of a program, outputs of a program, warps, stages).

    Triton 3.6 cannot compile a pipeline of the decode form's loads for gfx942.
    """
    few, deep = rows <= FEW_ROWS, architecture() != "gfx942"
    if INTERPRETED:
        # The interpreter runs programs one after another, so a few large ones are faster.
        return FEW_ROWS if few else 64, 128, 4, 2
    if few:
        return FEW_ROWS, 16 if weight.width <= 8192 else 32, 4, 4 if deep else 1
    if itemsize > 2 and weight.kind != "int8_dynamic":
        return 32, 32, 4, 2
    if rows < _MANY_ROWS:
        return 64, 64, 4, 3 if deep else 2
    # Separate sums for the current group take additional registers; warp-group products need fewer registers.
    narrow = weight.group_size > 0 and architecture() == "sm_80"
    return 128, 64 if narrow else 128, 8, 3 if deep else 2


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
