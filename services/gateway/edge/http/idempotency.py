"""ASGI middleware that answers a repeated request (same `Idempotency-Key`, same body) with the first answer.

This is for clients that repeat a request because they do not know whether it was executed. The request runs once, and
its answer is stored for `IDEMPOTENCY_S`; a repetition that arrives before the answer waits for it. The request runs to
its end even if its client disconnects. Only complete, successful answers are stored, so a failed request can be
repeated. Where the bus keeps records, gateways share the answers (`shared_answers`), and the repetition of a stream
gets the recorded stream from its beginning. The header is refused for other streams, and for uploads, which are too
large for memory.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.services.gateway.edge.access.call import current_call, route_path
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.disconnect import unless_gone
from antiphon.services.gateway.edge.http.shared_answers import (
    REPEATED,
    REPLAYED,
    Answer,
    Asked,
    SharedAnswers,
    SharedRuns,
    answer_of,
    check_same,
    header,
)
from antiphon.shared import limits
from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.errors import ServiceError
from antiphon.shared.structures.kept import Kept

log = logging.getLogger(__name__)
_FORM = b"multipart/form-data"
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
class _Kept:
    """A stored answer. `at`: time of the first answer, monotonic seconds."""

    fingerprint: bytes
    answer: Answer
    at: float


@dataclass(slots=True)
class _Running:
    """A request in progress, for which its repetitions wait."""

    fingerprint: bytes
    task: "asyncio.Task[Answer]"


class Idempotency:
    """Wraps an application. Bounded in number and size: the API key that has most loses its oldest answers.

    `streaming`: paths of routes that answer with a stream unless the body's `stream` is false. `shared`: what gateways
    share; None: each has its own answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        now: Callable[[], float] = time.monotonic,
        streaming: Collection[str] = (),
        shared: SharedAnswers | None = None,
    ) -> None:
        self._app, self._shared = app, shared
        self._runs = None if shared is None else SharedRuns(app, shared)
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
        key, path = header(scope["headers"], REPEATED), route_path(scope)
        if not _KEY.fullmatch(key):
            _refuse("'Idempotency-Key' must have 1 to 255 visible characters.")
        if header(scope["headers"], b"content-type").lower().startswith(_FORM):
            _refuse("An upload cannot be repeated: send it without 'Idempotency-Key'.")
        body = await request_body.read(scope["headers"], receive)
        name, fingerprint = _Name(current_call().key.name, path, key.decode()), hashlib.sha256(body).digest()
        asked = Asked(name.client, name.id, fingerprint, scope, body)
        if _is_stream(body, by_default=path in self._streaming):
            if self._runs is None or self._shared is None or not self._shared.can_resume(path):
                _refuse("This stream cannot be repeated: send it with 'stream' false, or without 'Idempotency-Key'.")
            await self._runs.stream(asked, receive, send)
            return
        if (kept := self._find(name)) is not None:
            check_same(kept.fingerprint, fingerprint)
            await kept.answer.send(send, REPLAYED)
            return
        running, repeats = self._running.get(name), True
        if running is None:
            running, repeats = self._start(name, asked), False
        check_same(running.fingerprint, fingerprint)
        answer = await unless_gone(receive, _result(running.task))
        await answer.send(send, *((REPLAYED,) if repeats or answer.is_repetition else ()))

    def _find(self, name: _Name) -> _Kept | None:
        oldest = self._now() - limits.IDEMPOTENCY_S
        while self._kept and next(iter(self._kept.values())).at <= oldest:
            self._drop(next(iter(self._kept)))
        return self._kept.get(name.id)

    def _start(self, name: _Name, asked: Asked) -> _Running:
        if not self._places.take(name.client, 1):
            raise ServiceError("server_is_overloaded", "Too many requests with an 'Idempotency-Key' are in progress.")
        task = asyncio.get_running_loop().create_task(self._run(name, asked))
        task.add_done_callback(_retrieve)
        self._running[name] = _Running(asked.fingerprint, task)
        return self._running[name]

    async def _run(self, name: _Name, asked: Asked) -> Answer:
        """Runs a request and stores its answer. Continues if the client's connection ends."""
        try:
            if self._runs is None:
                answer = await answer_of(self._app, asked.scope, asked.body)
            else:
                answer = await self._runs.whole(asked)
        finally:
            del self._running[name]
            self._places.give_back(name.client, 1)
        if answer.is_repeatable:
            self._keep(name, _Kept(asked.fingerprint, answer, self._now()))
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


def _is_stream(body: bytes, *, by_default: bool) -> bool:
    """Whether a body asks for a stream."""
    try:
        stream = _STREAMS.decode(body).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the route reports what is wrong with the body
    return stream is True or (stream is None and by_default)


def _refuse(told: str) -> NoReturn:
    raise ServiceError("invalid_value", told, param="Idempotency-Key")


async def _result(task: "asyncio.Task[Answer]") -> Answer:
    return await asyncio.shield(task)


def _retrieve(task: "asyncio.Task[Answer]") -> None:
    """Logs a failure, because there may be no client left to receive it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a request with an Idempotency-Key failed: %r", error)
