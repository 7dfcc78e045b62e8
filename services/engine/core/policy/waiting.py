"""The queue of sequences without a row.

Clients share the engine by weighted fair queueing: each is charged for the tokens of its sequences
(`antiphon.shared.structures.fair_order`). The sequences of one client are ordered by priority (lower first), then
preempted before new ones, then by arrival. All sequences without a client count as those of one client.

Each client's sequences are a heap. Aborted sequences stay in it until they reach the top or outnumber the waiting ones,
so that every operation takes O(log n) time on average; `head` takes O(c) time for c clients. Used by `residency` and
the lanes.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.services.engine.core.sequence import Sequence, Status
from antiphon.shared import limits
from antiphon.shared.structures.fair_order import FairOrder

_Entry = tuple[int, bool, int, int, Sequence]
_DEAD_ENTRIES_MIN = 64


@dataclass(slots=True)
class _Line:
    """The sequences of one client."""

    heap: list[_Entry] = field(default_factory=list[_Entry])
    num_waiting: int = 0


class WaitingQueue:
    """The waiting sequences. The number of known tokens of a sequence must not change while it waits."""

    def __init__(self, *, idle: bool = False) -> None:
        """`idle`: whether this is the queue of the idle sequences.

        A sequence in that queue counts as removed once it is no longer idle.
        """
        self._idle = idle
        self.num_waiting = 0
        self.num_tokens = 0
        """Number of known tokens of all waiting sequences."""
        self._lines: dict[str, _Line] = {}
        self._order = FairOrder()
        self._running: Counter[str] = Counter()
        """Sequences that were taken from the queue and run, by client."""

    def __iter__(self) -> Iterator[Sequence]:
        """Returns the waiting sequences in no particular order."""
        return (entry[-1] for line in self._lines.values() for entry in line.heap if self._alive(entry))

    def push(self, sequence: Sequence) -> None:
        """Adds a new or preempted sequence."""
        _, arrival, number = sequence.age
        is_new = sequence.status is not Status.PREEMPTED
        line = self._lines.setdefault(sequence.client, _Line())
        heapq.heappush(line.heap, (sequence.priority, is_new, arrival, number, sequence))
        line.num_waiting += 1
        self._count(sequence, 1)
        self._order.activate(sequence.client, sequence.client_weight, sequence.client_priority)

    def head(self, *, newcomers_only: bool = False) -> Sequence | None:
        """Returns the next sequence to run; None if there is none.

        `newcomers_only`: only sequences of clients that have no running sequence; sequences without a client count as
        well.
        """
        name = self._order.first(self._is_newcomer if newcomers_only else None)
        if name is None:
            return None
        heap = self._lines[name].heap
        while not self._alive(heap[0]):
            heapq.heappop(heap)
        return heap[0][-1]

    def pop(self, sequence: Sequence, num_tokens: int) -> None:
        """Removes a sequence that `head` returned and that runs now.

        `num_tokens`: number of tokens that it has to compute first.
        """
        heap = self._lines[sequence.client].heap
        assert heap[0][-1] is sequence, f"{sequence.sequence_id} is not first"
        heapq.heappop(heap)
        if sequence.status is not Status.PREEMPTED:
            left = sequence.rules.max_tokens - sequence.num_carried_tokens
            sequence.num_charged_tokens = min(left, limits.OUTPUT_ESTIMATE_TOKENS)
            self._order.serve(sequence.client, num_tokens + sequence.num_charged_tokens)
        self._running[sequence.client] += 1
        self._leave(sequence)

    def count_running(self, beam: Sequence) -> None:
        """Counts a further beam of a search, which has never waited, as running.

        Its client is charged for the beam's tokens when the beam ends.
        """
        self._running[beam.client] += 1

    @property
    def num_running_clients(self) -> int:
        """Number of clients with running sequences; sequences without a client count as those of one."""
        return len(self._running)

    def stopped(self, sequence: Sequence) -> None:
        """Records that a running sequence has ended or was preempted."""
        self._running[sequence.client] -= 1
        if not self._running[sequence.client]:
            del self._running[sequence.client]
        if sequence.status is Status.FINISHED:
            output = sequence.num_output_tokens - sequence.num_carried_tokens
            self._order.adjust(sequence.client, output - sequence.num_charged_tokens)

    def forget(self, sequence: Sequence) -> None:
        """Removes a waiting sequence whose status has just become finished."""
        assert sequence.status is Status.FINISHED, sequence.sequence_id
        self._leave(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Removes an idle sequence that waits and becomes an ordinary one now: the caller then ends its idle time."""
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        line = self._lines[sequence.client]
        line.num_waiting -= 1
        if not line.num_waiting:
            del self._lines[sequence.client]
            self._order.deactivate(sequence.client)
        elif len(line.heap) - line.num_waiting > max(line.num_waiting, _DEAD_ENTRIES_MIN):
            line.heap = [entry for entry in line.heap if self._alive(entry)]
            heapq.heapify(line.heap)

    def _is_newcomer(self, client: str) -> bool:
        return not client or client not in self._running

    def _count(self, sequence: Sequence, change: int) -> None:
        self.num_waiting += change
        self.num_tokens += change * sequence.num_tokens

    def _alive(self, entry: _Entry) -> bool:
        return entry[-1].status is not Status.FINISHED and entry[-1].idle == self._idle
