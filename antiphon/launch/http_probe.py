"""The launcher's HTTP client for single requests. It imports no HTTP library, so that the launcher starts fast."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

_BODY_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP status, the body and the headers (with names in lower case) of an answer.

    Status 0 means that there was no answer.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


async def get(
    host: str, port: int, path: str, *, token: str = "", https: bool = False, timeout_s: float = 2.0
) -> Answer:
    """Sends one GET request and returns the answer. Any failure or a timeout gives status 0.

    With `https`, any certificate is accepted.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return await _exchange(host, port, _message("GET", host, path, headers), https, timeout_s)


async def post(
    host: str, port: int, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float = 2.0
) -> Answer:
    """Sends one POST request and returns the answer. Any failure or a timeout gives status 0."""
    headers = {**headers, "Content-Length": str(len(body))}
    return await _exchange(host, port, _message("POST", host, path, headers) + body, False, timeout_s)


def _message(method: str, host: str, path: str, headers: Mapping[str, str]) -> bytes:
    # With HTTP/1.0 the answer ends when the connection is closed and is never chunked.
    lines = [f"{method} {path} HTTP/1.0", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join((*lines, "", "")).encode()


async def _exchange(host: str, port: int, message: bytes, https: bool, timeout_s: float) -> Answer:
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            return await _answer(host, port, message, https)
    return Answer(0)


async def _answer(host: str, port: int, message: bytes, https: bool) -> Answer:
    reader, writer = await asyncio.open_connection(host, port, ssl=_any_certificate() if https else None)
    try:
        writer.write(message)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers: dict[str, str] = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = b""
        while len(body) < _BODY_BYTES_MAX and (data := await reader.read(_BODY_BYTES_MAX)):
            body += data
        return Answer(status, body, headers)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _any_certificate() -> "ssl.SSLContext":
    """Returns a context that accepts any certificate.

    The server belongs to this launcher and runs on this machine; its certificate has another host name.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
