"""The rows (batch slots) of the worker's persistent batch: which sequence has which row, and which rows were freed.

The lowest free row is assigned first, so that the rows in use stay close together. Rows can be reserved for beams that
do not exist yet. A held row may be vacant: the worker's data in it are missing or no longer valid, so the sequence must
be sent to the worker completely with its next tokens. Used only by `residency`.
"""

import heapq
from collections.abc import Iterator

from antiphon.services.engine.core.adapter_slots import NO_SLOT, AdapterSlots
from antiphon.services.engine.core.sequence import Sequence


class RowTable:
    """The table of rows.

    At most `num_rows` sequences run, with at most `num_adapters` different LoRA adapters and `num_prompt_adapters`
    different prompt adapters.
    """

    def __init__(
        self, num_rows: int, num_adapters: int = 0, num_prompt_adapters: int = 0, *, has_canary_row: bool = False
    ) -> None:
        """`has_canary_row`: whether the worker has a further row, the last one, for the canary."""
        self.adapters = AdapterSlots(num_adapters)
        self.prompt_adapters = AdapterSlots(num_prompt_adapters)
        self._num_rows = num_rows
        self._holders: list[Sequence | None] = [None] * (num_rows + has_canary_row)
        self._free = list(range(num_rows))
        self._freed: list[int] = []
        self._vacant: set[int] = set()
        self.num_reserved = 0
        """Number of rows reserved for further beams. They are not counted in `num_free`."""

    def __len__(self) -> int:
        """Returns the number of rows without the canary's."""
        return self._num_rows

    @property
    def has_canary_row(self) -> bool:
        """Whether there is a row for the canary."""
        return len(self._holders) > self._num_rows

    def __getitem__(self, row: int) -> Sequence:
        """Returns the sequence that has the row. Raises AssertionError if the row is free."""
        sequence = self._holders[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    @property
    def num_free(self) -> int:
        """Number of rows that are free and not reserved."""
        return len(self._free) - self.num_reserved

    def has_slots(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapters can get slots now."""
        if sequence.adapter is None and sequence.prompt_adapter is None:
            return True
        return self.adapters.has_room(sequence.adapter_version) and self.prompt_adapters.has_room(
            sequence.prompt_adapter_version
        )

    def holders(self) -> Iterator[Sequence]:
        """Returns the sequences that have a row, in row order."""
        return (sequence for sequence in self._holders if sequence is not None)

    def take(self, sequence: Sequence) -> None:
        """Assigns the lowest free row to the sequence, and its adapters' slots. There must be a free row and slots."""
        sequence.row = self._num_rows if sequence.canary else heapq.heappop(self._free)
        if sequence.adapter is not None:
            sequence.adapter_slot = self.adapters.take(sequence.adapter_version)
        if sequence.prompt_adapter is not None:
            sequence.prompt_slot = self.prompt_adapters.take(sequence.prompt_adapter_version)
        self._holders[sequence.row] = sequence

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's row. The next plan lists the row as freed if the worker still has the sequence in it."""
        assert self[sequence.row] is sequence, f"row {sequence.row} is not of {sequence.sequence_id}"
        self._holders[sequence.row] = None
        if not sequence.canary:
            heapq.heappush(self._free, sequence.row)
        self.vacate(sequence)
        self._vacant.discard(sequence.row)
        sequence.row = -1
        if sequence.adapter is not None:
            self.adapters.release(sequence.adapter_slot)
        if sequence.prompt_adapter is not None:
            self.prompt_adapters.release(sequence.prompt_slot)
        sequence.adapter_slot = sequence.prompt_slot = NO_SLOT

    def vacate(self, sequence: Sequence) -> None:
        """Makes the sequence's row vacant, without freeing it here. The next plan lists it as freed."""
        if sequence.row not in self._vacant:
            self._vacant.add(sequence.row)
            self._freed.append(sequence.row)

    def take_vacant(self, sequence: Sequence) -> None:
        """Assigns a reserved row to the sequence. The row is vacant."""
        self.num_reserved -= 1
        self.take(sequence)
        self._vacant.add(sequence.row)

    def is_vacant(self, row: int) -> bool:
        """Returns whether a held row is vacant."""
        return row in self._vacant

    def fill(self, sequence: Sequence) -> None:
        """Records that the plan being made sends the sequence completely, so that its row is no longer vacant."""
        self._vacant.discard(sequence.row)

    def announce(self) -> tuple[int, ...]:
        """Returns the rows freed since the last call. To be called only for a plan that will be run."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed
