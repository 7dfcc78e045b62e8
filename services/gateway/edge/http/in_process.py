"""Sends requests to this gateway's own application without a connection, for example the requests of a batch.

Such a request passes the same code as one over HTTP, so it has the same checks, errors and metrics. It has no API key
header: the sender sets the key for which it runs (`access.call.serving`). A request over HTTP cannot pretend to be one.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from antiphon.services.gateway.edge.access.call import new_id

INTERNAL = "internal"
"""Key in the scope's `state` that marks a request as the gateway's own."""


class InProcessResponse(NamedTuple):
    """The response to a request. `retry_after_s`: the time after which to try again, 0 if it gives none."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float


class InProcessClient:
    """Sends requests to one application. `application` returns it; it may be built after this object."""

    def __init__(self, application: Callable[[], ASGIApp]) -> None:
        self._application = application

    async def post(self, path: str, body: bytes) -> InProcessResponse:
        """Sends a JSON body and returns the whole response. If the task is cancelled, so is the request."""
        request_id = new_id()
        exchange = _Exchange(body)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "state": {"request_id": request_id, INTERNAL: True},
        }
        await self._application()(scope, exchange.receive, exchange.send)
        retry_after = exchange.headers.get(b"retry-after-ms", b"0")
        return InProcessResponse(exchange.status, request_id, bytes(exchange.body), int(retry_after) / 1000)


class _Exchange:
    """The ASGI `receive` and `send` of one request."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self._request: bytes | None = body

    async def receive(self) -> Message:
        if self._request is None:
            # The sender does not disconnect; it cancels its task.
            await asyncio.Event().wait()
        data, self._request = self._request, None
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
        else:
            self.body += message.get("body", b"")
