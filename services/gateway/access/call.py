"""The HTTP request that the current task serves: its API key, its headers about access, and the key's remaining limits.

The HTTP edge sets the call (a context variable) before it passes the request to the application; `guard` reads it when
a model is resolved or a generation starts. Endpoints need not pass the key on, so none can forget it.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from services.gateway.access.turns import Turn
from shared import limits
from shared.security.api_keys import ANONYMOUS, ApiKey

_CLIENT_REQUEST_ID = re.compile(rf"[A-Za-z0-9_.:-]{{1,{limits.REQUEST_ID_HEADER_CHARS_MAX}}}")


@dataclass(slots=True)
class Call:
    """One HTTP request. The headers are empty if the client did not send them."""

    key: ApiKey = ANONYMOUS
    client_request_id: str = ""
    """`X-Request-Id`, if it is well formed."""
    timeout: str = ""
    """`X-Request-Timeout`, unchecked."""
    lockstep: str = ""
    """`X-Antiphon-Lockstep`, unchecked."""
    received_s: float = field(default_factory=time.monotonic, compare=False)
    """When the headers of the request had arrived, monotonic seconds."""
    response_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers that are added to the response: the remaining limits of the key."""
    lane: str = ""
    """`X-Antiphon-Lane`, unchecked."""
    in_batch: bool = False
    """Whether it is a request of a batch, for which no client waits."""
    idle_s: float = field(default=0.0, compare=False)
    """For a request of a batch: time for which it runs in the idle lane (with the lowest priority), seconds."""
    turn: Turn | None = field(default=None, compare=False)
    """Its turn to be prepared (see `turns`); None if it needs none."""
    was_admitted: bool = False
    """Whether another gateway has admitted the request within the key's limits, and this gateway continues it."""


_NO_CALL = Call()
"""Stands for work that no HTTP request asked for."""
_CURRENT: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def current_call() -> Call:
    """Returns the call that the current task serves."""
    return _CURRENT.get()


def may_see(owner: str) -> bool:
    """Whether the current call may see objects of the key named `owner`. Without keys, every call sees all objects."""
    key = current_call().key
    return key is ANONYMOUS or key.name == owner


def reachable_key() -> str:
    """Returns the name of the key whose recorded requests the current call may read; empty: requests of all keys."""
    key = current_call().key
    return "" if "admin" in key.scopes else key.name


@contextlib.contextmanager
def serving(call: Call) -> Iterator[None]:
    """Makes `call` the current call of this task, and of the tasks that it starts, inside the block."""
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def call_of(key: ApiKey, headers: Mapping[bytes, bytes]) -> Call:
    """Returns the call of a request with these headers."""
    client_request_id = _text(headers.get(b"x-request-id", b""))
    return Call(
        key,
        client_request_id=client_request_id if _CLIENT_REQUEST_ID.fullmatch(client_request_id) else "",
        timeout=_text(headers.get(b"x-request-timeout", b"")),
        lockstep=_text(headers.get(b"x-antiphon-lockstep", b"")),
        lane=_text(headers.get(b"x-antiphon-lane", b"")),
    )


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip()
