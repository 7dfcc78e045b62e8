"""A gateway's HTTP server that ends: every request that a client has sent is answered. Real sockets, no application."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from antiphon.services.gateway.edge.http.server.connection import BoundedConnection
from antiphon.services.gateway.edge.http.server.uvicorn_server import Server
from antiphon.shared import limits

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
DEADLINE_S = 60.0
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def answer(_scope: dict[str, Any], _receive: object, send: Send) -> None:
    await asyncio.sleep(0.1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def received(client: socket.socket) -> bytes:
    """Returns what arrives until the end of the answer or of the connection."""
    loop, found = asyncio.get_running_loop(), b""
    while not found.endswith(b"ok") and (data := await loop.sock_recv(client, 1000)):
        found += data
    return found


@asynccontextmanager
async def serving():
    """Yields the server, the task in which it runs, and its port."""
    config = uvicorn.Config(answer, log_config=None, lifespan="off", http=BoundedConnection, ws="none")
    server, listener = Server(config), socket.create_server(("127.0.0.1", 0), backlog=512)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield server, running, listener.getsockname()[1]
    await asyncio.wait_for(running, DEADLINE_S)


async def test_requests_on_new_connections_are_answered_by_a_server_that_ends():
    async with serving() as (server, _, port):
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for client in clients:
            client.setblocking(False)
            client.send(REQUEST)
        # In the next turn of its loop, asyncio accepts the connections; in the one after, the server leaves first.
        await asyncio.sleep(0)
        leaving = asyncio.create_task(server.leave())
        answers = await asyncio.gather(*map(received, clients))
        await leaving
        for client in clients:
            client.close()
    assert all(one.endswith(b"ok") for one in answers)


async def test_a_request_that_comes_after_its_connection_is_answered_and_the_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(limits, "FIRST_REQUEST_S", DEADLINE_S)
    async with serving() as (server, running, port):
        late, partial = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        partial[1].write(REQUEST[:20])
        while len(server.places) < 2:
            await asyncio.sleep(0.01)
        await server.leave()
        await asyncio.sleep(0.3)
        assert not running.done()
        late[1].write(REQUEST)
        partial[1].write(REQUEST[20:])
        for reader, writer in (late, partial):
            text = await reader.read()
            assert text.startswith(b"HTTP/1.1 200")
            assert text.endswith(b"ok")
            assert b"connection: close" in text.lower()
            writer.close()


async def test_a_response_in_progress_is_not_cut_off_for_the_request_after_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "FIRST_REQUEST_S", 0.0)
    monkeypatch.setattr(limits, "ACCEPT_LINGER_S", 0.0)
    async with serving() as (server, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST + REQUEST[:20])
        while not server.server_state.tasks:
            await asyncio.sleep(0.01)
        await server.leave()
        assert (await reader.read()).endswith(b"ok")
        writer.close()


async def test_a_server_does_not_wait_long_for_connections_without_a_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "FIRST_REQUEST_S", 2.0)
    async with serving() as (server, running, port):
        silent, idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        idle[1].write(REQUEST)
        await idle[0].readuntil(b"ok")
        await server.leave()
        ends = {name: asyncio.create_task(one[0].read()) for name, one in (("silent", silent), ("idle", idle))}
        async with asyncio.timeout(DEADLINE_S):
            assert await ends["idle"] == b""
            assert not ends["silent"].done()
            assert not running.done()
            assert await ends["silent"] == b""
        for _, writer in (silent, idle):
            writer.close()
