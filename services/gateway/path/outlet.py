"""The new output of one request, on its way to the task that writes it to the client.

Output that arrives in one pass of the event loop, in one message or in several, is one batch.
"""

import asyncio
from collections.abc import AsyncIterator

from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.services.gateway.path.record import RecordedRequest
from antiphon.shared.errors import ServiceError


class Outlet:
    """The updates that the consumer of a request has not taken."""

    def __init__(self, record: RecordedRequest) -> None:
        """`record` is told what the consumer has processed."""
        self._record = record
        self._updates: list[SequenceUpdate] = []
        self._waiting: asyncio.Future[None] | None = None
        """Of the consumer, until there is something for it. On the token path, where an `asyncio.Event` is slower."""
        self._ended = False
        self._error: ServiceError | None = None

    def put(self, update: SequenceUpdate) -> int:
        """Adds an update. Returns how many the consumer has not taken."""
        self._updates.append(update)
        self._wake()
        return len(self._updates)

    def end(self, error: ServiceError | None) -> None:
        """Makes `batches` end after the updates so far, with an error if there is one. Called once."""
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():  # it is done if the consumer was cancelled
            waiting.set_result(None)

    async def batches(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Yields the updates in batches, to one consumer. Raises what the request failed with."""
        while self._updates or not self._ended:
            if self._updates:
                batch, self._updates = self._updates, []
                yield batch
                # The consumer asks for the next batch, so it has written this one to the client's connection.
                for update in batch:
                    self._record.written(update.index, len(update.token_ids))
            else:
                self._waiting = asyncio.Future()
                await self._waiting
        if self._error is not None:
            raise self._error
