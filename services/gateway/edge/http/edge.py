"""Middleware around every HTTP request: request id, browsers, API key, metrics, unexpected exceptions. Plain ASGI.

A WebSocket has the same rules about browsers and keys.

The middleware passes messages on without buffering, so it delays neither streamed chunks nor the notice that a client
has disconnected.
"""

import time
from collections.abc import Collection, Iterator, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.services.gateway.edge.access.call import (
    Call,
    Strictness,
    call_of,
    current_call,
    new_id,
    route_path,
    serving,
)
from antiphon.services.gateway.edge.access.quotas import Quotas
from antiphon.services.gateway.edge.access.turns import Turns
from antiphon.services.gateway.edge.http.access_log import AccessLog
from antiphon.services.gateway.edge.http.admission import Admission
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.browsers import BrowserRules
from antiphon.services.gateway.edge.http.errors import ErrorFormats, as_service_error, error_response
from antiphon.services.gateway.edge.http.idempotency import Idempotency
from antiphon.services.gateway.edge.http.in_process import INTERNAL
from antiphon.services.gateway.edge.http.request_body import HeldBody
from antiphon.services.gateway.edge.http.server.web_socket import SOCKET, HeldMessages
from antiphon.services.gateway.edge.http.shared_answers import REPEATED, SharedAnswers
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.shared import limits
from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.api_keys import ANONYMOUS, ApiKey

REQUEST_ID_HEADER = b"x-request-id"
_LENIENT = Strictness()
_ANTHROPIC, _ANTHROPIC_ID_HEADER = "/v1/messages", b"request-id"
"""Path of Anthropic's API, and the header in which its clients look for the request's id."""
_IGNORED_HEADER = b"x-antiphon-ignored"
_NOT_HELD = frozenset({"/v1/files"})
"""Routes whose bodies are written to disk piece by piece."""
_CLIENT_CLOSED_REQUEST = 499
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Edge:
    """Wraps an application. `prefix`: path under which a proxy serves it; requests may have the prefix or not.

    `strict`: what is refused and not only told. `streaming`, `shared`: see Idempotency.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        quotas: Quotas,
        browsers: BrowserRules,
        metrics: GatewayMetrics,
        formats: ErrorFormats,
        prefix: str = "",
        strict: Strictness = _LENIENT,
        streaming: Collection[str] = (),
        shared: SharedAnswers | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self.app, self.access_log = app, access_log or AccessLog(is_on=False)
        self._admission = Admission(app, quotas)
        self._repeatable = Idempotency(self._admission, streaming=streaming, shared=shared)
        self.keys, self.browsers, self.strict = keys, browsers, strict
        self.metrics, self.formats = metrics, formats
        self.turns, self.bodies = Turns(), Shares(limits.BODIES_BYTES_MAX)
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an error, or passes the request to the application."""
        if scope["type"] == "http":
            await _Passage(self, {**scope, "root_path": self._prefix}, send).run(receive)
        elif scope["type"] == "websocket":
            await self._socket({**scope, "root_path": self._prefix}, receive, send)
        else:
            await self.app(scope, receive, send)

    def key_of(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> ApiKey:
        """Returns a request's API key. Raises ServiceError without a key, or if a stranger's page may have sent it."""
        self.browsers.check(method, path, headers)
        return self.keys.check(path, headers) if self.keys.are_needed else ANONYMOUS

    def within(self, key: ApiKey, headers: Mapping[bytes, bytes]) -> ASGIApp:
        """Returns the application, in those of its wrappers that a request needs."""
        if REPEATED in headers:
            return self._repeatable
        return self._admission if key.is_limited else self.app

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a WebSocket on, if a request with its headers would be passed on; otherwise answers with an error.

        Each of its messages that asks for something becomes a request of its own, which passes here too.
        """
        scope.setdefault("state", {}).setdefault("request_id", new_id())
        try:
            key = self.key_of("GET", route_path(scope), dict(scope["headers"]))
        except ServiceError as error:
            self.metrics.count_error(error.code)
            await error_response(error, body=self.formats.body(error, scope))(scope, receive, send)
            return
        scope[SOCKET].held = HeldMessages(self.bodies, key.name)
        await self.app(scope, receive, send)


class _Passage:
    """Handles one HTTP request."""

    def __init__(self, edge: Edge, scope: Scope, send: Send) -> None:
        self._edge = edge
        self._scope = scope
        self._send = send
        self._status = _CLIENT_CLOSED_REQUEST
        self._started = False
        self._call = Call()
        self._path = route_path(scope)
        self._method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._request_id = scope.setdefault("state", {}).setdefault("request_id", new_id())

    async def run(self, receive: Receive) -> None:
        """Answers the request and counts it in the metrics."""
        began = time.perf_counter()
        self._edge.metrics.http_in_progress.inc()
        try:
            await self._guarded(receive)
        finally:
            seconds = time.perf_counter() - began
            self._edge.metrics.http_in_progress.dec()
            self._edge.metrics.count_http(self._handler(), self._method, self._status, seconds)
            self._log(seconds)

    def _log(self, seconds: float) -> None:
        is_internal, path = self._scope["state"].get(INTERNAL), self._scope["path"]
        self._edge.access_log.ended(
            self._method,
            self._path,
            self._status,
            seconds,
            shown=self._scope.get("raw_path", path.encode()).decode("latin-1"),
            call=current_call() if is_internal else self._call,
            request_id=self._request_id,
        )

    async def _guarded(self, receive: Receive) -> None:
        try:
            if self._scope["state"].get(INTERNAL):
                # This is a request of the gateway itself. Its sender has set the call, with the API key for which it
                # runs.
                current_call().strict = self._edge.strict
                await self._edge.app(self._scope, receive, self._forward)
                return
            headers = dict[bytes, bytes](self._scope["headers"])
            key = self._edge.key_of(self._scope["method"], self._path, headers)
            self._call = call_of(key, headers)
            self._call.strict = self._edge.strict
            with serving(self._call):
                await self._in_turn(self._edge.within(key, headers), receive)
        except Exception as error:
            failure = as_service_error(error)
            self._edge.metrics.count_error(failure.code)
            self._call.error_code = failure.code
            if self._started:
                raise
            body = self._edge.formats.body(failure, self._scope)
            await error_response(failure, body=body)(self._scope, receive, self._forward)

    async def _in_turn(self, app: ASGIApp, receive: Receive) -> None:
        """Passes the request to the application. A POST request first waits for the turn of its key."""
        if self._method != "POST":
            await app(self._scope, receive, self._forward)
            return
        self._call.turn = turn = await self._edge.turns.begin(self._call.key.name)
        body = None
        if self._path not in _NOT_HELD:
            body = HeldBody(self._edge.bodies, self._call.key.name, self._scope["headers"], receive)
        try:
            await app(self._scope, receive if body is None else body.receive, self._forward)
        finally:
            turn.end()
            if body is not None:
                body.release()

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._own_headers()]}
        await self._send(message)

    def _own_headers(self) -> Iterator[tuple[bytes, bytes]]:
        request_id = (self._call.client_request_id or self._request_id).encode()
        yield REQUEST_ID_HEADER, request_id
        if self._path.startswith(_ANTHROPIC):
            yield _ANTHROPIC_ID_HEADER, request_id
        if self._call.ignored:
            yield _IGNORED_HEADER, ", ".join(self._call.ignored).encode()[: limits.IGNORED_BYTES_MAX]
        for name, value in self._call.response_headers.items():
            yield name.encode(), value.encode()

    def _handler(self) -> str:
        # The route's pattern, not the path: clients must not be able to create new label values.
        return getattr(self._scope.get("route"), "path", "none")
