"""Forms in which a row has the same bits in any step."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Heads, Room, Sequences, plan_work
from antiphon.services.engine.backends.triton.kernels.products.skinny import FIXED_ROWS, fixed_linear
from tests.unit.engine.backends.triton.close import assert_close, assert_same_bits
from tests.unit.engine.backends.triton.test_quantized import draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "columns"), [(150, 290), (33, 64), (16, 130)])
def test_a_fixed_product_is_that_of_the_library(width: int, columns: int, dtype: torch.dtype) -> None:
    weight, bias = draw(width, columns, seed=1, dtype=dtype) / columns**0.5, draw(width, seed=2, dtype=dtype)
    for rows in (1, FIXED_ROWS, FIXED_ROWS + 5):
        x, residual = draw(rows, columns, seed=3, dtype=dtype), draw(rows, width, seed=4, dtype=dtype)
        exact = F.linear(x.float(), weight.float())
        assert_close(fixed_linear(x, weight, bias), (exact + bias.float()).to(dtype))
        assert_close(fixed_linear(x, weight, residual=residual), (exact + residual.float()).to(dtype))


def test_a_row_of_a_fixed_product_has_the_same_bits_in_every_batch() -> None:
    weight, x = draw(48, 200, seed=1), draw(256, 200)
    every = fixed_linear(x, weight)
    for rows in (1, 2, 7, 8, 9, 64, 65, 200):
        # At the same place of a tile; NumPy, with which the interpreter multiplies, may differ between places.
        assert torch.equal(fixed_linear(x[:rows].contiguous(), weight), every[:rows])
    assert_same_bits(fixed_linear(x[70:71].contiguous(), weight), every[70:71])


def test_one_form_has_tiles_for_all_sequences_and_pads_those_of_graphs() -> None:
    heads = Heads(group=2, head_dim=64, itemsize=2, stored_itemsize=2, one_form=True)
    put, tables = lambda values, room: torch.tensor(np.resize(values, room)), torch.zeros((8, 4), dtype=torch.int32)
    rows, lengths = np.array([3, 1, 5]), np.array([9, 70, 2])
    sequences = Sequences(rows, lengths, np.arange(3), np.ones(3, dtype=np.int64))
    work = plan_work(sequences, tables, None, heads, put)
    assert work.few is None
    assert work.many is not None
    assert sorted(work.many.tiles.tolist()) == [0 << 16, 1 << 16, 2 << 16]
    room = Room(few=0, items=0, queries=1, many=8, tiles=9)
    padded = plan_work(sequences, tables, None, heads, put, room)
    assert padded.few is None
    assert padded.many is not None
    assert padded.many.num_tiles == 9
    assert padded.many.query_lens.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert sorted(padded.many.tiles.tolist()) == [0 << 16, 1 << 16, 2 << 16, *[3 << 16] * 6]
    empty = plan_work(Sequences(*(np.zeros(0, dtype=np.int64),) * 4), tables, None, heads, put, room)
    assert empty.many is not None
    assert empty.many.query_lens.tolist() == [0] * 9
