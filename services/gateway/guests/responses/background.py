"""Background responses, which run without a connected client. Clients read their events from a log, from any position.

Here they end with their gateway. Another guest may have them survive it, and then replaces `BackgroundResponses`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from starlette.requests import Request

from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.serving import Detached, Serving
from antiphon.services.gateway.edge.access.call import current_call
from antiphon.services.gateway.edge.http.errors import as_service_error
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.event_log import EventLog
from antiphon.services.gateway.guests.responses.input_items import Item
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore, StoredResponse
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

_RETRY_AFTER_S = 5.0
Kept = Callable[[dict[str, Any], list[bytes]], Awaitable[StoredResponse]]
"""Returns the stored form of a response that has ended, from its last state and its events. Raises LogUnavailableError.
"""


class Unfinished(Protocol):
    """A response that has not ended. Methods raise ServiceError, 'bus_unavailable' or 'not_found'."""

    @property
    def key_name(self) -> str:
        """Name of the API key that created it."""
        ...

    def read(self, first: int) -> AsyncGenerator[bytes]:
        """Yields its events from number `first` on, several at a time, and waits for further ones until the end."""
        ...

    async def response(self) -> dict[str, Any]:
        """Returns its present state for clients."""
        ...

    async def items(self) -> list[Item]:
        """Returns its input items."""
        ...

    async def is_stored(self) -> bool:
        """Whether it has ended and is stored. One whose end clients have seen is stored very soon."""
        ...

    async def cancel(self) -> dict[str, Any]:
        """Cancels it unless it has ended. Returns its last state when it is stored."""
        ...


class BackgroundResponse:
    """One running response. Implements Unfinished."""

    def __init__(self, run: Detached, encoder: ResponseEncoder, items: list[Item], key_name: str) -> None:
        self.encoder = encoder
        self._items = items
        self.key_name = key_name
        self.events = EventLog()
        self._run = run
        self._task: asyncio.Task[None] | None = None

    async def start(self, ended: Callable[[], Awaitable[None]]) -> None:
        """Starts the response. `ended` is called when it has ended, also by failure or cancellation."""
        await self.events.write(self.encoder.queued())
        self._task = asyncio.create_task(self._generate(ended))

    def read(self, first: int) -> AsyncGenerator[bytes]:
        """See Unfinished."""
        return self.events.read(first)

    async def response(self) -> dict[str, Any]:
        """See Unfinished."""
        return self.encoder.snapshot()

    async def items(self) -> list[Item]:
        """See Unfinished."""
        return self._items

    async def is_stored(self) -> bool:
        """See Unfinished. It is stored when its task ends."""
        if not self.encoder.is_final or self._task is None:
            return False
        await asyncio.wait([self._task])
        return True

    async def cancel(self) -> dict[str, Any]:
        """See Unfinished."""
        assert self._task is not None
        if not self.encoder.is_final:
            self._task.cancel("cancelled_by_api")
        await asyncio.wait([self._task])
        return self.encoder.response

    async def _generate(self, ended: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._run.detached(self.events)
        except asyncio.CancelledError:
            self.encoder.cancelled()
            await self.events.end(b"")
        except Exception as error:
            failure = as_service_error(error)
            self._run.metrics.count_error(failure.code)
            await self.events.end(self.encoder.failure(failure))
        await ended()


class BackgroundResponses:
    """The background responses of one gateway that have not ended."""

    keeps_trying = False
    """Whether a response that has ended is stored later, if the bus does not answer."""

    def __init__(self, serving: Serving, store: ResponseStore) -> None:
        self.serving, self.store = serving, store
        self._running: dict[str, BackgroundResponse] = {}
        """By id."""

    def num_running(self) -> int:
        """Returns the number of those that run in this gateway."""
        return len(self._running)

    def check_room(self) -> None:
        """Raises ServiceError('server_is_overloaded') if no further response may run in the background."""
        if self.num_running() >= limits.BACKGROUND_RESPONSES_MAX:
            message = "Too many responses run in the background. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=_RETRY_AFTER_S)

    async def find(self, response_id: str) -> Unfinished | None:
        """Returns a response; None if it is unknown or has ended."""
        return self._running.get(response_id)

    async def start(
        self,
        request: Request,
        context: RequestContext,
        encoder: ResponseEncoder,
        kept: Kept,
        items: list[Item],
        turn: Detached | None = None,
    ) -> Unfinished:
        """Starts a response. It is found by `find` until it is stored. `items`: those of its input.

        `turn`: what runs it; None: it is one generation.
        """
        response_id = encoder.response["id"]
        run = turn or self.serving.runner(request, context, encoder)
        one = self._running[response_id] = BackgroundResponse(run, encoder, items, current_call().key.name)

        async def ended() -> None:
            try:
                record = await kept(encoder.response, one.events.events)
                if encoder.response["store"]:
                    await self.store.put(record)
            finally:
                del self._running[response_id]

        await one.start(ended)
        return one
