"""Parts of a streamed response that are written past the application's `send`. Real sockets."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from services.gateway.edge.http import sse
from services.gateway.edge.http.server.connection import CHUNKS, BoundedConnection
from services.gateway.edge.http.server.places import Places

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def serving(app: Any):
    """Yields the port of a server with this application."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", http=BoundedConnection, ws="none")
    config.load()
    state, places = uvicorn.Server(config).server_state, Places(100)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedConnection(config, state, {}, place=places.take()), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_both_ways_write_to_one_response_in_order():
    async def app(scope: dict[str, Any], _receive: object, send: Any) -> None:
        channel = sse.EventChannel(send, keep_alive_s=0, chunks=scope[CHUNKS])
        assert not channel.is_writable, "the response has not begun"
        await channel.write(b"data: 1\n\n")
        assert channel.is_writable
        channel.write_now(b"data: 2\n\n")
        await channel.write(b"data: 3\n\n")
        channel.write_now(b"data: 4\n\n" * 5)
        await channel.end(b"data: 5\n\n")
        assert not channel.is_writable, "the response is complete"

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"transfer-encoding: chunked" in head
    assert body == (
        b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n9\r\ndata: 3\n\n\r\n"
        b"2d\r\n" + b"data: 4\n\n" * 5 + b"\r\n9\r\ndata: 5\n\n\r\n0\r\n\r\n"
    )


async def test_a_client_that_does_not_read_or_is_gone_makes_the_channel_not_writable():
    found: list[bool] = []
    is_full, is_gone = asyncio.Event(), asyncio.Event()

    async def app(scope: dict[str, Any], _receive: object, send: Any) -> None:
        channel = sse.EventChannel(send, keep_alive_s=0, chunks=scope[CHUNKS])
        await channel.write(b"data: 1\n\n")
        while channel.is_writable:
            channel.write_now(b"data: " + b"x" * 100_000 + b"\n\n")
        is_full.set()
        await channel.write(b"data: 2\n\n")  # returns when the client has read
        found.append(channel.is_writable)
        await is_gone.wait()
        found.append(channel.is_writable)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await is_full.wait()
        while not found:
            await reader.read(1_000_000)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        is_gone.set()
        await asyncio.sleep(0.1)
    assert found == [True, False]


def test_a_channel_without_the_connection_writes_nothing_at_once():
    async def send(_message: object) -> None:
        pass

    assert not sse.EventChannel(send, keep_alive_s=0).is_writable
