"""The queue of sequences without a row: by priority (lower first), preempted before new, then by arrival.

A heap in which aborted sequences stay until they surface or outnumber the living, so that every operation is O(log n)
on average however long the queue is. Used by `scheduler` alone.
"""

import heapq
from collections.abc import Iterator

from services.engine.core.sequence import Sequence, Status

_Entry = tuple[int, bool, int, int, Sequence]
_DEAD_ENTRIES_MIN = 64


class WaitingQueue:
    """Sequences that wait. Their known tokens do not change while they do."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_tokens = 0
        """Known tokens of all waiting sequences."""
        self._heap: list[_Entry] = []

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no particular order."""
        return (entry[-1] for entry in self._heap if _alive(entry))

    def push(self, sequence: Sequence) -> None:
        """Queues a new or preempted sequence."""
        priority, arrival, number = sequence.age
        is_new = sequence.status is not Status.PREEMPTED
        heapq.heappush(self._heap, (priority, is_new, arrival, number, sequence))
        self._count(sequence, 1)

    def head(self) -> Sequence | None:
        """The next sequence to run."""
        while self._heap and not _alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Removes the head."""
        sequence = self.head()
        assert sequence is not None, "the queue is empty"
        heapq.heappop(self._heap)
        self._count(sequence, -1)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Takes out a sequence whose status has just become finished."""
        assert sequence.status is Status.FINISHED, sequence.sequence_id
        self._count(sequence, -1)
        if len(self._heap) - self.num_waiting > max(self.num_waiting, _DEAD_ENTRIES_MIN):
            self._heap = [entry for entry in self._heap if _alive(entry)]
            heapq.heapify(self._heap)

    def _count(self, sequence: Sequence, change: int) -> None:
        self.num_waiting += change
        self.num_tokens += change * sequence.num_tokens


def _alive(entry: _Entry) -> bool:
    return entry[-1].status is not Status.FINISHED
