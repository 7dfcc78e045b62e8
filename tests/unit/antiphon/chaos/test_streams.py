"""What the clients of a run do when a gateway dies while it answers."""

import asyncio

from antiphon.chaos.streams import timeline_of
from antiphon.launch.readiness import ServerAddress


async def test_a_timeline_whose_gateway_dies_meanwhile_is_missing():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{"created": 1')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        address = ServerAddress(host=host, port=port)
        assert await timeline_of(address, "cmpl-1") is None
