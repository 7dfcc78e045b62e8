"""The packed form of what steps did for a sequence."""

import pytest

from antiphon.shared.codec import DecodeError
from antiphon.shared.observability.step_rows import STEP_COLUMNS, pack_sequence, pack_step, unpacked


def test_rows_are_little_endian_and_come_back() -> None:
    rows = [*range(STEP_COLUMNS), *range(2**33, 2**33 + STEP_COLUMNS)]
    data = b"".join(
        pack_sequence(*rows[at : at + 6]) + pack_step(*rows[at + 6 : at + STEP_COLUMNS]) for at in (0, STEP_COLUMNS)
    )
    assert data[8:16] == b"\x01\0\0\0\0\0\0\0"
    assert unpacked(data).tolist() == rows
    assert unpacked(b"").tolist() == []


def test_a_part_of_a_row_is_refused() -> None:
    with pytest.raises(DecodeError):
        unpacked(bytes(8 * STEP_COLUMNS + 8))
