"""The HTTP request that the current task serves: its key, and what the key's limits are after it.

The HTTP edge sets the call before it passes the request on; `guard` reads it wherever the request asks for a model or
for generation. Endpoints need not pass it on, so no endpoint can forget to.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from services.gateway.access.keys import ANONYMOUS, ApiKey


@dataclass(slots=True)
class Call:
    """One HTTP request."""

    key: ApiKey = ANONYMOUS


_NONE = Call()
"""Stands for work that no HTTP request asked for."""
_CURRENT: ContextVar[Call] = ContextVar("call", default=_NONE)


def current_call() -> Call:
    """Returns the call that the current task serves."""
    return _CURRENT.get()


@contextlib.contextmanager
def serving(call: Call) -> Iterator[None]:
    """Makes `call` the current call of this task, and of the tasks that it starts, inside the block."""
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)
