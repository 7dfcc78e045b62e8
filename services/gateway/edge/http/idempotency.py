"""ASGI middleware that answers a repeated request (same `Idempotency-Key`, same body) with the first answer.

This is for clients that repeat a request because they do not know whether it was executed. The request runs once, and
its answer is stored for `IDEMPOTENCY_S`; a repetition that arrives before the answer waits for it. The request runs to
its end even if its client disconnects. Only complete, successful answers are stored, so a failed request can be
repeated. The header is refused for streams, and for uploads, which are too large for memory. Each gateway stores its
own answers.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.services.gateway.edge.access.call import current_call, route_path
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.disconnect import unless_gone
from antiphon.shared import limits
from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.errors import ServiceError
from antiphon.shared.structures.kept import Kept

log = logging.getLogger(__name__)
REPEATED = b"idempotency-key"
_REPLAYED = (b"idempotency-replayed", b"true")
_FORM = b"multipart/form-data"
_STREAMED = (b"text/event-stream", b"application/x-ndjson")
"""Content types of streams. A stream that fails after its beginning has the status of success."""
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")


class _Name(NamedTuple):
    """The identity of an idempotency key: keys of different clients or routes are different."""

    client: str
    path: str
    key: str

    @property
    def id(self) -> str:
        """The identity as a text."""
        return "\n".join(self)


@dataclass(slots=True)
class _Answer:
    """A complete response."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    body: bytearray = field(default_factory=bytearray)

    def add(self, message: MutableMapping[str, Any]) -> None:
        """Adds a message of the application."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    @property
    def is_repeatable(self) -> bool:
        """Whether the response may be repeated: it is successful and not a stream, which may have failed midway."""
        return 200 <= self.status < 300 and not _header(self.headers, b"content-type").startswith(_STREAMED)

    async def send(self, send: Send, *more: tuple[bytes, bytes]) -> None:
        """Sends the response, with further headers."""
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, *more]})
        await send({"type": "http.response.body", "body": bytes(self.body)})


@dataclass(slots=True)
class _Kept:
    """A stored answer. `at`: time of the first answer, monotonic seconds."""

    fingerprint: bytes
    answer: _Answer
    at: float


@dataclass(slots=True)
class _Running:
    """A request in progress, for which its repetitions wait."""

    fingerprint: bytes
    task: "asyncio.Task[_Answer]"


class Idempotency:
    """Wraps an application. Bounded in number and size: the API key that has most loses its oldest answers.

    `streaming`: paths of routes that answer with a stream unless the body's `stream` is false.
    """

    def __init__(
        self, app: ASGIApp, now: Callable[[], float] = time.monotonic, streaming: Collection[str] = ()
    ) -> None:
        self._app = app
        self._now = now
        self._streaming = frozenset(streaming)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """By id. The oldest answer is the first."""
        self._shares = Kept(limits.IDEMPOTENCY_BYTES_MAX)
        self._places = Shares(limits.IDEMPOTENCY_ANSWERS_MAX)
        self._running: dict[_Name, _Running] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that has the header, or passes it on if it is no POST request. Raises ServiceError."""
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key, path = _header(scope["headers"], REPEATED), route_path(scope)
        if not _KEY.fullmatch(key):
            _refuse("'Idempotency-Key' must have 1 to 255 visible characters.")
        if _header(scope["headers"], b"content-type").lower().startswith(_FORM):
            _refuse("An upload cannot be repeated: send it without 'Idempotency-Key'.")
        body = await request_body.read(scope["headers"], receive)
        _refuse_stream(body, by_default=path in self._streaming)
        name, fingerprint = _Name(current_call().key.name, path, key.decode()), hashlib.sha256(body).digest()
        if (kept := self._find(name)) is not None:
            _check(kept.fingerprint, fingerprint)
            await kept.answer.send(send, _REPLAYED)
            return
        running, repeats = self._running.get(name), True
        if running is None:
            running, repeats = self._start(name, fingerprint, scope, body), False
        _check(running.fingerprint, fingerprint)
        answer = await unless_gone(receive, _result(running.task))
        await answer.send(send, *((_REPLAYED,) if repeats else ()))

    def _find(self, name: _Name) -> _Kept | None:
        oldest = self._now() - limits.IDEMPOTENCY_S
        while self._kept and next(iter(self._kept.values())).at <= oldest:
            self._drop(next(iter(self._kept)))
        return self._kept.get(name.id)

    def _start(self, name: _Name, fingerprint: bytes, scope: Scope, body: bytes) -> _Running:
        if not self._places.take(name.client, 1):
            raise ServiceError("server_is_overloaded", "Too many requests with an 'Idempotency-Key' are in progress.")
        task = asyncio.get_running_loop().create_task(self._run(name, fingerprint, scope, body))
        task.add_done_callback(_retrieve)
        self._running[name] = _Running(fingerprint, task)
        return self._running[name]

    async def _run(self, name: _Name, fingerprint: bytes, scope: Scope, body: bytes) -> _Answer:
        """Runs a request and stores its answer. Continues if the client's connection ends."""
        answer = _Answer()

        async def collect(message: Message) -> None:
            answer.add(message)

        try:
            await self._app(scope, _receive_of(body), collect)
        finally:
            del self._running[name]
            self._places.give_back(name.client, 1)
        if answer.is_repeatable:
            self._keep(name, _Kept(fingerprint, answer, self._now()))
        return answer

    def _keep(self, name: _Name, kept: _Kept) -> None:
        self._kept[name.id] = kept
        # Each counts as much as there would be for it if there were the largest number of answers.
        size = max(len(kept.answer.body), limits.IDEMPOTENCY_BYTES_MAX // limits.IDEMPOTENCY_ANSWERS_MAX)
        for gone in self._shares.put(name.client, name.id, size):
            self._drop(gone)

    def _drop(self, name_id: str) -> None:
        self._shares.remove(name_id)
        del self._kept[name_id]


class _Streams(msgspec.Struct):
    stream: Any = None


_STREAMS = msgspec.json.Decoder(_Streams)


def _refuse_stream(body: bytes, *, by_default: bool) -> None:
    try:
        stream = _STREAMS.decode(body).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # the route reports what is wrong with the body
    if stream is True or (stream is None and by_default):
        _refuse("A stream cannot be repeated: send the request with 'stream' false, or without 'Idempotency-Key'.")


def _refuse(told: str) -> NoReturn:
    raise ServiceError("invalid_value", told, param="Idempotency-Key")


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Returns the value of a header; b"" if it is not there."""
    return next((value for each, value in headers if each == name), b"")


def _check(first: bytes, second: bytes) -> None:
    if first != second:
        message = "The same 'Idempotency-Key' was sent with another body. Use a new key for a new request."
        raise ServiceError("idempotency_conflict", message, param="Idempotency-Key")


def _receive_of(body: bytes) -> Receive:
    """Returns the `receive` of a connection that has sent `body` and stays open."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive


async def _result(task: "asyncio.Task[_Answer]") -> _Answer:
    return await asyncio.shield(task)


def _retrieve(task: "asyncio.Task[_Answer]") -> None:
    """Logs a failure, because there may be no client left to receive it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a request with an Idempotency-Key failed: %r", error)
