"""One HTTP connection, whose request line and headers are bounded in size and time, and which ends when it must.

uvicorn limits neither: endless headers would fill the memory, and a client that sends nothing, or a byte now and then,
would keep its connection open for ever. Nor does it end a connection whose request was answered before it was complete,
such as one without an API key: the rest of the request could keep it open.
"""

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from antiphon.services.gateway.edge.http.errors import error_body
from antiphon.services.gateway.edge.http.server.places import Place
from antiphon.services.gateway.edge.http.server.web_socket import PATHS
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.observability.rare_logs import RareLog
from antiphon.shared.receiving import ReceivesIntoOneBuffer

_rare_log = RareLog(logging.getLogger(__name__))
CLOSE = "antiphon.close"
"""Key of the scope for a function that closes the connection of the request after what has been written."""
_TOO_LARGE = f"The request line and headers may have {limits.HEADER_BYTES_MAX} bytes."
_TOO_LATE = f"The headers did not arrive within {limits.HEADER_READ_S:g} s."
_INVALID = "Invalid HTTP request received."
_NO_TUNNEL = "This server is no proxy: it makes no tunnels (CONNECT)."
_FULL = "All connections that this server may have are in use. Try again."


class _HeaderTooLarge(Exception):
    """Raised in a callback to stop the parser, which converts it to its own exception."""


class _EndOfEarlyAnswer(asyncio.Transport):
    """What uvicorn writes a response to while its request is incomplete: closing it ends the connection gently."""

    def __init__(self, connection: "BoundedConnection") -> None:
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.WriteTransport."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self._connection.end()


class BoundedConnection(HttpToolsProtocol, ReceivesIntoOneBuffer):
    """uvicorn's protocol class with limits. The server creates one object for each connection, which has a place.

    The parser copies what it keeps of the received bytes.
    """

    def __init__(self, *args: Any, place: Place, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place = place
        self._in_header = True
        self._header_bytes = 0
        self._url_and_header_bytes = 0
        self._is_too_large = False
        self._asks_for_upgrade = False
        self._keeps_alive = True
        self._is_last = False
        self._is_ending = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol. The time limit of the first request begins."""
        super().connection_made(transport)
        self._place.close = transport.abort
        self._start_timer()
        if self._place.is_extra:
            _rare_log.warning("full", "a connection was refused: all others have requests that are being answered")
            self._refuse(503, "Service Unavailable", ServiceError("server_is_overloaded", _FULL))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        self._place.leave()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.transport = self.transport  # else the cycle, and with it the body, would hold itself in memory

    def data_received(self, data: bytes | memoryview) -> None:
        """See ReceivesIntoOneBuffer. All bytes of an incomplete header count towards the limit."""
        if self._is_ending:
            return
        if self._in_header:
            self._header_bytes += len(data)
            if self._timer is None:
                self._start_timer()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._parse(data)
        if self.transport.get_protocol() is not self:
            return  # it is a WebSocket now
        if self._in_header and self._header_bytes > limits.HEADER_BYTES_MAX:
            self._refuse(431, "Request Header Fields Too Large", ServiceError("invalid_value", _TOO_LARGE))

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
        """See the parser. Until the request is complete, its response would be the last one of the connection."""
        self._asks_for_upgrade = self.parser.should_upgrade()  # CONNECT does, too
        if self._asks_for_upgrade:
            return
        self._in_header = False
        self._stop_timer()
        super().on_headers_complete()
        self._keeps_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False
        self.cycle.transport = _EndOfEarlyAnswer(self)
        if not self.pipeline:
            self._place.reading()

    def on_message_complete(self) -> None:
        """See the parser: the next bytes belong to another request."""
        if self._asks_for_upgrade:
            return
        super().on_message_complete()
        self._in_header, self._header_bytes = True, 0
        self._place.busy()
        self.cycle.transport = self.transport
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive and not self._is_last

    def on_response_complete(self) -> None:
        """Called by uvicorn after a response; the next one may begin."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._place.idle()
        elif self.cycle.more_body and not self.pipeline:
            self._place.reading()

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser cannot read."""
        _rare_log.warning("invalid", "an invalid HTTP request was refused")
        if self._is_too_large:
            self._refuse(431, "Request Header Fields Too Large", ServiceError("invalid_value", _TOO_LARGE))
        else:
            self._refuse(400, "Bad Request", ServiceError("invalid_value", msg))

    def end(self) -> None:
        """Ends the connection after what has been written, but not at once: what the client sends meanwhile is dropped.

        If a client still sends on a closed connection, its system may drop the response before the client reads it.
        """
        if self._is_ending:
            return
        self._is_ending = True
        self._stop_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._place.idle()
        self._timer = self.loop.call_later(limits.LINGER_S, self.transport.abort)

    def shutdown(self) -> None:
        """Called once by uvicorn when the server ends: closes an idle connection, and a busy one after its response.

        A new connection, or one with a part of a request, gets `FIRST_REQUEST_S` for the rest, and then its response:
        closing it would lose a request that its client has already sent.
        """
        if self._is_ending:
            return
        self._is_last = True
        is_partial = self._in_header and self._header_bytes > 0
        if self.cycle is None or (self.cycle.response_complete and is_partial):
            self._stop_timer()
            self._timer = self.loop.call_later(limits.FIRST_REQUEST_S, self.transport.close)
        else:
            super().shutdown()

    def _parse(self, data: bytes | memoryview) -> None:
        # Not a recursion: one read may hold thousands of requests, each of which asks for another protocol.
        parts = [data]
        while parts:
            part = parts.pop()
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                rest = part[upgrade.args[0] :]
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(400, "Bad Request", ServiceError("invalid_value", _NO_TUNNEL))
                    return
                if self._asks_for_socket():
                    self._become_socket(rest)
                    return
                parts += [rest, self._without_upgrade()]
            except httptools.HttpParserError:
                self.send_400_response(_INVALID)
                return

    def _without_upgrade(self) -> bytes:
        """Returns the head of the request without its wish for another protocol, which a server may ignore (RFC 9110).

        A new parser reads it: this one would take the body for bytes of the other protocol.
        """
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return head + fields + b"\r\n"

    def _asks_for_socket(self) -> bool:
        """Whether the request asks for a WebSocket, and there is one at its path."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        return self.parser.get_method() == b"GET" and path.endswith(PATHS) and self._should_upgrade()

    def _become_socket(self, rest: bytes | memoryview) -> None:
        """Gives the connection and its place to a WebSocket. `rest`: what the client has sent after its request."""
        self._stop_timer()
        self.connections.discard(self)
        # Telling that there is no body is no reason to refuse the handshake.
        kept = [field for field in self.headers if field != (b"content-length", b"0")]
        head = b"".join(b"%b: %b\r\n" % field for field in kept)
        socket_class: Any = self.ws_protocol_class
        socket = socket_class(
            config=self.config, server_state=self.server_state, app_state=self.app_state, place=self._place
        )
        socket.connection_made(self.transport)
        self.transport.set_protocol(socket)
        socket.data_received(b"GET %b HTTP/1.1\r\n%b\r\n" % (self.url, head))
        if rest:
            socket.data_received(rest)

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
        self._refuse(408, "Request Timeout", ServiceError("invalid_value", _TOO_LATE))

    def _refuse(self, status: int, reason: str, error: ServiceError) -> None:
        if self._is_ending or self.transport.is_closing():
            return
        body = error_body(error)
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        if self.cycle is None or self.cycle.response_complete:
            self.end()
        else:
            self.transport.close()  # another response is being written
