"""Delivers the new output of all requests of a gateway once in each pass of the event loop.

So output that arrives together, in one message or in several, is written to a client together. Each request has an
`Outlet`, which asks for a delivery with `soon`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from services.gateway.path.generation import SequenceUpdate, Take
from shared.errors import ServiceError


class Deliveries:
    """The outlets of a gateway that have output to be delivered."""

    def __init__(self) -> None:
        self._due: list[Outlet] = []

    def soon(self, outlet: "Outlet") -> None:
        """Schedules a delivery. The outlet calls this once for each delivery."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._due.append(outlet)

    def _deliver(self) -> None:
        due, self._due = self._due, []
        for outlet in due:
            outlet.deliver()


class Outlet:
    """The new output of one request, on its way to the consumer: to its function, or to the task that iterates."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._updates: deque[SequenceUpdate] = deque()
        self._take: Take | None = None
        self._wake = asyncio.Event()
        self._is_waiting = self._is_due = self._ended = False
        """Whether the consumer waits for the next batch, whether a delivery is scheduled, whether this is the end."""
        self._failure: Exception | None = None
        """What `_take` has raised."""
        self._error: ServiceError | None = None

    def __len__(self) -> int:
        """Number of updates that the consumer has not taken."""
        return len(self._updates)

    def put(self, update: SequenceUpdate) -> None:
        """Adds an update, which is delivered soon."""
        self._updates.append(update)
        if not self._is_due:
            self._is_due = True
            self._deliveries.soon(self)

    def end(self, error: ServiceError | None) -> None:
        """Makes `batches` end after the updates so far, with an error if there is one. Called once."""
        self._take = None  # breaks a reference cycle
        self._ended, self._error = True, error
        self._wake.set()

    def deliver_to(self, take: Take) -> None:
        """See Generation."""
        self._take = take

    def deliver(self) -> None:
        """Passes the new updates to the consumer: to its function, or if that does not take them, in its task."""
        self._is_due = False
        if self._take is not None and self._is_waiting and self._updates and self._failure is None:
            try:
                taken = self._take(list(self._updates))
            except Exception as error:
                self._failure, taken = error, False
            if taken:
                self._updates.clear()
                return
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Yields the updates in batches. Raises what the consumer's function or the request failed with."""
        while self._failure is None:
            if self._updates:
                batch = list(self._updates)
                self._updates.clear()
                yield batch
                continue
            if self._ended:
                break
            self._wake.clear()
            self._is_waiting = True
            try:
                await self._wake.wait()
            finally:
                self._is_waiting = False
        if (error := self._failure or self._error) is not None:
            raise error
