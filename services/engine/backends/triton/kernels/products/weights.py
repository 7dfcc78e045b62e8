"""Quantized matrices in the layout that the kernels read, and the plain matrices that they stand for."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.products.unpacking import (
    float8_numbers,
    int8_numbers,
    level_numbers,
    load_levels,
)
from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    architecture,
    ceil_div,
    launch,
    power_of_two,
)
from antiphon.services.engine.quantization.weight import INT4_MAX, INT4_MIDDLE, QuantizedWeight, WeightKind

_DEQUANTIZED = 16
"""Outputs of a program that dequantizes."""
_FLOAT8_FACTOR = 256.0
"""A float8_e4m3 number is this times the float16 number with its bits, because of the exponents' different biases."""
_PIECE = 128
_WIDE_PIECE = 32
"""Like `_PIECE`, for float32, whose products are computed in registers."""
_PIECE_MIN = 32


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
    zero = None if zeros is None else tl.load(zeros + scale_at)[:, None]
    exists = (n < width)[:, None]
    if KIND == "int4":
        c = tl.arange(0, PIECE // 2)
        packed = tl.load(lines + (first // 2 + c)[None, :]).to(tl.uint32)
        low, high = level_numbers(packed & 15, zero, table, MIDDLE), level_numbers(packed >> 4, zero, table, MIDDLE)
        low_at = first + c
        high_at = low_at + PIECE // 2
        kind = out.dtype.element_ty
        tl.store(lines_out + low_at[None, :], (low * scale).to(kind), mask=exists & (low_at < COLUMNS)[None, :])
        tl.store(lines_out + high_at[None, :], (high * scale).to(kind), mask=exists & (high_at < COLUMNS)[None, :])
    else:
        c = first + tl.arange(0, PIECE)
        w = tl.load(lines + c[None, :])
        numbers = float8_numbers(w, FLOAT8) if KIND == "fp8" else int8_numbers(w, zero)
        mask = exists & (c < COLUMNS)[None, :]
        tl.store(lines_out + c[None, :], (numbers * scale).to(out.dtype.element_ty), mask=mask)


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
    factor = float8_factor() if weight.kind == "fp8" else 1.0
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


def dequantized(weight: KernelWeight, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [out, columns] in a type."""
    out = torch.empty((weight.width, weight.columns), dtype=dtype, device=weight.values.device)
    launch(
        _dequantize_kernel, (ceil_div(weight.width, _DEQUANTIZED), ceil_div(weight.columns, weight.piece)),
        weight.values, weight.scales, weight.zeros, weight.levels, out, weight.width,
        warps=4, WIDE=_DEQUANTIZED, **weight.constants,
    )  # fmt: skip
    return out


def float8_factor() -> float:
    """Returns what the scales of fp8 weights are multiplied by, because of how the kernel reads their numbers."""
    return 1.0 if _has_float8() else _FLOAT8_FACTOR


def _has_float8() -> bool:
    """Whether the device converts 8-bit floats by itself."""
    return architecture() in ("sm_90", "sm_100") and not INTERPRETED


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
