"""Products with a plain weight, fused with residual or activation: of a few rows, or of any rows in one fixed order.

A product of a few rows takes as long as reading the weight.

    z = x Wᵀ + b
    y = z                     plain
    y = residual + z          added
    y = act(gate) · up        gated, [gate | up] = z: W [2m, in] → y [n, m]

    x, residual, y [n, ·] float32 | bfloat16 | float16, n <= 16; W [out, in] of the same type, as in the checkpoint

Every program reads all columns of some rows of W once, in memory order. Sums are not split, so the result of a row of x
does not depend on the other rows. Products of more rows use the vendor's library (`operations`), or, where a row must
have the same bits in any batch, `fixed_linear`: its tiles, and with them the instructions that multiply and the order
of sums, follow from the sizes of W alone.

References: PyTorch's `linear`, followed by `kernels/activation`. The product is a matrix-vector product as in BLAS, for
up to 16 vectors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activate_gated
from antiphon.services.engine.backends.triton.kernels.runtime import (
    INTERPRETED,
    architecture,
    ceil_div,
    launch,
    power_of_two,
)
from antiphon.services.engine.backends.triton.kernels.scores import multiply

ROWS_MAX = 16
"""Rows of the smallest tensor core product."""
FIXED_ROWS = 64
"""Rows of a tile of `fixed_linear`: those of a warp-group product, which takes as long for a single row."""


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x, weight, bias, residual, out, rows, width,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    r, n, c = tl.arange(0, ROWS), tl.program_id(0) * WIDE + tl.arange(0, WIDE), tl.arange(0, PIECE)
    real = (r < rows)[:, None]
    # Rows past the end of W are replaced by its last row, because a mask would prevent wide loads.
    lines = weight + (tl.minimum(n, width - 1).to(tl.int64) * COLUMNS)[:, None]
    acc, up = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, COLUMNS, PIECE):
        columns = first + c
        if COLUMNS % PIECE == 0:
            part = tl.load(x + (r * COLUMNS)[:, None] + columns[None, :], mask=real, other=0.0)
            w = tl.load(lines + columns[None, :], eviction_policy="evict_first")
        else:
            inside = (columns < COLUMNS)[None, :]
            part = tl.load(x + (r * COLUMNS)[:, None] + columns[None, :], mask=real & inside, other=0.0)
            w = tl.load(lines + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        acc = multiply(part, tl.trans(w), acc)
        if ACTIVATION != "":
            below = lines + width.to(tl.int64) * COLUMNS + columns[None, :]
            if COLUMNS % PIECE == 0:
                w = tl.load(below, eviction_policy="evict_first")
            else:
                w = tl.load(below, mask=(columns < COLUMNS)[None, :], other=0.0, eviction_policy="evict_first")
            up = multiply(part, tl.trans(w), up)
    stored = real & (n < width)[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        if bias is not None:
            up += tl.load(bias + width + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
        acc = activate_gated(acc, up, ACTIVATION)
    place = r[:, None] * width + n[None, :]
    if residual is not None:
        acc += tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=stored)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Returns y, see the module. `activation`: its name, or empty without a gate."""
    rows, columns = x.shape
    assert rows <= ROWS_MAX, rows
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    width = weight.shape[0] // 2 if activation else weight.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    wide, piece, stages = _shape(width, columns, x.dtype.itemsize, bool(activation))
    launch(
        _skinny_kernel, (ceil_div(width, wide),),
        x, weight, bias, residual, out, rows, width,
        warps=4, stages=stages, COLUMNS=columns, PIECE=piece, ROWS=ROWS_MAX, WIDE=wide, ACTIVATION=activation,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _fixed_kernel(
    x, weight, bias, residual, out, rows, width,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    n, c = tl.program_id(0) * WIDE + tl.arange(0, WIDE), tl.arange(0, PIECE)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (r < rows)[:, None]
    source = x + (tl.where(r < rows, r, 0).to(tl.int64) * COLUMNS)[:, None]
    lines = weight + (tl.minimum(n, width - 1).to(tl.int64) * COLUMNS)[:, None]
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, COLUMNS, PIECE):
        columns = first + c
        inside = (columns < COLUMNS)[None, :]
        part = tl.load(source + columns[None, :], mask=real & inside, other=0.0)
        acc = multiply(part, tl.trans(tl.load(lines + columns[None, :], mask=inside, other=0.0)), acc)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    place, stored = r.to(tl.int64)[:, None] * width + n[None, :], real & (n < width)[None, :]
    if residual is not None:
        acc += tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=stored)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Returns y for any number of rows, see the module: each row has the same bits whatever rows are beside it."""
    rows, columns = x.shape
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    width = weight.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    # Narrow tiles for narrow weights, so that a step of few rows has a program for each multiprocessor.
    wide, piece, stages = (32 if width <= 8192 else 64, 64, 4) if x.dtype.itemsize <= 2 else (32, 32, 2)
    if INTERPRETED:
        wide, piece = 128, 128
    launch(
        _fixed_kernel, (ceil_div(width, wide), ceil_div(rows, FIXED_ROWS)),
        x, weight, bias, residual, out, rows, width,
        warps=4, stages=stages if architecture() != "gfx942" else 2, COLUMNS=columns, PIECE=piece, ROWS=FIXED_ROWS,
        WIDE=wide,
    )  # fmt: skip
    return out


def _shape(width: int, columns: int, itemsize: int, gated: bool) -> tuple[int, int, int]:
    """Returns (rows of W of a program, columns loaded at a time, stages).

    Chosen so that there are enough programs for all processors, each with enough bytes in flight.
    """
    wide = 16 if gated or width <= 8192 else 32
    if INTERPRETED:
        # The interpreter runs programs one after another, so a few large ones are faster.
        wide = 128
    piece = min(256 if itemsize <= 2 else 128, power_of_two(columns, 16))
    deep = itemsize <= 2 and architecture() != "gfx942"
    return wide, piece, 4 if deep else 2
