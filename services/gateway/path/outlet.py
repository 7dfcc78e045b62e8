"""The new output of one request, on its way to the task that writes it to the client.

Output that arrives in one pass of the event loop, in one message or in several, is one batch.
"""

import asyncio
from collections.abc import AsyncIterator

from services.gateway.path.generation import SequenceUpdate
from shared.errors import ServiceError


class Outlet:
    """The updates that the consumer of a request has not taken."""

    def __init__(self) -> None:
        self._updates: list[SequenceUpdate] = []
        self._waiting: asyncio.Future[None] | None = None
        """Of the consumer, until there is something for it. On the token path, where an `asyncio.Event` is slower."""
        self._ended = False
        self._error: ServiceError | None = None

    def __len__(self) -> int:
        return len(self._updates)

    def put(self, update: SequenceUpdate) -> None:
        """Adds an update."""
        self._updates.append(update)
        if self._waiting is not None:
            self._wake(self._waiting)

    def end(self, error: ServiceError | None) -> None:
        """Makes `batches` end after the updates so far, with an error if there is one. Called once."""
        self._ended, self._error = True, error
        if self._waiting is not None:
            self._wake(self._waiting)

    def _wake(self, waiting: "asyncio.Future[None]") -> None:
        self._waiting = None
        if not waiting.done():  # it is done if the consumer was cancelled
            waiting.set_result(None)

    async def batches(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Yields the updates in batches, to one consumer. Raises what the request failed with."""
        while self._updates or not self._ended:
            if self._updates:
                batch, self._updates = self._updates, []
                yield batch
            else:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
        if self._error is not None:
            raise self._error
