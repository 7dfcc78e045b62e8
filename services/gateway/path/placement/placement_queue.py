"""The queue of sequences that wait in a gateway for an engine with credit: two lines for each model. Pure.

The second line is that of the idle lane. The dispatcher serves it only while the first one is empty; `promote` moves
the tickets whose time in the idle lane is over to the first line.

Clients (API keys) share by weighted fair queueing in tokens (`antiphon.shared.structures.fair_order`), so a client with
many requests does not delay the others. The order of the sequences of one client is priority (lower first), then
arrival. A sequence whose engine was lost keeps its arrival number, so it goes before all sequences of the client that
arrived later. The caller may give it an earlier turn.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from antiphon.services.gateway.path.generation import Client
from antiphon.shared.structures.fair_order import FairOrder

T = TypeVar("T", bound="Ticket")
STALE_ITEMS_MAX = 64
"""A heap is rebuilt when its withdrawn tickets outnumber its queued ones by more than this."""


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """What the queue knows of a sequence. The caller's object for the sequence extends it (`candidate`)."""

    model: str
    priority: int
    arrival: tuple[int, int]
    """Number of the request and index of the sequence in the request."""
    client: Client = field(default_factory=Client)
    cost: int = 1
    """Tokens that the client is charged with when the sequence is taken: prompt and expected output."""
    waits_since: float | None = None
    """Time at which the ticket was first queued. The caller resets it to None when the sequence has been placed."""
    number: int = 0
    """Set by the queue: 0 while the ticket is not queued, else a new number for each time that it is queued."""
    idle_until: float = 0.0
    """Time until which the ticket is in the idle lane, in seconds of the caller's clock; 0: it is not in the lane."""
    idle: bool = False
    """Set by the queue: whether the ticket was last queued in the idle lane."""
    turn: tuple[int, int] | None = None
    """Takes the place of `arrival` in the order of the client's sequences; None: `arrival` counts."""


@dataclass(slots=True)
class _Heap(Generic[T]):
    """The tickets of one client by their numbers, and a heap of priority, turn and number.

    Items of withdrawn tickets stay in the heap until they come first or outnumber the others.
    """

    items: list[tuple[int, tuple[int, int], int]] = field(default_factory=list[tuple[int, tuple[int, int], int]])
    queued: dict[int, T] = field(default_factory=dict[int, T])


@dataclass(slots=True)
class _Line(Generic[T]):
    """The clients with tickets for one model, and the order in which they are served."""

    heaps: dict[str, _Heap[T]] = field(default_factory=dict[str, _Heap[T]])
    order: FairOrder = field(default_factory=FairOrder)
    num_queued: int = 0


class PlacementQueue(Generic[T]):
    """The lines of all models in one gateway. Empty lines are kept, with the charges of their clients."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, bool], _Line[T]] = {}
        """By model and whether it is the line of the idle lane."""
        self._num_pushed = self._num_queued = 0
        self._due = math.inf
        """Lower bound of the time at which the next ticket leaves the idle lane."""

    def __len__(self) -> int:
        return self._num_queued

    def models(self) -> list[str]:
        """Returns the models that have waiting sequences."""
        return list({model: None for (model, _), line in self._lines.items() if line.num_queued})

    def num_waiting(self, model: str) -> int:
        """Returns the number of tickets of a model that are not in the idle lane."""
        line = self._lines.get((model, False))
        return 0 if line is None else line.num_queued

    @property
    def num_ordinary(self) -> int:
        """Number of tickets that are not in the idle lane."""
        return sum(line.num_queued for (_, idle), line in self._lines.items() if not idle)

    def push(self, ticket: T, now: float) -> None:
        """Queues a ticket, which must not be queued already."""
        assert not ticket.number
        self._num_pushed += 1
        ticket.number = self._num_pushed
        if ticket.waits_since is None:
            ticket.waits_since = now
        ticket.idle = ticket.idle_until > now
        if ticket.idle:
            self._due = min(self._due, ticket.idle_until)
        client, line = ticket.client, self._lines.get((ticket.model, ticket.idle))
        if line is None:
            line = self._lines[ticket.model, ticket.idle] = _Line()
        heap = line.heaps.get(client.name)
        if heap is None:
            heap = line.heaps[client.name] = _Heap()
        turn = ticket.arrival if ticket.turn is None else ticket.turn
        heapq.heappush(heap.items, (ticket.priority, turn, ticket.number))
        heap.queued[ticket.number] = ticket
        line.num_queued += 1
        self._num_queued += 1
        line.order.activate(client.name, client.weight, client.priority)

    def promote(self, now: float) -> None:
        """Moves the tickets whose time in the idle lane is over to the ordinary lines of their models."""
        if now < self._due:
            return
        self._due = math.inf
        for ticket in [one for (_, idle), line in self._lines.items() if idle for one in _queued(line)]:
            if ticket.idle_until <= now:
                self.withdraw(ticket)
                self.push(ticket, now)
            else:
                self._due = min(self._due, ticket.idle_until)

    def first(self, model: str, eligible: Callable[[str], bool] | None = None, *, idle: bool = False) -> T | None:
        """Returns the next ticket of a model without removing it; None if no sequence waits.

        `eligible`: returns for the name of a client whether its tickets may be chosen; by default all may. `idle`: look
        in the idle lane.
        """
        line = self._lines.get((model, idle))
        if line is None or not line.num_queued or (name := line.order.first(eligible)) is None:
            return None
        heap = line.heaps[name]
        while heap.items[0][2] not in heap.queued:
            heapq.heappop(heap.items)
        return heap.queued[heap.items[0][2]]

    def take(self, ticket: T) -> None:
        """Removes a queued ticket because its sequence is placed, and charges its client."""
        self._lines[ticket.model, ticket.idle].order.serve(ticket.client.name, ticket.cost)
        self.withdraw(ticket)

    def withdraw(self, ticket: T) -> bool:
        """Removes a ticket from any place in the queue. Returns False if it was not queued."""
        if not ticket.number:
            return False
        line, name = self._lines[ticket.model, ticket.idle], ticket.client.name
        heap = line.heaps[name]
        del heap.queued[ticket.number]
        ticket.number = 0
        line.num_queued -= 1
        self._num_queued -= 1
        if not heap.queued:
            del line.heaps[name]
            line.order.deactivate(name)
        elif len(heap.items) > 2 * len(heap.queued) + STALE_ITEMS_MAX:
            heap.items = [item for item in heap.items if item[2] in heap.queued]
            heapq.heapify(heap.items)
        return True

    def settle(self, ticket: T, tokens: int) -> None:
        """Corrects the charge of a ticket that was taken: its sequence has used `tokens` tokens in total."""
        if (line := self._lines.get((ticket.model, ticket.idle))) is not None:
            line.order.adjust(ticket.client.name, tokens - ticket.cost)

    def tickets(self, model: str) -> list[T]:
        """Returns all tickets of a model, in no particular order."""
        lines = (self._lines.get((model, idle)) for idle in (False, True))
        return [ticket for line in lines if line is not None for ticket in _queued(line)]


def _queued(line: _Line[T]) -> Iterator[T]:
    for heap in line.heaps.values():
        yield from heap.queued.values()
