"""Products of LoRA adapters for the rows of a step, which may have any mixture of adapters.

    1  shrink   h [split, row, part · rank] = x[row, columns of the split] A[slot]ᵀ, float32
    2  expand   y[row] += (Σ of the splits, in order) B[slot]ᵀ

    A [slots, parts · RANK, in], B [slots, out, RANK] of the model's type; RANK: the largest rank, padded

A matrix that is stacked from several matrices of the checkpoint (query, key, value; gate, up) has a part for each, with
a separate A; a row of B uses the ranks of its part. Slots have a fixed size: missing ranks, and matrices that an
adapter does not change, are filled with zeros. The host sorts the step's rows by slot and pads each slot's rows to
whole tiles (`plan_tiles`); the sizes of all launches follow from the number of tiles, so a graph can capture them.
Programs of unused tiles exit immediately. Tiles and splits have fixed sizes and there are no atomic additions, so a
row's result does not depend on the other rows.

References: the grouped products of Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285), which gather rows by
adapter; here with tiles as in `experts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.adapters.delta import padded_rank
from antiphon.services.engine.backends.triton.kernels.runtime import INTERPRETED, ceil_div, launch, power_of_two
from antiphon.services.engine.backends.triton.kernels.scores import multiply

TILE_ROWS = 16
"""Rows of a tile, all with the same slot: the minimum of a tensor core product. Fixed, see the module."""
UNUSED = 2**30
"""Marks the padding rows of a tile."""
_SPLIT_COLUMNS = 1024
"""Inputs of a split. Fixed, because a row's sums must not depend on the number of other rows."""
_RANKS_MAX = 64
"""Ranks that one program of `shrink` computes."""

Integers = NDArray[np.int64]


@triton.jit
def _shrink_kernel(
    x, a, h, rows_of, owners, rows, rows_padded,
    COLUMNS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, PIECE: tl.constexpr,
    RANKS: tl.constexpr, ALL_RANKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    slot = tl.load(owners + tile)
    if slot >= 0:
        split, first_rank = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS * RANKS
        r, k, c = tl.arange(0, ROWS), first_rank + tl.arange(0, RANKS), tl.arange(0, PIECE)
        row = tl.load(rows_of + tile * ROWS + r)
        real = (row < rows)[:, None]
        source = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * COLUMNS
        lines = a + (slot.to(tl.int64) * ALL_RANKS + k)[:, None] * COLUMNS
        acc = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(split * SPLIT, split * SPLIT + SPLIT, PIECE):
            inside = (first + c < COLUMNS)[None, :]
            part = tl.load(source + (first + c)[None, :], mask=real & inside, other=0.0)
            acc = multiply(part, tl.trans(tl.load(lines + (first + c)[None, :], mask=inside, other=0.0)), acc)
        place = (split * rows_padded + tile * ROWS + r).to(tl.int64)[:, None] * ALL_RANKS + k[None, :]
        tl.store(h + place, acc)


@triton.jit
def _expand_kernel(
    h, b, y, rows_of, owners, rows, rows_padded, first_width, width, first_blocks, blocks,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ALL_RANKS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A program adds to WIDE columns of one part: the first part has `first_width` columns, each other one `width`."""
    tile, block = tl.program_id(1), tl.program_id(0)
    slot = tl.load(owners + tile)
    if slot >= 0:
        is_first, later = block < first_blocks, tl.maximum(block - first_blocks, 0)
        part = tl.where(is_first, 0, 1 + later // blocks)
        end = first_width + part * width
        start = tl.where(is_first, block * WIDE, end - width + later % blocks * WIDE)
        r, n, k = tl.arange(0, ROWS), start + tl.arange(0, WIDE), tl.arange(0, RANKS)
        row = tl.load(rows_of + tile * ROWS + r)
        all_width = first_width + (ALL_RANKS // RANK - 1) * width
        lines = b + (slot.to(tl.int64) * all_width + tl.minimum(n, end - 1))[:, None] * RANK
        acc = tl.zeros((ROWS, WIDE), tl.float32)
        for first in range(0, RANK, RANKS):
            inner = tl.zeros((ROWS, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                line = (split * rows_padded + tile * ROWS + r).to(tl.int64)
                inner += tl.load(h + line[:, None] * ALL_RANKS + (part * RANK + first + k)[None, :])
            weights = tl.load(lines + (first + k)[None, :])
            acc = multiply(inner.to(weights.dtype), tl.trans(weights), acc)
        stored = (row < rows)[:, None] & (n < end)[None, :]
        place = y + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * all_width + n[None, :]
        acc += tl.load(place, mask=stored, other=0.0).to(tl.float32)
        tl.store(place, acc.to(y.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The tiles of a step, int32 on the device.

    `rows` [tiles · TILE_ROWS]: rows of the step sorted by slot, `UNUSED` in padding. `owners` [tiles]: the slot of each
    tile, -1 for unused tiles.
    """

    rows: Tensor
    owners: Tensor


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Returns the maximum number of tiles of a step with `num_rows` rows and `num_slots` adapter slots."""
    return min(num_rows, num_rows // TILE_ROWS + num_slots)


def plan_tiles(row_slots: Integers, capacity: int = 0) -> tuple[Integers, Integers]:
    """Returns the arrays of `LoraTiles`, with at least `capacity` tiles. `row_slots` [n]: slot of each row, or -1."""
    sorted_rows = np.argsort(row_slots, kind="stable")[np.count_nonzero(row_slots < 0) :]
    slots, counts = np.unique(row_slots[sorted_rows], return_counts=True)
    tiles = -(-counts // TILE_ROWS)
    size = max(int(tiles.sum()), capacity)
    owners, rows = np.full(size, -1, dtype=np.int64), np.full(size * TILE_ROWS, UNUSED, dtype=np.int64)
    owners[: tiles.sum()] = np.repeat(slots, tiles)
    # The rows of a slot begin at the start of its first tile.
    shift = (tiles.cumsum() - tiles) * TILE_ROWS - (counts.cumsum() - counts)
    rows[np.arange(len(sorted_rows)) + np.repeat(shift, counts)] = sorted_rows
    return rows, owners


class LoraMatrix:
    """The adapters of one matrix in all slots. `widths`: outputs of each part; all but the first are equally wide."""

    def __init__(self, num_slots: int, widths: tuple[int, ...], columns: int, rank: int, like: Tensor) -> None:
        """`rank`: the largest rank of an adapter; `like`: a tensor of the model's type on its device."""
        assert len(set(widths[1:])) <= 1, widths
        self._widths, self._rank = widths, padded_rank(rank)
        self.a = like.new_zeros((num_slots, len(widths) * self._rank, columns))
        self.b = like.new_zeros((num_slots, sum(widths), self._rank))

    def add(self, y: Tensor, x: Tensor, tiles: LoraTiles) -> Tensor:
        """Adds the products of the tiles' adapters to y [n, out], for x [n, in]. Returns y, which it changes."""
        assert x.is_contiguous(), x.stride()
        assert y.is_contiguous(), y.stride()
        return add_products(y, x, self.a, self.b, self._widths, tiles)


def add_products(y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: tuple[int, ...], tiles: LoraTiles) -> Tensor:
    """Implements `LoraMatrix.add` with its tensors, see the module."""
    rows, columns = x.shape
    num_tiles, (all_ranks, rank) = len(tiles.owners), (a.shape[1], b.shape[2])
    ranks, splits = min(rank, _RANKS_MAX), ceil_div(columns, _SPLIT_COLUMNS)
    padded = num_tiles * TILE_ROWS
    h = torch.empty((splits, padded, all_ranks), dtype=torch.float32, device=x.device)
    piece = min(power_of_two(columns, 16), 128 if x.dtype.itemsize <= 2 else 64)
    if INTERPRETED:
        piece = min(power_of_two(columns, 16), _SPLIT_COLUMNS)
    launch(
        _shrink_kernel, (splits * (all_ranks // ranks), num_tiles),
        x, a, h, tiles.rows, tiles.owners, rows, padded,
        warps=4, stages=3, COLUMNS=columns, SPLIT=_SPLIT_COLUMNS, SPLITS=splits, PIECE=piece, RANKS=ranks,
        ALL_RANKS=all_ranks, ROWS=TILE_ROWS,
    )  # fmt: skip
    wide = 256 if INTERPRETED else 64
    first_width, *rest = widths
    others = rest[0] if rest else 0
    first_blocks, blocks = ceil_div(first_width, wide), max(1, ceil_div(others, wide))
    launch(
        _expand_kernel, (first_blocks + len(rest) * blocks, num_tiles),
        h, b, y, tiles.rows, tiles.owners, rows, padded, first_width, others, first_blocks, blocks,
        warps=4, stages=2, SPLITS=splits, RANKS=ranks, RANK=rank, ALL_RANKS=all_ranks, ROWS=TILE_ROWS, WIDE=wide,
    )  # fmt: skip
    return y


class LoraStep:
    """The tiles of the current step, shared by all layers of a model. None: no row has an adapter."""

    def __init__(self) -> None:
        self.tiles: LoraTiles | None = None


def put_tiles(row_slots: Integers, put: Callable[[NDArray[Any]], Tensor], capacity: int = 0) -> LoraTiles:
    """Returns the tiles of a step on the device; `put` copies an array there as int32."""
    rows, owners = plan_tiles(row_slots, capacity)
    return LoraTiles(put(rows), put(owners))
