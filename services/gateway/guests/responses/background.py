"""Runs background responses, without a connected client. Clients read the events from a log, from any position."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from services.gateway.apis.openai.serving import ResponseRunner
from services.gateway.edge.http.errors import as_service_error
from services.gateway.guests.responses.encoder import ResponseEncoder
from services.gateway.guests.responses.event_log import EventLog
from services.gateway.guests.responses.input_items import Item
from shared import limits
from shared.errors import ServiceError

_RETRY_AFTER_S = 5.0


class BackgroundResponse:
    """One running response. Implements `stored.unfinished.Unfinished`."""

    def __init__(self, run: ResponseRunner, encoder: ResponseEncoder, items: list[Item], key_name: str) -> None:
        self.encoder = encoder
        self._items = items
        self.key_name = key_name
        self.events = EventLog()
        self._run = run
        self._task: asyncio.Task[None] | None = None

    async def start(self, store: Callable[["BackgroundResponse"], Awaitable[None]]) -> None:
        """Starts the response. `store` is called when it has ended, also by failure or cancellation."""
        await self.events.write(self.encoder.queued())
        self._task = asyncio.create_task(self._generate(store))

    def read(self, first: int) -> AsyncIterator[bytes]:
        """See Unfinished."""
        return self.events.read(first)

    async def response(self) -> dict[str, Any]:
        """See Unfinished."""
        return self.encoder.snapshot()

    async def items(self) -> list[Item]:
        """See Unfinished."""
        return self._items

    async def is_stored(self) -> bool:
        """See Unfinished. It is forgotten here as soon as it is stored."""
        return False

    async def cancel(self) -> dict[str, Any]:
        """See Unfinished."""
        assert self._task is not None
        if not self.encoder.is_final:
            self._task.cancel("cancelled_by_api")
        await asyncio.wait([self._task])
        return self.encoder.response

    async def _generate(self, store: Callable[["BackgroundResponse"], Awaitable[None]]) -> None:
        try:
            await self._run.detached(self.events)
        except asyncio.CancelledError:
            self.encoder.cancelled()
            await self.events.end(b"")
        except Exception as error:
            failure = as_service_error(error)
            self._run.metrics.count_error(failure.code)
            await self.events.end(self.encoder.failure(failure))
        await store(self)


class BackgroundResponses:
    """The background responses of one gateway that have not ended, by id."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundResponse] = {}

    def check_room(self, num_recorded: int) -> None:
        """Raises ServiceError('server_is_overloaded') if no further response may run in the background.

        `num_recorded`: number of recorded background responses (`recorded`) that run in this gateway.
        """
        if len(self._running) + num_recorded >= limits.BACKGROUND_RESPONSES_MAX:
            message = "Too many responses run in the background. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=_RETRY_AFTER_S)

    def get(self, response_id: str) -> BackgroundResponse | None:
        """Returns a running response; None if it is unknown or has ended."""
        return self._running.get(response_id)

    async def start(
        self, one: BackgroundResponse, store: Callable[[BackgroundResponse], Awaitable[None]]
    ) -> BackgroundResponse:
        """Starts a response. It is found by `get` until `store` has returned."""
        response_id = one.encoder.response["id"]

        async def ended(response: BackgroundResponse) -> None:
            try:
                await store(response)
            finally:
                del self._running[response_id]

        self._running[response_id] = one
        await one.start(ended)
        return one
