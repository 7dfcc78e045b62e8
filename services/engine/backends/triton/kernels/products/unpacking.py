"""Functions of the kernels that read quantized weights in their stored form and dequantize them in registers."""

import triton
import triton.language as tl

from antiphon.services.engine.backends.triton.kernels.scores import multiply


@triton.jit
def float8_numbers(bits, NATIVE: tl.constexpr):
    """Returns the float8_e4m3 numbers with these bits in float32, divided by `_FLOAT8_FACTOR` unless NATIVE."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    numbers = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(magnitude == 0x7F, float("nan"), numbers)


@triton.jit
def int8_numbers(values, zero):
    """Returns 8-bit whole numbers [WIDE, columns] minus the zero points [WIDE, 1], if there are some, in float32."""
    numbers = values.to(tl.float32)
    if zero is not None:
        numbers -= zero
    return numbers


@triton.jit
def _pick(places, bit: tl.constexpr, low, high):
    return tl.where((places & bit) == 0, low, high)


@triton.jit
def level_numbers(places, zero, levels, MIDDLE: tl.constexpr):
    """Returns the levels of 4-bit indices [WIDE, columns] uint32 minus the zero points [WIDE, 1], in float32.

    `zero`: None for MIDDLE, which indices without levels have in place of zero points. `levels`: 16 numbers, chosen by
    the bits of an index, because reading a table for each index would take far longer.
    """
    if levels is None:
        # With these bits above it a small whole number is a float32, 2^23 more: faster than a conversion.
        raised = (places | 0x4B000000).to(tl.float32, bitcast=True)
        numbers = raised - (8388608.0 + (MIDDLE if zero is None else 0.0))
    else:
        a, b = _pick(places, 1, levels[0], levels[1]), _pick(places, 1, levels[2], levels[3])
        c, d = _pick(places, 1, levels[4], levels[5]), _pick(places, 1, levels[6], levels[7])
        low = _pick(places, 4, _pick(places, 2, a, b), _pick(places, 2, c, d))
        a, b = _pick(places, 1, levels[8], levels[9]), _pick(places, 1, levels[10], levels[11])
        c, d = _pick(places, 1, levels[12], levels[13]), _pick(places, 1, levels[14], levels[15])
        numbers = _pick(places, 8, low, _pick(places, 4, _pick(places, 2, a, b), _pick(places, 2, c, d)))
    if zero is not None:
        numbers -= zero
    return numbers


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
def _multiply(part, numbers, total, SWAPPED: tl.constexpr):
    """Returns `total` plus part numbersᵀ [rows, WIDE]; if SWAPPED, plus numbers partᵀ [WIDE, rows]."""
    if SWAPPED:
        # The left operand of a warp-group product is read from registers, where the numbers are.
        return multiply(numbers.to(part.dtype), tl.trans(part), total)
    else:
        return multiply(part, tl.trans(numbers.to(part.dtype)), total)


@triton.jit
def add_piece(
    total, source, lines, first, real, zero, levels, COLUMNS: tl.constexpr, PIECE: tl.constexpr, MIDDLE: tl.constexpr,
    KIND: tl.constexpr, FLOAT8: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Returns `total` plus the unscaled products of the PIECE columns from `first` on.

    SWAPPED: `total` is [WIDE, rows].
    """
    if KIND == "int4":
        c = tl.arange(0, PIECE // 2)
        packed = tl.load(lines + (first // 2 + c)[None, :]).to(tl.uint32)
        low = _row_part(source, first + c, real, COLUMNS, PIECE)
        high = _row_part(source, first + PIECE // 2 + c, real, COLUMNS, PIECE)
        total = _multiply(low, level_numbers(packed & 15, zero, levels, MIDDLE), total, SWAPPED)
        total = _multiply(high, level_numbers(packed >> 4, zero, levels, MIDDLE), total, SWAPPED)
    else:
        c = first + tl.arange(0, PIECE)
        w, part = tl.load(lines + c[None, :]), _row_part(source, c, real, COLUMNS, PIECE)
        if KIND == "int8_dynamic":
            left, right = (w, part) if SWAPPED else (part, w)
            total = tl.dot(left, tl.trans(right), total, out_dtype=tl.int32)
        else:
            numbers = float8_numbers(w, FLOAT8) if KIND == "fp8" else int8_numbers(w, zero)
            total = _multiply(part, numbers, total, SWAPPED)
    return total
