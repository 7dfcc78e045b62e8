"""What an engine's steps did for one sequence, as rows of numbers: the form in `SequenceSteps` and in records. Pure.

A gateway with many streams gets a row for each token, so rows are copied as bytes and not decoded one by one.
"""

import array
import struct
import sys

from antiphon.shared.codec import DecodeError

STEP_COLUMNS = 10
"""Numbers in a row, for one sequence in one step: number of the step; microseconds from the sequence's arrival at the
engine to the end of the step; duration of the step in microseconds; first computed position; computed tokens; output
tokens (0 in the middle of a prompt, more than 1 if draft tokens were accepted). Then, for the whole step: sequences,
tokens, waiting sequences, free blocks."""
_ROW_BYTES = 8 * STEP_COLUMNS
_SWAP = sys.byteorder == "big"
pack_sequence = struct.Struct("<6Q").pack
"""Returns the first six numbers of a row as little-endian u64."""
pack_step = struct.Struct("<4Q").pack
"""Returns the last four numbers of a row, which are those of the whole step, in the same form."""


def unpacked(data: bytes) -> "array.array[int]":
    """Returns the numbers of packed rows. Raises DecodeError if there is a part of a row."""
    if len(data) % _ROW_BYTES:
        raise DecodeError(f"rows of steps of {len(data)} bytes")
    rows = array.array("Q", data)
    if _SWAP:
        rows.byteswap()
    return rows
