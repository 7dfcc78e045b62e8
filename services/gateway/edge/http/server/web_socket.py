"""One WebSocket: a connection that a request has turned into one. Bounded like any other connection.

uvicorn's class bounds the size of a message, but not how many of them wait, of how many pieces one consists, or how
much memory those of all connections take together; and it closes a connection in the midst of an answer when the server
ends. The application that serves the connection finds the object of this class in its scope (`SOCKET`).
"""

import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import OPEN

from antiphon.services.gateway.edge.http.errors import error_body
from antiphon.services.gateway.edge.http.server.places import Place
from antiphon.shared import limits
from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.errors import ServiceError
from antiphon.shared.receiving import ReceivesIntoOneBuffer

SOCKET = "antiphon.socket"
"""Key of the scope for the `BoundedWebSocket`."""
FROM_SOCKET = "from_socket"
"""Key in the state of a request's scope, for requests that are messages of a WebSocket."""
PATHS = ("/v1/responses",)
"""Paths that clients may reach with a WebSocket."""
TRY_AGAIN_LATER, SERVICE_RESTART, POLICY_VIOLATION, MESSAGE_TOO_BIG = 1013, 1012, 1008, 1009
"""Codes with which a WebSocket is closed (RFC 6455)."""
_log = logging.getLogger(__name__)
_log.setLevel(logging.WARNING)  # uvicorn's class tells each connection, as its access log does


class HeldMessages:
    """The bytes of one WebSocket's messages, which count towards the part of its key until their answers begin."""

    def __init__(self, shares: Shares, key: str) -> None:
        self._shares, self._key = shares, key
        self._arriving = self._waiting = 0
        self._has_ended = False

    def arriving(self, num_bytes: int) -> bool:
        """So many bytes of the next message have arrived. Returns whether there is room for them."""
        more, self._arriving = num_bytes - self._arriving, num_bytes
        if self._has_ended or (more > 0 and not self._shares.take(self._key, more)):
            self._arriving -= more
            return False
        if more < 0:
            self._shares.give_back(self._key, -more)
        return True

    def waits(self, num_bytes: int) -> bool:
        """A message of this size waits from now on. Returns whether there is room for it; if not, it does not wait."""
        if self._has_ended or (num_bytes and not self._shares.take(self._key, num_bytes)):
            return False
        self._waiting += num_bytes
        return True

    def begins(self, num_bytes: int) -> None:
        """A message of this size waits no more: what answers it counts its bytes."""
        if num_bytes and not self._has_ended:
            self._waiting -= num_bytes
            self._shares.give_back(self._key, num_bytes)

    def release(self) -> None:
        """Stops counting. Called when the connection has ended."""
        self._has_ended = True
        if held := self._arriving + self._waiting:
            self._shares.give_back(self._key, held)
        self._arriving = self._waiting = 0


def _nothing() -> None:
    pass


class BoundedWebSocket(WebSocketsSansIOProtocol, ReceivesIntoOneBuffer):
    """uvicorn's protocol class with limits. It takes over the place of the connection that it was made from.

    `leave` is called once when the server ends, instead of closing a connection whose request is being answered: the
    application, which sets it, then closes the connection.
    """

    def __init__(self, *args: Any, place: Place, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self.held: HeldMessages | None = None
        self.leave: Callable[[], None] = _nothing
        self._place = place
        self._num_partial = 0
        """Bytes of the pieces of a message that is incomplete."""
        self._handshake_timer = self.loop.call_later(limits.HEADER_READ_S, self._late)

    def idle(self) -> None:
        """No message is being answered: the connection may be closed to make room for another one."""
        self._place.idle()

    def busy(self) -> None:
        """A message is being answered."""
        self._place.busy()

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._place.close = transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._handshake_timer.cancel()
        self._place.leave()
        super().connection_lost(exc)
        if self.handshake_initiated and self.response.status_code == 101:
            self.scope.pop(SOCKET, None)  # type: ignore[typeddict-item]  # else the object would hold itself in memory
        if self.held is not None:
            self.held.release()

    def data_received(self, data: bytes | memoryview) -> None:  # type: ignore[override]
        """See ReceivesIntoOneBuffer. The bytes of an incomplete message count towards the room for messages."""
        if self.transport.is_closing():
            return
        super().data_received(data)  # type: ignore[arg-type]
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake()
        elif self.held is not None and not self.held.arriving(len(self.conn.reader.buffer) + self._num_partial):
            self._fail(TRY_AGAIN_LATER, "The server holds too many large messages.")

    def handle_connect(self, event: Request) -> None:
        """See uvicorn's class: the client's request is complete."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope[SOCKET] = self  # type: ignore[typeddict-unknown-key]

    def handle_cont(self, event: Frame) -> None:
        """See uvicorn's class: a further piece of a message."""
        if len(self.frames) >= limits.SOCKET_PIECES_MAX:
            self._fail(MESSAGE_TOO_BIG, f"A message may have {limits.SOCKET_PIECES_MAX} pieces.")
            return
        super().handle_cont(event)
        self._num_partial = sum(map(len, self.frames)) if event.fin else self._num_partial + len(event.data)

    def handle_text(self, event: Frame) -> None:
        """See uvicorn's class: the first piece of a message."""
        self._num_partial = 0 if event.fin else len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """See uvicorn's class: the first piece of a message that is no text."""
        self._num_partial = 0 if event.fin else len(event.data)
        super().handle_bytes(event)

    def handle_ping(self) -> None:
        """See uvicorn's class: answers a ping. A client that pings and does not read gets no further answers."""
        pongs = self.conn.data_to_send()
        if self.transport.get_write_buffer_size() <= limits.SOCKET_PONG_BYTES_MAX:
            self.transport.write(b"".join(pongs))

    def send_receive_event_to_app(self) -> None:
        """See uvicorn's class: a message is complete."""
        # The application reads all the time, so this many wait only of those that have arrived in one piece.
        if self.queue.qsize() >= limits.SOCKET_ARRIVALS_MAX:
            self._fail(POLICY_VIOLATION, "Too many messages at once.")
            return
        super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        """See ASGI. After an error response to the handshake, nothing is missing."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True

    def start_keepalive(self) -> None:
        """Called by uvicorn when the application has accepted the connection."""
        self._handshake_timer.cancel()
        super().start_keepalive()

    def shutdown(self) -> None:
        """Called once by uvicorn when the server ends."""
        if self.handshake_complete and not self.close_sent and self.leave is not _nothing:
            self.leave()
        else:
            super().shutdown()

    def _late(self) -> None:
        self.transport.abort()

    def _refuse_handshake(self) -> None:
        """Answers a request that looked like a handshake and is none, for example because a line is too long."""
        self.handshake_complete = self.close_sent = True
        body = error_body(ServiceError("invalid_value", "Invalid WebSocket handshake."))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _fail(self, code: int, reason: str) -> None:
        """Closes the connection because of what its client sends."""
        self.frames = []
        self._num_partial = 0
        if self.close_sent or self.conn.state is not OPEN:
            self.transport.close()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()
