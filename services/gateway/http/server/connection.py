"""One HTTP connection, whose request line and headers are bounded in size and time.

uvicorn limits neither: endless headers would fill the memory, and a client that sends nothing, or a byte now and then,
would keep its connection open for ever.
"""

import asyncio
import logging
import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.http.errors import error_body
from shared import limits
from shared.errors import ServiceError
from shared.receiving import ReceivesIntoOneBuffer

log = logging.getLogger(__name__)
CLOSE = "antiphon.close"
"""Key of the scope for a function that closes the connection of the request after what has been written."""
CHUNKS = "antiphon.chunks"
"""Key of the scope for the `ResponseChunks` of the request."""
_TOO_LARGE = f"The request line and headers may have {limits.HEADER_BYTES_MAX} bytes."
_TOO_LATE = f"The headers did not arrive within {limits.HEADER_READ_S:g} s."


class _HeaderTooLarge(Exception):
    """Raised in a callback to stop the parser, which converts it to its own exception."""


class ResponseChunks:
    """Implements `sse.ChunkWriter` for one response of uvicorn.

    Parts of a stream that are written here pass neither uvicorn's `send` nor that of any middleware. So a middleware
    that changes or buffers the body of a response must remove CHUNKS from the scope. No middleware of the gateway
    changes or buffers the body of a stream.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # the scope that has this object belongs to it

    @property
    def is_writable(self) -> bool:
        """See ChunkWriter."""
        cycle = self._cycle()
        if cycle is None or not cycle.response_started or cycle.response_complete or cycle.disconnected:
            return False
        return cycle.chunked_encoding is True and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """See ChunkWriter."""
        cycle = self._cycle()
        assert cycle is not None
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedConnection(HttpToolsProtocol, ReceivesIntoOneBuffer):
    """uvicorn's protocol class with limits on the headers. uvicorn creates one object for each connection.

    The parser copies what it keeps of the received bytes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_header = True
        self._header_bytes = 0
        self._is_too_large = False
        self._is_last = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol. The time limit of the first request begins."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes | memoryview) -> None:
        """See ReceivesIntoOneBuffer. All bytes of an incomplete header count towards the limit."""
        if self._in_header:
            self._header_bytes += len(data)
            if self._timer is None:
                self._start_timer()
        super().data_received(data)  # type: ignore[arg-type]
        if self._in_header and self._header_bytes > limits.HEADER_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, "Request Header Fields Too Large", _TOO_LARGE)

    def on_message_begin(self) -> None:
        """See the parser: a request begins."""
        super().on_message_begin()
        self.scope[CLOSE] = self.transport.close  # type: ignore[typeddict-unknown-key]
        self._url_and_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """See the parser."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See the parser."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See the parser."""
        self._in_header = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # else an upgrade was asked for and refused
            self.scope[CHUNKS] = ResponseChunks(self.cycle)  # type: ignore[typeddict-unknown-key]
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """See the parser: the next bytes belong to another request."""
        super().on_message_complete()
        self._in_header, self._header_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """Called by `data_received` of uvicorn if the parser fails."""
        if self._is_too_large:
            self._refuse(431, "Request Header Fields Too Large", _TOO_LARGE)
        else:
            self._refuse(400, "Bad Request", msg)

    def shutdown(self) -> None:
        """Called once by uvicorn when the server ends: closes an idle connection, and a busy one after its response.

        A new connection, or one with a part of a request, gets `FIRST_REQUEST_S` for the rest, and then its response:
        closing it would lose a request that its client has already sent.
        """
        is_partial = self._in_header and self._header_bytes > 0
        if self.cycle is None or (self.cycle.response_complete and is_partial):
            self._is_last = True
            self._stop_timer()
            self._timer = self.loop.call_later(limits.FIRST_REQUEST_S, self.transport.close)
        else:
            super().shutdown()

    def _count(self, size: int) -> None:
        self._url_and_header_bytes += size
        if self._url_and_header_bytes > limits.HEADER_BYTES_MAX:
            self._is_too_large = True
            raise _HeaderTooLarge

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(limits.HEADER_READ_S, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "Request Timeout", _TOO_LATE)

    def _refuse(self, status: int, reason: str, message: str) -> None:
        body = error_body(ServiceError("invalid_value", message))
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
