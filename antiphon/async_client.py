"""The HTTP client for asyncio: probes of the launcher, and load of many streams at once.

It imports no HTTP library, so that the launcher starts fast, and it takes little CPU time per event of a stream: a load
generator shares the machine with the server that it measures. Each request has its own connection, because some servers
close an idle connection at the moment when it is used again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from antiphon.shared.security.tls import any_certificate

READ_LIMIT = 2**20
"""Longest line of a response, and longest body that is read at once, bytes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP status, the body and the headers (with names in lower case) of an answer.

    Status 0 means that there was no answer.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Response:
    """A response whose head has arrived. `status_line` is its first line; names of `headers` are in lower case."""

    status: int
    status_line: str
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader

    async def read(self, limit: int = READ_LIMIT) -> bytes:
        """Returns the body, of which at least `limit` bytes are read if it is longer."""
        body = b""
        async for piece in self._pieces():
            body += piece
            if len(body) >= limit:
                break
        return body

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the whole lines of the body without their ends."""
        rest = b""
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):  # RFC 9112, section 7.1
            while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        else:
            while data := await self._reader.read(READ_LIMIT):
                yield data


class Connection:
    """An open connection for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Sends the request and returns the response when its head has arrived.

        Raises OSError, EOFError or ValueError if none arrives, or one that is not HTTP.
        """
        sent = {"Host": self._host, "Connection": "close", **(headers or {})}
        if body:
            sent = {"Content-Type": "application/json", "Content-Length": str(len(body)), **sent}
        head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        self._writer.write("\r\n".join((*head, "", "")).encode() + body)
        status_line = (await self._reader.readline()).decode("latin-1").strip()
        if len(words := status_line.split()) < 2:
            raise EOFError("ended before its status")
        found: dict[str, str] = {}
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            found[name.lower()] = value.strip()
        return Response(int(words[1]), status_line, found, self._reader)


@contextlib.asynccontextmanager
async def connected(host: str, port: int, *, https: bool = False) -> AsyncIterator[Connection]:
    """Opens a connection, and closes it at the end of the context. Raises OSError.

    With `https`, any certificate is accepted.
    """
    context = any_certificate() if https else None
    reader, writer = await asyncio.open_connection(host, port, limit=READ_LIMIT, ssl=context)
    try:
        yield Connection(reader, writer, host)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def get(
    host: str, port: int, path: str, *, token: str = "", https: bool = False, timeout_s: float = 2.0
) -> Answer:
    """Sends one GET request and returns the answer. Any failure or a timeout gives status 0.

    With `https`, any certificate is accepted.
    """
    return await _exchange(host, port, "GET", path, b"", authorization(token), https, timeout_s)


async def post(
    host: str, port: int, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float = 2.0
) -> Answer:
    """Sends one POST request and returns the answer. Any failure or a timeout gives status 0."""
    return await _exchange(host, port, "POST", path, body, headers, False, timeout_s)


def authorization(token: str | None) -> dict[str, str]:
    """Returns the header with an API key; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


async def _exchange(
    host: str, port: int, method: str, path: str, body: bytes, headers: Mapping[str, str], https: bool, timeout_s: float
) -> Answer:
    with contextlib.suppress(OSError, EOFError, ValueError):
        async with asyncio.timeout(timeout_s), connected(host, port, https=https) as connection:
            response = await connection.ask(method, path, body, headers)
            return Answer(response.status, await response.read(), response.headers)
    return Answer(0)
