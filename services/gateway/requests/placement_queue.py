"""The queue of sequences that wait in a gateway for an engine's credit: one line for each model. Pure.

Order: priority (lower first, as in the engine), then arrival. A sequence whose engine was lost keeps its arrival, so it
goes before everybody of its priority who came later.
"""

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

C = TypeVar("C")
STALE_ITEMS_MAX = 64
"""Withdrawn tickets that a line keeps at least before it is rebuilt without them."""


@dataclass(eq=False, slots=True)
class Ticket(Generic[C]):
    """One sequence's place in the queue. `claimant` is what the caller wants back when its turn comes."""

    claimant: C
    model: str
    priority: int
    arrival: tuple[int, int]
    """Number of the request, then index of the sequence within it."""
    waits_since: float | None = None
    """Set when it is queued first; the caller resets it when the sequence has found a place."""
    number: int = 0
    """Set by the queue: 0 while the ticket is not queued, else different each time it is."""


_Item = tuple[int, tuple[int, int], int, Ticket[C]]


@dataclass(slots=True)
class _Line(Generic[C]):
    """A heap whose withdrawn items stay until they come first or outnumber the others."""

    heap: list[_Item[C]] = field(default_factory=list[_Item[C]])
    num_queued: int = 0


class PlacementQueue(Generic[C]):
    """All lines of one gateway."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[C]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return sum(line.num_queued for line in self._lines.values())

    def models(self) -> list[str]:
        """Models with waiting sequences."""
        return list(self._lines)

    def push(self, ticket: Ticket[C], now: float) -> None:
        """Queues a ticket that is not queued."""
        assert not ticket.number
        self._num_pushed += 1
        ticket.number = self._num_pushed
        if ticket.waits_since is None:
            ticket.waits_since = now
        line = self._lines.setdefault(ticket.model, _Line[C]())
        heapq.heappush(line.heap, (ticket.priority, ticket.arrival, ticket.number, ticket))
        line.num_queued += 1

    def first(self, model: str) -> Ticket[C] | None:
        """The ticket whose turn it is."""
        line = self._lines.get(model)
        if line is None:
            return None
        while not _is_queued(line.heap[0]):
            heapq.heappop(line.heap)
        return line.heap[0][3]

    def withdraw(self, ticket: Ticket[C]) -> bool:
        """Takes a ticket out wherever it stands, the first one too. False when it was not queued."""
        if not ticket.number:
            return False
        ticket.number = 0
        line = self._lines[ticket.model]
        line.num_queued -= 1
        if not line.num_queued:
            del self._lines[ticket.model]
        elif len(line.heap) > 2 * line.num_queued + STALE_ITEMS_MAX:
            line.heap = [item for item in line.heap if _is_queued(item)]
            heapq.heapify(line.heap)
        return True

    def tickets(self, model: str) -> list[Ticket[C]]:
        """All tickets of a model, in no order."""
        line = self._lines.get(model)
        return [item[3] for item in line.heap if _is_queued(item)] if line is not None else []


def _is_queued(item: _Item[C]) -> bool:
    return item[2] == item[3].number
