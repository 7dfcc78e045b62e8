"""Server-sent events: framing, and a channel that writes events to a client, sends keep-alives and detects stalls.

A channel does not interpret the events. It sends nothing before the first write, so that a request that fails early can
still be answered with an HTTP error status. After a long silence it sends a comment, even before the first event.
"""

import asyncio
import math
import time
from typing import NoReturn

from starlette.types import Message, Send

from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, LaterGuard
from antiphon.shared import limits

DATA = b"data: "
END = b"\n\n"
_END_LENGTH = len(END)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
NOT_READING = "client_stopped_reading"
"""The cause of a ClientGoneError if the client accepts no data."""
CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """Returns one event. `data` must have no line breaks."""
    return DATA + data + END


def named_event(name: bytes, data: bytes) -> bytes:
    """Returns one event with a name. `name` and `data` must have no line breaks."""
    return b"event: " + name + b"\n" + DATA + data + END


def split_events(data: bytes) -> list[bytes]:
    """Returns the events of which `data` consists, each with its end."""
    return [one + END for one in data.split(END)[:-1]]


def is_one_event(data: bytes) -> bool:
    """Whether `data` is one event with its end.

    On the token path. An event without a name has its first line break at its end, and the search for one byte is
    several times as fast as that for two.
    """
    end = len(data) - _END_LENGTH
    return data.find(b"\n") == end or data.find(END) == end


async def _drop(message: Message) -> None:
    """Implements Send without a client."""


class EventChannel:
    """A stream of events, or of another content type, to one client."""

    def __init__(
        self,
        send: Send,
        *,
        keep_alive_s: float,
        stall_s: float = limits.CLIENT_STALL_S,
        content_type: bytes = CONTENT_TYPE,
    ) -> None:
        """`keep_alive_s`: silence after which a comment is sent; 0: never. `stall_s`: longest time for a write.

        Only event streams have comments; a stream of another content type must have `keep_alive_s` 0.
        """
        self.started = False
        self.ended = False
        """Whether the last events have been written."""
        self._send = send
        self._headers = [(b"content-type", content_type), *HEADERS]
        self._keep_alive_s = keep_alive_s if keep_alive_s > 0 else math.inf
        self._stall_s = stall_s
        self._written_s = time.monotonic()
        self._writing = 0

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends events, the last ones without `more`. Returns when the server's write buffer has room for more."""
        self._written_s = time.monotonic()
        self._writing += 1
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing -= 1

    async def end(self, data: bytes) -> None:
        """Sends the last events and closes the stream."""
        await self.write(data, more=False)
        self.ended = True

    def detach(self) -> None:
        """Drops everything that is written from now on. Called when the client is gone and the work continues."""
        self._send = _drop

    def guard(self) -> LaterGuard:
        """Returns `mind` for `unless_gone`. It has nothing to do before the shorter of its two times is over."""
        return LaterGuard(min(self._keep_alive_s, self._stall_s), self.mind)

    async def mind(self) -> NoReturn:
        """Sends a comment after each `keep_alive_s` of silence, without end.

        Raises ClientGoneError if the client has accepted no data for `stall_s`.
        """
        while True:
            await asyncio.sleep(min(self._due() - time.monotonic(), self._stall_s))
            if time.monotonic() < self._due():
                continue
            if self._writing:
                raise ClientGoneError(NOT_READING)
            await self._comment()

    async def _comment(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.write(KEEP_ALIVE)
        except TimeoutError:
            raise ClientGoneError(NOT_READING) from None

    def _due(self) -> float:
        return self._written_s + (self._stall_s if self._writing else self._keep_alive_s)
