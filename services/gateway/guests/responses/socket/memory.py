"""The responses that connections have made last, which they can continue although they are not stored.

All connections of a gateway share one room, so that their responses together are bounded.
"""

from typing import NamedTuple

from starlette.requests import Request

from antiphon.services.gateway.edge.http.server.web_socket import FROM_SOCKET
from antiphon.services.gateway.guests.responses.stored.records import MemoryRecords
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore, StoredResponse
from antiphon.shared import limits


def socket_responses() -> ResponseStore:
    """Returns the room of one gateway."""
    return ResponseStore(MemoryRecords(max_bytes=limits.SOCKET_RESPONSES_BYTES_MAX, ttl_s=limits.SOCKET_AGE_S))


class ConnectionResponses:
    """The last responses of one connection. No other connection finds them. `store`: see `socket_responses`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._ids: list[str] = []

    async def get(self, response_id: str) -> StoredResponse | None:
        """Returns a response; None if the connection has not made it, or it is not kept any more."""
        found = await self._store.get(response_id) if response_id in self._ids else None
        return None if found is None else await self._store.with_images(found)

    async def keep(self, record: StoredResponse) -> None:
        """Keeps a response in place of the oldest one."""
        await self._store.put(record)
        self._ids.append(record.id)
        while len(self._ids) > limits.SOCKET_RESPONSES_MAX:
            await self._store.delete(self._ids.pop(0))

    async def forget(self, response_id: str) -> None:
        """Drops a response, if it is kept."""
        if response_id in self._ids:
            self._ids.remove(response_id)
            await self._store.delete(response_id)

    async def forget_all(self) -> None:
        """Drops all responses. Called when the connection has ended."""
        while self._ids:
            await self._store.delete(self._ids.pop())


class SocketTurn(NamedTuple):
    """What a request that is a message of a connection has besides its body.

    `generates`: whether the response is generated, and not only prepared (`warm_up`).
    """

    responses: ConnectionResponses
    generates: bool


def turn_of(request: Request) -> SocketTurn | None:
    """Returns what a request has of its connection; None if it is not a message of a WebSocket."""
    return request.scope["state"].get(FROM_SOCKET)
