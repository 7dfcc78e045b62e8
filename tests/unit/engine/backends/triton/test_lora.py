"""Products of adapters: tiles of rows that mix slots, parts of stacked matrices, ranks and sizes of every kind."""

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.lora import (
    TILE_ROWS,
    UNUSED,
    LoraMatrix,
    LoraTiles,
    most_tiles,
    plan_tiles,
    put_tiles,
)
from tests.unit.engine.backends.triton.close import assert_close, assert_same_bits


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tiles_of(slots: list[int], capacity: int = 0) -> LoraTiles:
    return put_tiles(np.array(slots, dtype=np.int64), lambda x: torch.from_numpy(x.astype(np.int32)), capacity)


def filled(widths: tuple[int, ...], columns: int, rank: int, dtype: torch.dtype = torch.float32) -> LoraMatrix:
    """Three slots, of which the last one is empty."""
    matrix = LoraMatrix(3, widths, columns, rank, torch.zeros(1, dtype=dtype))
    for slot in range(2):
        a, b = matrix.a[slot], matrix.b[slot]
        a.copy_(draw(*a.shape, seed=slot) / columns**0.5)
        b.copy_(draw(*b.shape, seed=7 + slot) / 2)
    return matrix


def reference(y: Tensor, x: Tensor, matrix: LoraMatrix, widths: tuple[int, ...], slots: list[int]) -> Tensor:
    wide, rank = y.float().clone(), matrix.b.shape[2]
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        inner = (matrix.a[slot].float() @ x[row].float()).to(x.dtype).float()
        for part, outputs in enumerate(torch.arange(sum(widths)).split(list(widths))):
            wide[row, outputs] += matrix.b[slot, outputs].float() @ inner[part * rank : (part + 1) * rank]
    return wide.to(y.dtype)


@pytest.mark.parametrize(
    ("widths", "columns", "rank", "dtype"),
    [
        ((96, 32, 32), 64, 16, torch.float32),
        ((300, 70, 70), 1100, 5, torch.float32),
        ((33,), 2500, 100, torch.float32),
        ((40, 40), 129, 16, torch.float16),
        ((64,), 96, 32, torch.bfloat16),
    ],
)
def test_rows_of_any_mixture_of_slots_get_their_adapters_products(
    widths: tuple[int, ...], columns: int, rank: int, dtype: torch.dtype
) -> None:
    slots = [1, -1, 0, 2, 0, 1, -1, *[1] * 20, 0]
    x, y = draw(len(slots), columns, dtype=dtype), draw(len(slots), sum(widths), seed=3, dtype=dtype)
    matrix = filled(widths, columns, rank, dtype)
    expected = reference(y, x, matrix, widths, slots)
    assert not torch.equal(expected, y)
    added = matrix.add(y.clone(), x, tiles_of(slots))
    assert_close(added, expected, factor=4)
    # Rows without an adapter, and those of an adapter that does not change this matrix, are untouched.
    untouched = [row for row, slot in enumerate(slots) if slot in (-1, 2)]
    assert torch.equal(added[untouched], y[untouched])


def test_a_row_gets_the_same_bits_whatever_is_beside_it_and_however_many_tiles_are_unused() -> None:
    widths = (48, 16, 16)
    matrix, slots = filled(widths, 1300, 8), [0, 1, 1, -1, *[0] * 30, 1]
    x, y = draw(len(slots), 1300), draw(len(slots), sum(widths), seed=3)
    together = matrix.add(y.clone(), x, tiles_of(slots, capacity=9))
    for row in (0, 2, 17, 34):
        alone = matrix.add(y[row : row + 1].clone(), x[row : row + 1].contiguous(), tiles_of([slots[row]]))
        assert_same_bits(alone, together[row : row + 1])


def test_tiles_hold_each_row_once_and_fit_the_room_that_graphs_give_them() -> None:
    generator = np.random.default_rng(5)
    for _ in range(200):
        num_rows, num_slots = int(generator.integers(0, 80)), int(generator.integers(1, 9))
        slots = generator.integers(-1, num_slots, num_rows)
        most = most_tiles(num_rows, num_slots)
        rows, owners = plan_tiles(slots, most)
        assert len(owners) == most
        assert len(rows) == most * TILE_ROWS
        for tile, owner in enumerate(owners.tolist()):
            held = rows[tile * TILE_ROWS : (tile + 1) * TILE_ROWS]
            held = held[held != UNUSED]
            assert (len(held) > 0) == (owner >= 0)
            assert (slots[held] == owner).all()
        assert sorted(rows[rows != UNUSED].tolist()) == np.flatnonzero(slots >= 0).tolist()
