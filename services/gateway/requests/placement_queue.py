"""The queue of sequences that wait in a gateway for an engine with credit: one line for each model. Pure.

The order is priority (lower first, as in the engine), then arrival. A sequence whose engine was lost keeps its arrival
number, so it goes before all sequences of the same priority that arrived later.
"""

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

C = TypeVar("C")
STALE_ITEMS_MAX = 64
"""A line's heap is rebuilt when its withdrawn tickets outnumber its queued ones by more than this."""


@dataclass(eq=False, slots=True)
class Ticket(Generic[C]):
    """One sequence in the queue. `claimant` is the caller's object for the sequence; the queue does not use it."""

    claimant: C
    model: str
    priority: int
    arrival: tuple[int, int]
    """Number of the request and index of the sequence in the request."""
    waits_since: float | None = None
    """Time at which the ticket was first queued. The caller resets it to None when the sequence has been placed."""
    number: int = 0
    """Set by the queue: 0 while the ticket is not queued, else a new number for each time that it is queued."""


_Item = tuple[int, tuple[int, int], int, Ticket[C]]


@dataclass(slots=True)
class _Line(Generic[C]):
    """A heap. Withdrawn items stay in the heap until they come first or outnumber the queued ones."""

    heap: list[_Item[C]] = field(default_factory=list[_Item[C]])
    num_queued: int = 0


class PlacementQueue(Generic[C]):
    """The lines of all models in one gateway."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[C]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return sum(line.num_queued for line in self._lines.values())

    def models(self) -> list[str]:
        """Returns the models that have waiting sequences."""
        return list(self._lines)

    def push(self, ticket: Ticket[C], now: float) -> None:
        """Queues a ticket, which must not be queued already."""
        assert not ticket.number
        self._num_pushed += 1
        ticket.number = self._num_pushed
        if ticket.waits_since is None:
            ticket.waits_since = now
        line = self._lines.setdefault(ticket.model, _Line[C]())
        heapq.heappush(line.heap, (ticket.priority, ticket.arrival, ticket.number, ticket))
        line.num_queued += 1

    def first(self, model: str) -> Ticket[C] | None:
        """Returns the first ticket of a model without removing it; None if no sequence waits."""
        line = self._lines.get(model)
        if line is None:
            return None
        while not _is_queued(line.heap[0]):
            heapq.heappop(line.heap)
        return line.heap[0][3]

    def withdraw(self, ticket: Ticket[C]) -> bool:
        """Removes a ticket from any place in the queue. Returns False if it was not queued."""
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
        """Returns all tickets of a model, in no particular order."""
        line = self._lines.get(model)
        return [item[3] for item in line.heap if _is_queued(item)] if line is not None else []


def _is_queued(item: _Item[C]) -> bool:
    return item[2] == item[3].number
