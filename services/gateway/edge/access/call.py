"""The HTTP request that the current task serves: its API key, its headers about access, and the key's remaining limits.

The HTTP edge sets the call (a context variable) before it passes the request to the application; `guard` reads it when
a model is resolved or a generation starts. Endpoints need not pass the key on, so none can forget it.

The server draws the id of each request: 22 letters and digits (130 bits). An id that a client sends (`X-Request-Id`) is
repeated in the response and in the usage record. The server does not use it as its own id, because ids of sequences
must be unique.
"""

import contextlib
import logging
import re
import secrets
import string
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from antiphon.services.gateway.edge.access.reservation import QuotaReservation
from antiphon.services.gateway.edge.access.turns import Turn
from antiphon.services.gateway.path.generation import Caller
from antiphon.shared import limits
from antiphon.shared.security.api_keys import ANONYMOUS, ApiKey

log = logging.getLogger(__name__)
_ID_LENGTH = 22
_ALPHABET = string.ascii_letters + string.digits
_NUM_USED = 256 // len(_ALPHABET) * len(_ALPHABET)
_LETTERS = bytes(ord(_ALPHABET[byte % len(_ALPHABET)]) for byte in range(256))
"""The letter of each byte."""
_UNUSED = bytes(range(_NUM_USED, 256))
"""Bytes that are left out, so that all letters are equally frequent."""
_NUM_BYTES = 32
"""Bytes that are drawn at once. Very rarely, more than ten of them are unused, and more are drawn."""
_OWN_HEADERS = {
    b"x-request-id": "client_request_id",
    b"x-request-timeout": "timeout",
    b"x-antiphon-lockstep": "lockstep",
    b"x-antiphon-lane": "lane",
}
"""The headers about access, and the fields of a call that have their values."""
_CLIENT_REQUEST_ID = re.compile(rf"[A-Za-z0-9_.:-]{{1,{limits.REQUEST_ID_HEADER_CHARS_MAX}}}")


def new_id() -> str:
    """Returns a new id, unguessable and unique across gateways."""
    letters = b""
    while len(letters) < _ID_LENGTH:
        letters += secrets.token_bytes(_NUM_BYTES).translate(_LETTERS, _UNUSED)
    return letters[:_ID_LENGTH].decode()


def is_id(text: str) -> bool:
    """Whether a text may be an id: as long as one, of letters and digits."""
    return text.isascii() and text.isalnum() and len(text) == _ID_LENGTH


def route_path(scope: Scope) -> str:
    """Returns the path without the prefix under which a proxy serves the application, as routes are defined."""
    path, prefix = scope["path"], scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and path.startswith(f"{prefix}/") else path


@dataclass(frozen=True, slots=True)
class Strictness:
    """What the server refuses instead of answering without it and telling so (`ignore`)."""

    unknown_fields: bool = False
    """Fields that nobody knows (`--unknown-parameters`)."""
    long_outputs: bool = False
    """A maximum of output tokens beyond what fits into the context (`--long-outputs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a request has generated, for the access log. `error`: code of its error, or who cancelled it."""

    request_id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    """0: there was no token."""
    engines: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    error: str


@dataclass(slots=True, kw_only=True)
class Call(Caller):
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
    reservation: QuotaReservation | None = None
    """What `admission` has reserved for the request, until a generation takes it over."""
    strict: Strictness = field(default_factory=Strictness, compare=False)
    ignored: dict[str, None] = field(default_factory=dict[str, None], compare=False)
    """What the request asks for and does not get: names of fields, in order (`ignore`)."""
    generated: Generated | None = field(default=None, compare=False)
    """Set when its generation has ended; of several, the last one."""
    error_code: str = field(default="", compare=False)
    """Code of the error with which it was answered."""
    was_admitted: bool = False
    """Whether another gateway has admitted the request within the key's limits, and this gateway continues it."""

    @property
    def refuses_long_outputs(self) -> bool:
        """See Caller."""
        return self.strict.long_outputs

    def prepared(self) -> None:
        """See Caller. Ends the call's turn."""
        if self.turn is not None:
            self.turn.end()

    def ignore(self, name: str) -> None:
        """See Caller: in the header of the answer and in the timeline of the request.

        The numbers of elements are left out: a field of a hundred messages is told once. The log has each name once.
        """
        name = _UNPRINTABLE.sub("?", _NUMBER.sub("[]", name))
        if self is not _NO_CALL and len(self.ignored) < limits.IGNORED_NAMES_MAX:
            self.ignored[name] = None
        if name not in _LOGGED and len(_LOGGED) < limits.IGNORED_LOGGED_MAX:
            _LOGGED.add(name)
            log.info("a request has the field %r, which has no effect (told once)", name)


_NO_CALL = Call()
"""Stands for work that no HTTP request asked for."""
_NUMBER = re.compile(r"\[\d+\]")
_UNPRINTABLE = re.compile(r"[^!-+\--~]")
"""Characters that a name in the header must not have: a client may have made it up."""
_LOGGED: set[str] = set()
"""Names that `ignore` has logged in this process."""
_CURRENT: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def current_call() -> Call:
    """Returns the call that the current task serves."""
    return _CURRENT.get()


def name_call(client_request_id: Any) -> None:
    """Gives the current call the client's own id, unless the header has one, or the id is not well formed."""
    call = current_call()
    if isinstance(client_request_id, str) and not call.client_request_id and _is_client_id(client_request_id):
        call.client_request_id = client_request_id


def note_error(code: str) -> None:
    """Notes the code of the error with which the current call is answered."""
    if (call := current_call()) is not _NO_CALL:
        call.error_code = code


def ignore(name: str) -> None:
    """Tells the client of the current call that a field of its request has no effect, see `Call.ignore`."""
    current_call().ignore(name)


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
    call = Call(key=key)
    for header, name in _OWN_HEADERS.items():
        if (value := headers.get(header)) is not None:
            setattr(call, name, value.decode("latin-1").strip())
    if call.client_request_id and not _is_client_id(call.client_request_id):
        call.client_request_id = ""
    return call


def _is_client_id(text: str) -> bool:
    return _CLIENT_REQUEST_ID.fullmatch(text) is not None
