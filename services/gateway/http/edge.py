"""Middleware around every HTTP request: request id, API key, metrics, unexpected exceptions. Plain ASGI.

The middleware passes messages on without buffering, so it delays neither streamed chunks nor the notice that a client
has disconnected.
"""

import time
from collections.abc import Collection, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.call import Call, call_of, serving
from services.gateway.access.turns import Turns
from services.gateway.http.auth import ApiKeys
from services.gateway.http.errors import ErrorFormats, as_service_error, error_response, route_path
from services.gateway.http.idempotency import Idempotency
from services.gateway.http.in_process import INTERNAL
from services.gateway.http.request_id import new_id
from services.gateway.metrics import GatewayMetrics

REQUEST_ID_HEADER = b"x-request-id"
_POLICY_VIOLATION = 1008
_CLIENT_CLOSED_REQUEST = 499
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Edge:
    """Wraps an application. `prefix`: path under which a proxy serves it; requests may have the prefix or not.

    `streaming`: see Idempotency.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        formats: ErrorFormats,
        prefix: str = "",
        streaming: Collection[str] = (),
    ) -> None:
        self.app = app
        self._repeatable = Idempotency(app, streaming=streaming)
        self._keys = keys
        self._metrics = metrics
        self._formats = formats
        self._prefix = prefix
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an error, or passes the request to the application."""
        if scope["type"] == "http":
            scope = {**scope, "root_path": self._prefix}
            passage = _Passage(self._repeatable, self._keys, self._metrics, self._formats, self._turns, scope, send)
            await passage.run(receive)
        elif scope["type"] == "websocket":
            # There are no WebSocket routes, and a connection must not bypass the API keys.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await self.app(scope, receive, send)


class _Passage:
    """Handles one HTTP request."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        formats: ErrorFormats,
        turns: Turns,
        scope: Scope,
        send: Send,
    ) -> None:
        self._app = app
        self._turns = turns
        self._keys = keys
        self._metrics = metrics
        self._formats = formats
        self._scope = scope
        self._send = send
        self._status = _CLIENT_CLOSED_REQUEST
        self._started = False
        self._call = Call()
        self._request_id = scope.setdefault("state", {}).setdefault("request_id", new_id())

    async def run(self, receive: Receive) -> None:
        """Answers the request and counts it in the metrics."""
        began = time.perf_counter()
        self._metrics.http_in_progress.inc()
        try:
            await self._guarded(receive)
        finally:
            self._metrics.http_in_progress.dec()
            self._metrics.count_http(self._handler(), self._method(), self._status, time.perf_counter() - began)

    async def _guarded(self, receive: Receive) -> None:
        try:
            if self._scope["state"].get(INTERNAL):
                # This is a request of the gateway itself. Its sender has set the call, with the API key for which it
                # runs.
                await self._app(self._scope, receive, self._forward)
                return
            key = self._keys.check(route_path(self._scope), self._scope["headers"])
            self._call = call_of(key, dict(self._scope["headers"]))
            with serving(self._call):
                await self._in_turn(receive)
        except Exception as error:
            failure = as_service_error(error)
            self._metrics.count_error(failure.code)
            if self._started:
                raise
            body = self._formats.body(failure, self._scope)
            await error_response(failure, body=body)(self._scope, receive, self._forward)

    async def _in_turn(self, receive: Receive) -> None:
        """Passes the request to the application. A POST request first waits for the turn of its key."""
        if self._method() != "POST":
            await self._app(self._scope, receive, self._forward)
            return
        self._call.turn = turn = await self._turns.begin(self._call.key.name)
        try:
            await self._app(self._scope, receive, self._forward)
        finally:
            turn.end()

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._own_headers()]}
        await self._send(message)

    def _own_headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield REQUEST_ID_HEADER, (self._call.client_request_id or self._request_id).encode()
        for name, value in self._call.response_headers.items():
            yield name.encode(), value.encode()

    def _handler(self) -> str:
        # The route's pattern, not the path: clients must not be able to create new label values.
        return getattr(self._scope.get("route"), "path", "none")

    def _method(self) -> str:
        return self._scope["method"] if self._scope["method"] in _METHODS else "OTHER"
