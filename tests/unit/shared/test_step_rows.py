"""The packed form of what steps did for a sequence."""

import msgpack
import pytest

from shared.codec import DecodeError, Decoder
from shared.messages import SequenceRef, StepEvents
from shared.observability.step_rows import STEP_COLUMNS, pack_sequence, pack_step, unpacked


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


def test_steps_of_an_engine_that_tells_them_in_the_former_way_are_read_without_its_sequences() -> None:
    step = [7, 50, 3, 1, 0, 40, 1, [["r-0", 1, 0, 3, 1, 50]], [["r-1", 2]]]
    data = msgpack.packb(["StepEvents", "engine-1", "b", [step]])
    assert data is not None
    message = Decoder([StepEvents]).decode(data)
    assert (message.steps[0].preempted, message.sequences) == ((SequenceRef("r-1", 2),), ())
