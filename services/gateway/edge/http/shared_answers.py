"""What gateways share of requests with an `Idempotency-Key`: who runs one, and its answer. Offered by a guest.

A gateway that gets such a request first writes that it runs it. Another one that gets the repetition waits for the
answer while the first one lives; otherwise it takes the request over, by resuming its record if it has one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.services.gateway.edge.access.call import current_call, new_id
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
REPEATED = b"idempotency-key"
REPLAYED = (b"idempotency-replayed", b"true")
REPEATABLE = "repeatable"
"""In the state of a request: its stream must be recorded, so that it can be repeated."""
_LOOK_S = 0.1
"""Interval in which a gateway looks whether another one has answered, seconds."""
_BEGIN_S = 5.0
"""Age up to which the record of a stream may be missing because its request is still prepared, seconds."""
_STREAMED = (b"text/event-stream", b"application/x-ndjson")
"""Content types of streams. A stream that fails after its beginning has the status of success."""
_GONE = (404, 410)
"""Statuses of a request to resume what is not recorded (any more)."""


class Answer(msgspec.Struct, array_like=True):
    """A complete response. `is_repetition`: it was made for an earlier request."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    is_repetition: bool = False

    def add(self, message: MutableMapping[str, Any]) -> None:
        """Adds a message of the application."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    @property
    def is_repeatable(self) -> bool:
        """Whether the response may be repeated: it is successful and not a stream, which may have failed midway."""
        return 200 <= self.status < 300 and not header(self.headers, b"content-type").startswith(_STREAMED)

    async def send(self, send: Send, *more: tuple[bytes, bytes]) -> None:
        """Sends the response, with further headers."""
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, *more]})
        await send({"type": "http.response.body", "body": self.body})


class SharedRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request with an idempotency key. `owner`: id and instance id of the gateway that runs it, or has run it.

    `at`: when it began or was answered, Unix seconds.
    """

    fingerprint: bytes
    request_id: str
    owner: tuple[str, str]
    at: float
    answer: Answer | None = None


class SharedAnswers:
    """The requests of all gateways. Methods that wait raise LogUnavailableError."""

    own: tuple[str, str]

    async def find(self, name: str) -> tuple[SharedRequest | None, int]:
        """Returns a request and its revision; None if there is none."""
        raise NotImplementedError

    async def write(self, client: str, name: str, request: SharedRequest, revision: int) -> int | None:
        """Writes a request if it still has this revision. Returns the new one; None if another gateway has written."""
        raise NotImplementedError

    async def drop(self, name: str, revision: int) -> None:
        """Removes a request if it still has this revision."""
        raise NotImplementedError

    def runs_elsewhere(self, request: SharedRequest) -> bool:
        """Whether the gateway that runs a request is another one, which lives."""
        raise NotImplementedError

    def can_resume(self, path: str) -> bool:
        """Whether streams of a route are recorded, so that they can be repeated."""
        raise NotImplementedError


class Asked(NamedTuple):
    """A request with an idempotency key. `name`: identifies the key among those of all clients and routes."""

    client: str
    name: str
    fingerprint: bytes
    scope: Scope
    body: bytes

    @property
    def request_id(self) -> str:
        """The id that the request has if it is the first one."""
        return self.scope["state"]["request_id"]

    def scope_of(self, request_id: str, *headers: tuple[bytes, bytes]) -> Scope:
        """Returns the scope of a run, with further headers."""
        state = {**self.scope["state"], "request_id": request_id, REPEATABLE: True}
        return {**self.scope, "headers": [*self.scope["headers"], *headers], "state": state}

    def new_scope(self, request_id: str) -> Scope:
        """Returns the scope of a first run, which is recorded."""
        return self.scope_of(request_id, (b"x-antiphon-resumable", b"1"))

    def resuming_scope(self, found: SharedRequest) -> Scope:
        """Returns the scope of a run that continues a recorded one, from its beginning on."""
        return self.scope_of(self.request_id, (b"last-event-id", f"{found.request_id}:0".encode()))


class SharedRuns:
    """Runs requests of an application, each on one gateway."""

    def __init__(self, app: ASGIApp, shared: SharedAnswers) -> None:
        self._app, self._shared = app, shared

    async def whole(self, asked: Asked) -> Answer:
        """Returns the answer to a request, from whichever gateway has it. Without the bus, runs it here."""
        try:
            while True:
                found, revision = await self._find(asked)
                if found is not None and found.answer is not None:
                    found.answer.is_repetition = True
                    return found.answer
                if found is not None and self._shared.runs_elsewhere(found):
                    await asyncio.sleep(_LOOK_S)
                    continue
                claim = await self._claim(asked, revision, asked.request_id if found is None else found.request_id)
                if claim is not None:
                    break
        except LogUnavailableError as error:
            log.warning("a request with an Idempotency-Key is known to this gateway alone: %s", error)
            return await answer_of(self._app, asked.scope, asked.body)
        return await self._run(asked, found, *claim)

    async def stream(self, asked: Asked, receive: Receive, send: Send) -> None:
        """Sends the stream of a request from its beginning on, whichever gateway has begun it. Raises ServiceError."""
        try:
            while True:
                found, revision = await self._find(asked)
                if found is not None and await self._resumed(asked, found, receive, send):
                    return
                if found is not None and self._is_beginning(found):
                    await asyncio.sleep(_LOOK_S)
                    continue
                claim = await self._claim(asked, revision, asked.request_id if found is None else new_id())
                if claim is not None:
                    break
        except LogUnavailableError as error:
            message = f"Streams cannot be repeated now: {error}. Send it later, or without 'Idempotency-Key'."
            raise ServiceError("bus_unavailable", message, retry_after_s=1.0) from error
        request, revision = claim
        async with self._dropped_unless_successful(asked, revision, send) as forward:
            scope = asked.new_scope(request.request_id)
            await self._app(scope, receive_of(asked.body, receive), forward)

    async def _find(self, asked: Asked) -> tuple[SharedRequest | None, int]:
        """Returns the first request with the key. Raises ServiceError if it had another body."""
        found, revision = await self._shared.find(asked.name)
        if found is None:
            return None, revision
        if time.time() - found.at > limits.IDEMPOTENCY_S and not self._shared.runs_elsewhere(found):
            return None, revision
        check_same(found.fingerprint, asked.fingerprint)
        return found, revision

    def _is_beginning(self, found: SharedRequest) -> bool:
        """Whether a stream that cannot be resumed may only not be recorded yet."""
        lives = found.owner == self._shared.own or self._shared.runs_elsewhere(found)
        return lives and time.time() - found.at < _BEGIN_S

    async def _claim(self, asked: Asked, revision: int, request_id: str) -> tuple[SharedRequest, int] | None:
        """Writes that this gateway runs a request; None if another one has."""
        request = SharedRequest(
            fingerprint=asked.fingerprint, request_id=request_id, owner=self._shared.own, at=time.time()
        )
        new = await self._shared.write(asked.client, asked.name, request, revision)
        return None if new is None else (request, new)

    async def _run(self, asked: Asked, former: SharedRequest | None, request: SharedRequest, revision: int) -> Answer:
        """Runs a request here, as the continuation of a `former` run if that was recorded, and shares the answer."""
        async with self._dropped_if_cut(asked, revision):
            answer = None
            if former is not None:
                answer = await answer_of(self._app, asked.resuming_scope(former), asked.body)
            if answer is None or answer.status in _GONE:
                # The former run may still go on at an engine, which knows a request by its id.
                request = msgspec.structs.replace(request, request_id=asked.request_id if former is None else new_id())
                answer = await answer_of(self._app, asked.new_scope(request.request_id), asked.body)
        try:
            if answer.is_repeatable and len(answer.body) <= limits.IDEMPOTENCY_SHARED_BYTES_MAX:
                done = msgspec.structs.replace(request, answer=answer, at=time.time())
                await self._shared.write(asked.client, asked.name, done, revision)
            elif current_call().error_code != "draining":  # then another gateway continues it
                await self._shared.drop(asked.name, revision)
        except LogUnavailableError as error:
            log.warning("an answer with an Idempotency-Key is known to this gateway alone: %s", error)
        return answer

    async def _resumed(self, asked: Asked, found: SharedRequest, receive: Receive, send: Send) -> bool:
        """Sends a recorded stream from its beginning on. Returns False, and sends nothing, if it is not recorded."""
        is_gone = False

        async def forward(message: Message) -> None:
            nonlocal is_gone
            if message["type"] == "http.response.start":
                is_gone = message["status"] in _GONE
                message = {**message, "headers": [*message.get("headers", ()), REPLAYED]}
            if not is_gone:
                await send(message)

        await self._app(asked.resuming_scope(found), receive_of(asked.body, receive), forward)
        return not is_gone

    @asynccontextmanager
    async def _dropped_if_cut(self, asked: Asked, revision: int) -> AsyncIterator[None]:
        """Drops a request whose run raises: it may be sent again. That of a gateway that ends goes on elsewhere."""
        try:
            yield
        except Exception:
            await self._drop(asked, revision)
            raise

    @asynccontextmanager
    async def _dropped_unless_successful(self, asked: Asked, revision: int, send: Send) -> AsyncIterator[Send]:
        """Gives a `send` that notices the status of an answer. Drops the request unless it is that of success."""
        is_successful = False

        async def forward(message: Message) -> None:
            nonlocal is_successful
            if message["type"] == "http.response.start":
                is_successful = 200 <= message["status"] < 300
            await send(message)

        try:
            yield forward
        finally:
            if not is_successful:
                await self._drop(asked, revision)

    async def _drop(self, asked: Asked, revision: int) -> None:
        try:
            await self._shared.drop(asked.name, revision)
        except LogUnavailableError as error:
            log.warning("a failed request with an Idempotency-Key is not forgotten: %s", error)


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Returns the value of a header; b"" if it is not there."""
    return next((value for each, value in headers if each == name), b"")


def check_same(first: bytes, second: bytes) -> None:
    """Raises ServiceError if two requests with the same key have different bodies."""
    if first != second:
        message = "The same 'Idempotency-Key' was sent with another body. Use a new key for a new request."
        raise ServiceError("idempotency_conflict", message, param="Idempotency-Key")


async def answer_of(app: ASGIApp, scope: Scope, body: bytes) -> Answer:
    """Returns the whole answer of an application."""
    answer = Answer()

    async def collect(message: Message) -> None:
        answer.add(message)

    await app(scope, receive_of(body), collect)
    return answer


def receive_of(body: bytes, then: Receive | None = None) -> Receive:
    """Returns the `receive` of a connection that has sent `body`. `then`: what follows; by default it stays open."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        if then is not None:
            return await then()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive
