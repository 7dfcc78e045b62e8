"""The launcher's HTTP client, which makes one GET request. It uses no library, so that the command starts fast."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

_BODY_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP status and the body of an answer. Status 0 means that there was no answer."""

    status: int
    body: bytes = b""


async def get(
    host: str, port: int, path: str, *, token: str = "", https: bool = False, timeout_s: float = 2.0
) -> Answer:
    """Sends one GET request and returns the answer. Any failure or a timeout gives status 0.

    With `https`, any certificate is accepted.
    """
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            return await _get(host, port, path, token, https)
    return Answer(0)


async def _get(host: str, port: int, path: str, token: str, https: bool) -> Answer:
    reader, writer = await asyncio.open_connection(host, port, ssl=_any_certificate() if https else None)
    try:
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        # With HTTP/1.0 the answer ends when the connection is closed and is never chunked.
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


def _any_certificate() -> "ssl.SSLContext":
    """Returns a context that accepts any certificate.

    The server is this launcher's own on this machine; its certificate has another host name.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
