"""The queue of sequences without a row: by priority (lower first), preempted before new, then by arrival.

The queue is a heap. Aborted sequences stay in it until they reach the top or outnumber the waiting ones, so that every
operation takes O(log n) time on average. Used only by `scheduler`.
"""

import heapq
from collections.abc import Iterator

from services.engine.core.sequence import Sequence, Status

_Entry = tuple[int, bool, int, int, Sequence]
_DEAD_ENTRIES_MIN = 64


class WaitingQueue:
    """The waiting sequences. The number of known tokens of a sequence must not change while it waits."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_tokens = 0
        """Number of known tokens of all waiting sequences."""
        self._heap: list[_Entry] = []

    def __iter__(self) -> Iterator[Sequence]:
        """Returns the waiting sequences in no particular order."""
        return (entry[-1] for entry in self._heap if _alive(entry))

    def push(self, sequence: Sequence) -> None:
        """Adds a new or preempted sequence."""
        priority, arrival, number = sequence.age
        is_new = sequence.status is not Status.PREEMPTED
        heapq.heappush(self._heap, (priority, is_new, arrival, number, sequence))
        self._count(sequence, 1)

    def head(self) -> Sequence | None:
        """Returns the next sequence to run; None if the queue is empty."""
        while self._heap and not _alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Removes and returns the head. The queue must not be empty."""
        sequence = self.head()
        assert sequence is not None, "the queue is empty"
        heapq.heappop(self._heap)
        self._count(sequence, -1)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Removes a waiting sequence whose status has just become finished."""
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
