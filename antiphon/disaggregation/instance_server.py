"""The small HTTP server of a prefill or decode instance, at its `--port`: health, and the scheduler's `/join`.

Instances serve no clients: every other path answers that requests belong to the scheduler's port.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

_HEAD_BYTES_MAX, _BODY_BYTES_MAX = 16 << 10, 64 << 10
_REQUEST_S = 10.0
"""Time limit for a whole request, seconds."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    409: "Conflict",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """A response, whose body is JSON."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict[str, str])


Answer = Callable[[Request], Response]


def json_response(status: int, /, **values: object) -> Response:
    """Returns a response with these fields."""
    return Response(status, json.dumps(values).encode())


def not_here(what: str) -> Response:
    """Returns the answer to a request of a client at an instance. `what` names the instance."""
    message = f"This is {what}, which serves no requests of clients: send them to the port of the scheduler"
    return json_response(404, error={"message": message, "type": "invalid_request_error", "code": "not_found"})


async def serve(listener: socket.socket, answer: Answer) -> asyncio.Server:
    """Starts the server on a listening socket. Each request is answered by `answer`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_S):
                    request = await _read(reader)
                    response = answer(request) if request else json_response(400, error="not an HTTP request")
                    writer.write(_encode(response))
                    await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(handle, sock=listener, limit=_HEAD_BYTES_MAX)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """Reads one request. Returns None if it is malformed or too long."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3:
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > _BODY_BYTES_MAX:
        return None
    body = await reader.readexactly(int(length))
    return Request(words[0], words[1].partition("?")[0], headers, body)


def _encode(response: Response) -> bytes:
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **response.headers,
    }
    lines = [f"HTTP/1.1 {response.status} {_REASONS[response.status]}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + response.body
