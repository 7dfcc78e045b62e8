"""Products of pairs of a token and an expert with that expert's matrix, plain or quantized; see `kernels.experts`.

    inner   [pairs, m] = act(x gateᵀ) · (x upᵀ), or act(x upᵀ) without gates, rows of x gathered by pair
    outer   [pairs, hidden] = weight · inner downᵀ

Each program multiplies a tile of pairs, all of one expert, by some of its outputs. Quantized matrices are read in their
stored form and dequantized in registers, as in `products.quantized`: the numbers without scale are exact in the type of
x, and scales are applied to float32 sums. They keep the memory of their stored form; a plain copy of the experts of
gpt-oss-120b would take 230 GB in place of 60.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activate, activate_gated
from antiphon.services.engine.backends.triton.kernels.products.unpacking import add_piece, load_levels
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight, kernel_weight
from antiphon.services.engine.backends.triton.kernels.runtime import INTERPRETED, architecture, ceil_div, launch
from antiphon.services.engine.backends.triton.kernels.scores import multiply
from antiphon.services.engine.quantization.weight import QuantizedWeight

_ROWS_OF_WIDE_GROUPS = 64
PACKED_KINDS = ("int8", "int4", "fp8")
"""Kinds of quantized weights that the kernel reads; the others round rows too."""


@triton.jit
def _finish_pairs(
    acc, up, pair, n, expert, biases, shares, out, num_pairs, width,
    ACTIVATION: tl.constexpr, OUTER: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Applies the pairs' weights, biases and activation to the products, and stores the result."""
    real = pair < num_pairs
    parts = 2 * width if GATED else width
    share = 1.0
    if WEIGHTED:
        share = tl.load(shares + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    if WEIGHTED and not OUTER:
        acc, up = acc * share, up * share
    if biases is not None:
        added = biases + expert.to(tl.int64) * parts + n
        acc += tl.load(added, mask=n < width, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(added + width, mask=n < width, other=0.0).to(tl.float32)[None, :]
    if OUTER:
        acc = acc * share
    elif GATED:
        acc = activate_gated(acc, up, ACTIVATION)
    else:
        acc = activate(acc, ACTIVATION)
    place = out + pair.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & (n < width)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x, weights, biases, shares, out, pairs, owners, num_pairs, width,
    COLUMNS: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
    ACTIVATION: tl.constexpr, OUTER: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    expert = tl.load(owners + tl.program_id(1))
    if expert >= 0:
        n, c = tl.program_id(0) * WIDE + tl.arange(0, WIDE), tl.arange(0, PIECE)
        pair = tl.load(pairs + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
        real = pair < num_pairs
        source = x + (tl.where(real, pair, 0) // PER_ROW).to(tl.int64)[:, None] * COLUMNS
        parts = 2 * width if GATED else width
        lines = weights + (expert.to(tl.int64) * parts + tl.minimum(n, width - 1))[:, None] * COLUMNS
        acc, up = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
        for first in range(0, COLUMNS, PIECE):
            inside = (first + c < COLUMNS)[None, :]
            part = tl.load(source + (first + c)[None, :], mask=inside & real[:, None], other=0.0)
            acc = multiply(part, tl.trans(tl.load(lines + (first + c)[None, :], mask=inside, other=0.0)), acc)
            if GATED:
                below = lines + width.to(tl.int64) * COLUMNS + (first + c)[None, :]
                up = multiply(part, tl.trans(tl.load(below, mask=inside, other=0.0)), up)
        _finish_pairs(
            acc, up, pair, n, expert, biases, shares, out, num_pairs, width, ACTIVATION, OUTER, WEIGHTED, GATED
        )


@triton.jit
def _add_scaled(
    acc, source, lines, first, real, scales, zeros, at, table,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, KIND: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Returns `acc` plus the products of a piece of columns, scaled if groups of columns have scales of their own.

    `at` [WIDE]: places of the scales and zero points of this piece.
    """
    zero = None if zeros is None else tl.load(zeros + at)[:, None]
    if GROUP > 0:
        total = tl.zeros(acc.shape, tl.float32)
        total = add_piece(total, source, lines, first, real, zero, table, COLUMNS, PIECE, MIDDLE, KIND, FLOAT8, False)
        return acc + total * tl.load(scales + at)[None, :]
    else:
        return add_piece(acc, source, lines, first, real, zero, table, COLUMNS, PIECE, MIDDLE, KIND, FLOAT8, False)


@triton.jit(do_not_specialize=["num_pairs"])
def _packed_kernel(
    x, values, scales, zeros, levels, biases, shares, out, pairs, owners, num_pairs, width,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, MIDDLE: tl.constexpr,
    KIND: tl.constexpr, FLOAT8: tl.constexpr, GROUPS: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, ACTIVATION: tl.constexpr, OUTER: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """GROUPS: number of groups of columns, 1 without groups."""
    expert = tl.load(owners + tl.program_id(1))
    if expert >= 0:
        n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
        pair = tl.load(pairs + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
        real = (pair < num_pairs)[:, None]
        source = x + (tl.where(pair < num_pairs, pair, 0) // PER_ROW).to(tl.int64)[:, None] * COLUMNS
        parts = 2 * width if GATED else width
        # Rows past the end of W are replaced by its last row, because a mask would prevent wide loads.
        line = tl.minimum(n, width - 1)
        lines = values + (expert.to(tl.int64) * parts + line)[:, None] * STRIDE
        below = lines + width.to(tl.int64) * STRIDE
        at = expert.to(tl.int64) * GROUPS * parts + line
        table = levels
        if levels is not None:
            table = load_levels(levels)
        acc, up = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
        for first in range(0, COLUMNS, PIECE):
            group = at
            if GROUP > 0:
                group = at + first // GROUP * parts
            acc = _add_scaled(
                acc, source, lines, first, real, scales, zeros, group, table,
                COLUMNS, PIECE, GROUP, MIDDLE, KIND, FLOAT8,
            )  # fmt: skip
            if GATED:
                up = _add_scaled(
                    up, source, below, first, real, scales, zeros, group + width, table,
                    COLUMNS, PIECE, GROUP, MIDDLE, KIND, FLOAT8,
                )  # fmt: skip
        if GROUP == 0:
            acc = acc * tl.load(scales + at)[None, :]
            if GATED:
                up = up * tl.load(scales + at + width)[None, :]
        _finish_pairs(
            acc, up, pair, n, expert, biases, shares, out, num_pairs, width, ACTIVATION, OUTER, WEIGHTED, GATED
        )


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Quantized matrices [experts, out, in] in the kernel's layout: those of `like` with a first dimension."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    like: KernelWeight
    """The first expert's, for what all have in common."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, out, in)."""
        return len(self.values), self.like.width, self.like.columns


def pack_experts(matrices: Sequence[QuantizedWeight], dtype: torch.dtype) -> PackedExperts | None:
    """Returns the matrices in the kernel's layout for rows of a type; None if the kernel cannot read them.

    That is so if rows are rounded too, if columns have an order, or if the matrices are of different kinds.
    """
    first = matrices[0]
    alike = all(
        (one.kind, one.shape, one.group_size, one.zeros is None)
        == (first.kind, first.shape, first.group_size, first.zeros is None)
        and one.order is None
        and (one.levels is first.levels or _equal(one.levels, first.levels))
        for one in matrices
    )
    if first.kind not in PACKED_KINDS or not alike:
        return None
    packed = [kernel_weight(one, dtype) for one in matrices]
    zeros = [one.zeros for one in packed if one.zeros is not None]
    return PackedExperts(
        values=torch.stack([one.values for one in packed]),
        scales=torch.stack([one.scales for one in packed]),
        zeros=torch.stack(zeros) if zeros else None,
        like=packed[0],
    )


def _equal(levels: Tensor | None, others: Tensor | None) -> bool:
    return levels is not None and others is not None and torch.equal(levels, others)


def multiply_pairs(
    x: Tensor,
    weights: Tensor | PackedExperts,
    biases: Tensor | None,
    shares: Tensor,
    out: Tensor,
    *,
    pairs: Tensor,
    owners: Tensor,
    rows: int,
    per_row: int,
    activation: str,
    outer: bool,
    weighted: bool,
    gated: bool,
) -> None:
    """Writes the products to `out` [pairs, width]. `pairs`, `owners`: see `experts`; `rows`: those of a tile.

    `per_row`: pairs of a row of x. `outer`: no activation. `weighted`: the pairs' `shares` are applied.
    """
    num_pairs, width = out.shape
    wide, piece, warps, stages = _shape(rows, x.dtype.itemsize)
    shared: dict[str, Any] = {"PER_ROW": per_row, "ROWS": rows, "WIDE": wide, "ACTIVATION": activation}
    shared |= {"OUTER": outer, "WEIGHTED": weighted, "GATED": gated, "warps": warps}
    grid = ceil_div(width, wide), len(owners)
    if isinstance(weights, Tensor):
        launch(
            _grouped_kernel, grid,
            x, weights, biases, shares, out, pairs, owners, num_pairs, width,
            COLUMNS=x.shape[1], PIECE=piece, stages=stages, **shared,
        )  # fmt: skip
        return
    groups = weights.scales.shape[1] if weights.like.group_size else 1
    if weights.like.group_size and rows > _ROWS_OF_WIDE_GROUPS and not INTERPRETED:
        # The sums of a group take registers beside those of all columns.
        shared["WIDE"] = wide // 2
        grid = ceil_div(width, wide // 2), len(owners)
    launch(
        _packed_kernel, grid,
        x, weights.values, weights.scales, weights.zeros, weights.like.levels, biases, shares, out, pairs, owners,
        num_pairs, width,
        GROUPS=groups, stages=stages if architecture() != "gfx942" else 1, **weights.like.constants, **shared,
    )  # fmt: skip


def _shape(rows: int, itemsize: int) -> tuple[int, int, int, int]:
    """Returns (columns of a tile of the result, columns of a tile of the operands, warps, stages)."""
    if INTERPRETED:
        return 64, 64, 4, 2
    if itemsize > 2:
        return 32, 32, 4, 2
    return {16: (32, 128, 4, 4), 64: (64, 64, 4, 3), 128: (64, 64, 8, 3)}[rows]
