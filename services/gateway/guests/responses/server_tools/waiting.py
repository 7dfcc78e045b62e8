"""The wait of a client for a response that runs detached from its connection."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.disconnect import unless_gone
from antiphon.services.gateway.guests.responses.background import Unfinished

_DATA = b"\n" + sse.DATA


class Waited:
    """A response for which a client waits. `cancels`: whether it is cancelled if the client disconnects."""

    def __init__(self, begun: Unfinished, *, cancels: bool) -> None:
        self._begun, self._cancels = begun, cancels
        self._last = b""

    async def read(self, first: int) -> AsyncGenerator[bytes]:
        """Yields the events from number `first` on. Before the last ones end, the response is stored."""
        has_ended = False
        try:
            async for data in self._begun.read(first):
                self._last = data
                yield data
            has_ended = True
            if not self._cancels:
                await self._begun.is_stored()
        finally:
            if self._cancels and not has_ended:
                await self._begun.cancel()

    async def whole(self, receive: Receive) -> dict[str, Any]:
        """Returns the response when it has ended. Raises ClientGoneError."""
        return await unless_gone(receive, self._whole())

    async def _whole(self) -> dict[str, Any]:
        reading = self.read(0)
        try:
            async for _ in reading:
                pass
        finally:
            await reading.aclose()
        last = sse.split_events(self._last)[-1]
        response: dict[str, Any] | None = msgspec.json.decode(last.partition(_DATA)[2]).get("response")
        # A response that was cancelled has no last event.
        return response if response is not None else await self._begun.response()


def was_taken_over(request: Request) -> bool:
    """Whether the request runs again after the death of another gateway: no client waits for its answer here."""
    return getattr(request.state, "taken_over", None) is not None
