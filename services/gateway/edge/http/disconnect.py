"""Detects that a client disconnects while its request is in progress, and cancels the work.

A second task reads from the connection, because an ASGI server reports a disconnect only to a reader. While a request
waits in a queue, or if its answer is not streamed, no write could fail and reveal the disconnect.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, NoReturn, TypeVar

from starlette.types import Receive

from antiphon.shared.errors import ServiceError

T = TypeVar("T")


class ClientGoneError(ServiceError):
    """The client has closed the connection, or does not read. `cause`: which of the two, for the request's record."""

    def __init__(self, cause: str = "client_closed_request") -> None:
        super().__init__("client_closed_request", "The client closed the connection.")
        self.cause = cause


class HandedOverError(ServiceError):
    """The gateway ends before the stream does: the connection is closed; the client resumes the stream elsewhere."""

    def __init__(self) -> None:
        super().__init__("draining", "The server is shutting down. Resume the stream with 'Last-Event-ID'.")


class LaterGuard(NamedTuple):
    """A guard that begins `delay_s` seconds after the work, so that most work needs no task for it."""

    delay_s: float
    begin: Callable[[], Coroutine[Any, Any, NoReturn]]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], guard: LaterGuard | None = None) -> T:
    """Returns the result of `work`; cancels it if the client disconnects (ClientGoneError) or the guard raises.

    The work runs in the current task. The body of the request must have been read before.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancelled, failed = task.cancelling(), list["asyncio.Task[NoReturn]"]()

    def gone(watcher: "asyncio.Task[NoReturn]") -> None:
        failed.append(watcher)
        task.cancel()

    try:
        return await watched(receive, work, guard, gone)
    finally:
        # If something else has cancelled this task too, the work's CancelledError is raised.
        if failed and task.uncancel() <= num_cancelled:
            failed.pop().result()  # a frame that kept the task would keep its own exception, and all of the request


async def watched(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    guard: LaterGuard | None,
    gone: "Callable[[asyncio.Task[NoReturn]], None]",
) -> T:
    """Returns the result of `work`. Calls `gone` at most once, if the client disconnects or the guard raises.

    `gone` gets the task that has noticed it, which has failed. The work runs in the current task.
    """
    is_working, watchers = True, list["asyncio.Task[NoReturn]"]()

    def ended(watcher: "asyncio.Task[NoReturn]") -> None:
        nonlocal is_working
        if is_working and not watcher.cancelled():
            is_working = False
            gone(watcher)

    def watch(watching: Coroutine[Any, Any, NoReturn]) -> None:
        watcher = asyncio.create_task(watching)
        watcher.add_done_callback(ended)
        watchers.append(watcher)

    watch(_until_gone(receive))
    timer = None
    if guard is not None and guard.delay_s < math.inf:
        timer = asyncio.get_running_loop().call_later(guard.delay_s, lambda: watch(guard.begin()))
    try:
        return await work
    finally:
        is_working = False
        if timer is not None:
            timer.cancel()
        await _stop(*watchers)
        watchers.clear()  # for the same reason as in `unless_gone`


async def _until_gone(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


async def _stop(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
