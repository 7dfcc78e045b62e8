"""One port for all gateways of a compose deployment: passes TCP connections on to them in turn.

Not a service of the product: on a cluster a load balancer or a Kubernetes Service stands here. It needs nothing but the
standard library. A gateway that cannot be reached is passed over; with none left the client gets a readable 503.
Run as `python front.py HOST PORT`: the name that resolves to every gateway, and their port, which is also its own.
"""

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import Iterator

CONNECT_S = 1.0
CHUNK_BYTES = 65536
CONNECTIONS_MAX = 4096
"""Connections at once; more wait to be accepted."""
DRAIN_S = 25.0
BODY = (
    b'{"error":{"message":"No gateway is running.","type":"service_unavailable_error",'
    b'"param":null,"code":"server_is_overloaded"}}'
)
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


class Front:
    """Passes connections to the addresses behind one name."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._turn: Iterator[int] = itertools.count()
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)
        self.open: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, to its end."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            async with self._room:
                await self._serve(reader, writer)
        finally:
            self.open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        if upstream is None:
            writer.write(UNAVAILABLE)
            with contextlib.suppress(OSError):
                await writer.drain()
            return
        try:
            # Whichever side ends first ends the other: a client that leaves must be seen to leave.
            ways = [asyncio.create_task(_pump(reader, upstream[1])), asyncio.create_task(_pump(upstream[0], writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            upstream[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        addresses = await self._addresses()
        first = next(self._turn)
        for offset in range(len(addresses)):
            address = addresses[(first + offset) % len(addresses)]
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(address, self._port), CONNECT_S)
        return None

    async def _addresses(self) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            return []
        return sorted({str(entry[4][0]) for entry in found})


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def run(host: str, port: int, listen_port: int) -> None:
    """Serves until SIGTERM, then lets open connections end."""
    front, stop = Front(host, port), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await asyncio.start_server(front.accept, "0.0.0.0", listen_port)
    await stop.wait()
    server.close()
    if front.open:
        await asyncio.wait(front.open, timeout=DRAIN_S)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[2])))
