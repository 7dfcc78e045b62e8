"""Passes one message of a WebSocket through the application as an HTTP request, and sends its answer as messages."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Message, Scope

from antiphon.services.gateway.edge.access.call import new_id
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.server.web_socket import FROM_SOCKET
from antiphon.services.gateway.guests.responses.socket.memory import SocketTurn
from antiphon.services.gateway.guests.responses.socket.messages import error_event, failure_event
from antiphon.shared.errors import ServiceError

_NOT_PASSED_ON = frozenset(
    {
        b"connection",
        b"upgrade",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
        b"expect",
        b"last-event-id",
    }
)
"""Headers of the handshake that say nothing about the requests of its connection, besides those of WebSockets."""
_NAME = b"event: "
_SUCCEEDED = (b"response.completed", b"response.incomplete")
_ENDED = (*_SUCCEEDED, b"response.failed", b"error")
_TOLD = ("retry-after", "x-ratelimit-", "x-request-id", "x-antiphon-ignored")
"""Beginnings of the names of headers that an error event repeats."""


class TurnExchange:
    """The ASGI `receive` and `send` of one request.

    `send_text` sends one message; it does nothing if the client is gone, which sets `gone`.
    """

    def __init__(self, send_text: Callable[[bytes], Awaitable[None]], gone: asyncio.Event) -> None:
        self._send_text, self._gone = send_text, gone
        self._status = 500
        self._headers: dict[str, str] = {}
        self._is_stream = False
        self._body = bytearray()
        self._last = b""
        """Name of the last event."""
        self._request: bytes | None = None

    def scope(self, handshake: Scope, body: bytes, turn: SocketTurn) -> Scope:
        """Returns the scope of the request. `handshake`: the scope of the connection."""
        self._request = body
        kept = [
            (name, value)
            for name, value in handshake["headers"]
            if name not in _NOT_PASSED_ON and not name.startswith(b"sec-websocket-")
        ]
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https" if handshake["scheme"] == "wss" else "http",
            "path": handshake["path"],
            "raw_path": handshake["raw_path"],
            "root_path": "",
            "query_string": b"",
            "headers": [*kept, *own],
            "client": handshake["client"],
            "server": handshake["server"],
            "state": {"request_id": new_id(), FROM_SOCKET: turn},
        }

    async def receive(self) -> Message:
        """Returns the body, then waits until the client is gone."""
        if self._request is not None:
            data, self._request = self._request, None
            return {"type": "http.request", "body": data, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Sends the events of a stream. The body of another answer is an error, which `failure` returns."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._is_stream = self._headers.get("content-type", "").encode() == sse.CONTENT_TYPE
        elif not self._is_stream:
            self._body += message.get("body", b"")
        else:
            for text in self._texts(message.get("body", b"")):
                await self._send_text(text)

    @property
    def has_succeeded(self) -> bool:
        """Whether the response is complete, or cut off at its longest length."""
        return self._last in _SUCCEEDED

    def failure(self) -> bytes | None:
        """Returns the event that tells why there is no response; None if the last event has told how it has ended."""
        if self._last in _ENDED:
            return None
        if self._is_stream or self._status < 400:
            return error_event(ServiceError("internal_error", "The response ended without its last event."))
        told = {name: value for name, value in self._headers.items() if name.startswith(_TOLD)}
        return failure_event(self._status, msgspec.json.decode(self._body)["error"], told)

    def _texts(self, data: bytes) -> list[bytes]:
        """Returns the data of events; comments have none."""
        texts: list[bytes] = []
        for event in sse.split_events(data):
            head, found, text = event.partition(sse.DATA)
            if found and head.startswith(_NAME):
                self._last = head[len(_NAME) : -1]
                texts.append(text[: -len(sse.END)])
        return texts


def as_text_message(text: bytes) -> dict[str, Any]:
    """Returns the ASGI message that sends a text."""
    return {"type": "websocket.send", "text": text.decode()}
