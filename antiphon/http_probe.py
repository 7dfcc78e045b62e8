"""The launcher's HTTP client: one GET, answered or not. No library, so that the command starts fast."""

import asyncio
import contextlib
from dataclasses import dataclass

_BODY_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """A status (0: nobody answered) and the body."""

    status: int
    body: bytes = b""


async def get(host: str, port: int, path: str, *, token: str = "", timeout_s: float = 2.0) -> Answer:
    """One GET. Whatever goes wrong on the way is status 0."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            return await _get(host, port, path, token)
    return Answer(0)


async def _get(host: str, port: int, path: str, token: str) -> Answer:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        # HTTP/1.0: the answer ends with the connection and is never chunked.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n{authorization}\r\n".encode())
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        body = b""
        while len(body) < _BODY_BYTES_MAX and (data := await reader.read(_BODY_BYTES_MAX)):
            body += data
        return Answer(status, body)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
