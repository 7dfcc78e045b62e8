"""Copies of blocks by the C++ library: the bytes and the checksum of numpy, for pieces of every size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.engine.kv.pieces import Bytes, NativeCopy, PiecedBlocks, checksum
from tests.native.libraries import VARIANTS, library

BLOCKS, GUARD = 3, 0xA5


@pytest.fixture(scope="module", params=VARIANTS)
def native(request: pytest.FixtureRequest) -> NativeCopy:
    return library(request.param).copy_block


def arrays(draw: np.random.Generator, count: int, size: int) -> list[Bytes]:
    return [draw.integers(0, 256, (BLOCKS, size), dtype=np.uint8) for _ in range(count)]


@given(
    count=st.integers(1, 9),
    size=st.one_of(st.integers(1, 300), st.integers(4000, 4200), st.sampled_from([4096, 8192, 12288, 32768])),
    unused=st.integers(0, 40),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_library_copies_and_sums_as_numpy_does(
    native: NativeCopy, count: int, size: int, unused: int, offset: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    parts = arrays(draw, count, size + unused)
    ours, theirs = PiecedBlocks(parts, native), PiecedBlocks(parts)
    room = np.full(offset + count * size + 64, GUARD, dtype=np.uint8)
    found, expected = room[offset : offset + count * size], np.empty(count * size, dtype=np.uint8)
    assert ours.read(1, found) == theirs.read(1, expected) == checksum(expected)
    assert np.array_equal(found, expected)
    assert (np.delete(room, slice(offset, offset + count * size)) == GUARD).all()
    targets = [part.copy() for part in parts], [part.copy() for part in parts]
    data = draw.integers(0, 256, count * size, dtype=np.uint8)
    sums = [PiecedBlocks(target, copy).write(2, data) for target, copy in zip(targets, (native, None), strict=True)]
    assert sums == [checksum(data)] * 2
    for one, other in zip(*targets, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(("block", "size"), [(-1, 100), (BLOCKS, 100), (0, 101), (0, 102)])
def test_nothing_outside_of_the_arrays_is_touched(native: NativeCopy, block: int, size: int) -> None:
    blocks = PiecedBlocks(arrays(np.random.default_rng(1), 2, 50), native)
    with pytest.raises(IndexError):
        blocks.read(block, np.empty(size, dtype=np.uint8))
    with pytest.raises(IndexError):
        blocks.write(block, np.empty(size, dtype=np.uint8))
