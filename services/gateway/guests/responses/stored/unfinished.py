"""Background responses that have not ended, as the endpoints see them.

A response runs in this gateway alone (`background.BackgroundResponse`), or it is recorded, so that any gateway can show
and continue it. The latter is another guest's work, which sets `ResponseEndpoints.recorded`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from starlette.requests import Request

from services.gateway.apis.openai.request_context import RequestContext
from services.gateway.guests.responses.encoder import ResponseEncoder
from services.gateway.guests.responses.input_items import Item
from services.gateway.guests.responses.stored.store import StoredResponse

Kept = Callable[[dict[str, Any], list[bytes]], Awaitable[StoredResponse]]
"""Returns the stored form of a response that has ended, from its last state and its events. Raises LogUnavailableError.
"""


class Unfinished(Protocol):
    """One response. Methods raise ServiceError, 'bus_unavailable' or 'not_found'."""

    @property
    def key_name(self) -> str:
        """Name of the API key that created it."""
        ...

    def read(self, first: int) -> AsyncIterator[bytes]:
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


class Recorded(Protocol):
    """The recorded background responses of one gateway."""

    def num_running(self) -> int:
        """Returns the number of those that run in this gateway."""
        ...

    async def find(self, request_id: str) -> Unfinished | None:
        """Returns a response that has not ended, whichever gateway runs it."""
        ...

    async def start(
        self, request: Request, context: RequestContext, encoder: ResponseEncoder, kept: Kept
    ) -> Unfinished | None:
        """Runs a response that begins, or one that this gateway has taken over. None if it is not recorded."""
        ...
