"""The packed form of what steps did for a sequence."""

import pytest

from shared.codec import DecodeError
from shared.step_rows import STEP_COLUMNS, empty, packed, unpacked


def test_rows_are_little_endian_and_come_back() -> None:
    rows = empty()
    rows.extend([*range(STEP_COLUMNS), *range(2**33, 2**33 + STEP_COLUMNS)])
    data = packed(rows)
    assert data[8:16] == b"\x01\0\0\0\0\0\0\0"
    assert unpacked(data) == rows
    assert packed(unpacked(b"")) == b""


def test_a_part_of_a_row_is_refused() -> None:
    with pytest.raises(DecodeError):
        unpacked(bytes(8 * STEP_COLUMNS + 8))
