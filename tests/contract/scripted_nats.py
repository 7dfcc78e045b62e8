"""A NATS server for tests that answers only as much as a test says: handshakes and pings, without any messages."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

INFO = b'INFO {"server_id":"s","version":"2.10.0","max_payload":8388608,"headers":true,"proto":1}\r\n'
Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """Connections are handled one by one by `scripts`, and by `healthy` after those."""

    def __init__(self, *scripts: Connection) -> None:
        self._scripts = list(scripts)
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def __aenter__(self) -> "ScriptedServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[len(self.writers)] if len(self.writers) < len(self._scripts) else healthy
        self.writers.append(writer)
        writer.write(INFO)
        with contextlib.suppress(ConnectionError):
            await script(reader, writer)


async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every ping."""
    await answers(None)(reader, writer)


def answers(pings: int | None) -> Connection:
    """Answers so many pings, of which the first is the handshake's, and then reads in silence; None: all of them."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = pings
        while line := await reader.readline():
            if line.startswith(b"PING") and left != 0:
                writer.write(b"PONG\r\n")
                left = None if left is None else left - 1

    return script


async def handshake_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads nothing after the handshake, as a frozen process."""
    while line := await reader.readline():
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")
            await asyncio.Event().wait()
