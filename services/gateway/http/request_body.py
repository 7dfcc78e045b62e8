"""Reads the body of a request, up to the allowed size and time: whole, or piece by piece."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from starlette.types import Receive

from services.gateway.http.disconnect import ClientGoneError
from shared import limits
from shared.errors import ServiceError

_DISCARD_BYTES_MAX = 2 * limits.BODY_BYTES_MAX
"""A body above the limit is read and discarded up to this size, because a client does not read the answer while it
sends.
"""
DISCARD_S = 5.0
"""Longest time for discarding a body, in seconds, because the announced body may never arrive."""


async def read(headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
    """Returns the whole body.

    Raises ServiceError if the body is too large or too slow, ClientGoneError if the client disconnects.
    """
    try:
        async with asyncio.timeout(limits.BODY_READ_S):
            return await _read(_announced(headers), receive)
    except TimeoutError:
        raise ServiceError(
            "timeout", f"The request body did not arrive within {limits.BODY_READ_S:g} seconds."
        ) from None


async def pieces(headers: Iterable[tuple[bytes, bytes]], receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
    """Yields a body piece by piece, so that it may be larger than memory.

    Raises ServiceError if the body is larger than `max_bytes`, or if its next piece does not arrive in time;
    ClientGoneError if the client disconnects.
    """
    size, more = 0, True
    too_large = ServiceError("request_too_large", f"The request body is larger than {max_bytes} bytes.")
    if _announced(headers) > max_bytes:
        raise too_large
    while more:
        try:
            async with asyncio.timeout(limits.BODY_READ_S):
                piece, more = await _next(receive)
        except TimeoutError:
            raise ServiceError("timeout", f"No data arrived for {limits.BODY_READ_S:g} seconds.") from None
        size += len(piece)
        if size > max_bytes:
            raise too_large
        yield piece


async def _read(announced: int, receive: Receive) -> bytes:
    if announced > limits.BODY_BYTES_MAX:
        await _discard(0, receive)
    body, more = bytearray(), True
    while more:
        chunk, more = await _next(receive)
        body += chunk
        if len(body) > limits.BODY_BYTES_MAX:
            size = len(body)
            body.clear()
            await _discard(size if more else _DISCARD_BYTES_MAX, receive)
    return bytes(body)


async def _discard(size: int, receive: Receive) -> None:
    more = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while more and size < _DISCARD_BYTES_MAX:
                chunk, more = await _next(receive)
                size += len(chunk)
    raise ServiceError("request_too_large", f"The request body is larger than {limits.BODY_BYTES_MAX} bytes.")


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _announced(headers: Iterable[tuple[bytes, bytes]]) -> int:
    value = next((value for name, value in headers if name == b"content-length"), b"0")
    return int(value) if value.isdigit() else 0
