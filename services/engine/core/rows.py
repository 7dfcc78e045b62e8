"""The rows of the worker's state table: which sequence has which, and which were freed since the last plan.

Used by `scheduler` alone. The lowest free row is given first, so that the rows in use stay close together.
"""

import heapq
from collections.abc import Iterator

from services.engine.core.sequence import Sequence


class RowTable:
    """As many rows as sequences may run at once."""

    def __init__(self, num_rows: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_rows
        self._free = list(range(num_rows))
        self._freed: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    def __getitem__(self, row: int) -> Sequence:
        """The row's sequence; it must have one."""
        sequence = self._holders[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return len(self._free)

    def holders(self) -> Iterator[Sequence]:
        """Every sequence with a row, by row."""
        return (sequence for sequence in self._holders if sequence is not None)

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence the lowest free row; there must be one."""
        sequence.row = heapq.heappop(self._free)
        self._holders[sequence.row] = sequence

    def give_back(self, sequence: Sequence) -> None:
        """Frees the sequence's row; the next plan announces it."""
        assert self[sequence.row] is sequence, f"row {sequence.row} is not of {sequence.sequence_id}"
        self._holders[sequence.row] = None
        heapq.heappush(self._free, sequence.row)
        self._freed.append(sequence.row)
        sequence.row = -1

    def announce(self) -> tuple[int, ...]:
        """The rows freed since the last call, for a plan that will be carried out."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed
