"""Notices that a client has left while its request is being worked on.

An own reader of the connection, because the server tells of a lost client only to whoever asks: a request that waits
in a queue or whose answer is not streamed sends nothing that could fail.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.types import Receive

from shared.errors import ServiceError

T = TypeVar("T")


class ClientGoneError(ServiceError):
    """Nobody waits for the answer any more."""

    def __init__(self) -> None:
        super().__init__("client_closed_request", "The client closed the connection.")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, NoReturn]) -> T:
    """The result of `work`, which is cancelled when the client leaves or a guard raises. Raises ClientGoneError.

    The request's body must have been read.
    """
    worker = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(guard) for guard in (_until_gone(receive), *guards)]
    try:
        await asyncio.wait([worker, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            next(watcher for watcher in watchers if watcher.done()).result()
        return await worker
    finally:
        await _stop(worker, *watchers)


async def _until_gone(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


async def _stop(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
