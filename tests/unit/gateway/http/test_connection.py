"""One connection of a gateway: how it ends, what it makes of upgrades, and whose place it takes. Real sockets."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.server import accepting, connection, uvicorn_server
from antiphon.services.gateway.edge.http.server.connection import BoundedConnection
from antiphon.services.gateway.edge.http.server.uvicorn_server import Server, connections_max
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.observability.rare_logs import RareLog

HEAD = b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{"
GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
TLS = Path(__file__).parents[3] / "system" / "tls"
DEADLINE_S = 60.0
"""Far beyond what a test needs: a connection that stays open fails the test."""


class Application:
    """Answers by path: `refused` at once, `read` with the size of the body, `held` when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, text = 401, b"refused"
        if scope["path"] == "/read":
            try:
                status, text = 200, b"read %d" % len(await request_body.read(scope["headers"], receive))
            except ServiceError as error:
                status, text = error.status, b"refused"
        elif scope["path"] == "/held":
            await self.release.wait()
            status, text = 200, b"held"
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(text))]}
        )
        await send({"type": "http.response.body", "body": text})


@asynccontextmanager
async def serving(**settings: str) -> AsyncIterator[tuple[Server, Application, int]]:
    app = Application()
    config = uvicorn.Config(app, log_config=None, lifespan="off", http=BoundedConnection, ws="none", **settings)  # type: ignore[arg-type]
    server, listener = Server(config), socket.create_server(("127.0.0.1", 0), backlog=2048)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, app, listener.getsockname()[1]
    finally:
        app.release.set()
        await server.leave()
        await asyncio.wait_for(running, DEADLINE_S)


async def answered(reader: asyncio.StreamReader) -> bytes:
    """Returns the head of an answer and its body in one."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head + await reader.readexactly(length)


async def until_closed(writer: asyncio.StreamWriter) -> int:
    """Sends a byte now and then until the connection is closed by the other side. Returns the number of bytes."""
    count = 0
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                writer.write(b" ")
                await writer.drain()
            except ConnectionError:
                return count
            count += 1
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("path", [b"refused", b"read"], ids=["before the body is read", "because the body is slow"])
async def test_bytes_after_an_early_answer_do_not_keep_its_connection_open(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 0.2)
    monkeypatch.setattr(limits, "BODY_READ_S", 0.1)
    async with serving() as (server, _, port):
        for head in (HEAD % path, b"POST /%b HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n" % path):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert b"connection: close" in await answered(reader)
            assert await reader.read() == b"", "the answer was the last one"
            await until_closed(writer)
            writer.close()
        assert len(server.places) == 0


async def test_a_client_that_sends_its_whole_body_first_reads_the_early_answer() -> None:
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /refused HTTP/1.1\r\ncontent-length: 30000000\r\n\r\n")
        for _ in range(30):
            writer.write(bytes(1_000_000))
            await writer.drain()
        assert (await answered(reader)).startswith(b"HTTP/1.1 401")
        writer.close()


async def test_a_connection_goes_on_after_an_answer_to_a_complete_request() -> None:
    async with serving() as (server, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"POST /refused HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
            assert b"connection: close" not in await answered(reader)
            assert len(server.places.idle) == 1
        writer.close()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"foo/2"])
@pytest.mark.parametrize("pieces", [1, 7, 1000])
async def test_an_upgrade_is_ignored_and_its_request_answered(protocol: bytes, pieces: int) -> None:
    asking = b"connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    head = b"POST /read HTTP/1.1\r\nhost: x\r\nupgrade: " + protocol + b"\r\n" + asking
    both = [
        head + b"content-length: 5\r\n\r\nhello",
        head + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ]
    data = b"".join(both) + GET % b"read"
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await asyncio.sleep(0)
        answers = [await answered(reader) for _ in range(3)]
        assert [one.rpartition(b"\r\n")[2] for one in answers] == [b"read 5", b"read 5", b"read 0"]
        writer.close()


@pytest.mark.parametrize("target", [b"127.0.0.1:22", b"/", b"/v1/models", b"*", b"http://x/"])
@pytest.mark.parametrize("fields", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n", b"content-length: 3\r\n"])
async def test_tunnels_are_refused(target: bytes, fields: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\nabc")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert not server.places.busy
    assert not [one for one in caplog.records if one.exc_info or "Fatal" in one.message]


async def test_thousands_of_requests_in_one_read_may_ask_for_another_protocol(caplog: pytest.LogCaptureFixture) -> None:
    one = b"GET /read HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(3000 * one)
        for _ in range(3000):
            assert (await answered(reader)).endswith(b"read 0")
        writer.close()
    assert not [one for one in caplog.records if one.exc_info or "Fatal" in one.message]


async def test_a_new_connection_is_served_when_others_hold_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "connections_max", lambda _: 20)
    async with serving() as (server, app, port):
        running = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _, writer in running:
            writer.write(GET % b"held")
        while len(server.places.busy) < 5:
            await asyncio.sleep(0.01)
        for opening in (b"", b"POST / HTTP/1.1\r\nx-half", HEAD % b"read"):
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            for _, writer in held:
                writer.write(opening)
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GET % b"read")
                assert (await answered(reader)).endswith(b"read 0")
                assert len(server.places) <= 20
                writer.close()
            assert len(server.places.busy) == 5
            for _, writer in held:
                writer.close()
        app.release.set()
        for reader, writer in running:
            assert (await answered(reader)).endswith(b"held")
            writer.close()


async def test_without_a_place_to_free_a_new_connection_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uvicorn_server, "connections_max", lambda _: 3)
    monkeypatch.setattr(connection, "_rare_log", RareLog(logging.getLogger(connection.__name__), DEADLINE_S))
    async with serving() as (server, app, port):
        running = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in running:
            writer.write(GET % b"held")
        while len(server.places.busy) < 3:
            await asyncio.sleep(0.01)
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert (await answered(reader)).startswith(b"HTTP/1.1 503")
            assert len(server.places) <= 4
            writer.close()
        assert sum("a connection was refused" in one.message for one in caplog.records) == 1, "not one line for each"
        app.release.set()
        for reader, writer in running:
            assert (await answered(reader)).endswith(b"held")
            writer.close()


async def test_tls_connections_end_and_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 0.2)
    monkeypatch.setattr(uvicorn_server, "connections_max", lambda _: 10)
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    async with serving(ssl_keyfile=str(TLS / "key.pem"), ssl_certfile=str(TLS / "certificate.pem")) as (
        server,
        _,
        port,
    ):
        plain = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        plain[-1][1].write(b"no handshake\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anyone)
        writer.write(HEAD % b"refused")
        assert (await answered(reader)).startswith(b"HTTP/1.1 401")
        await until_closed(writer)
        for _, one in (*plain, (reader, writer)):
            one.close()
        async with asyncio.timeout(DEADLINE_S):
            while len(server.places):
                await asyncio.sleep(0.01)


async def test_accepting_pauses_while_there_is_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "PAUSE_S", 0.01)
    monkeypatch.setattr(accepting, "_rare_log", RareLog(logging.getLogger(accepting.__name__), DEADLINE_S))
    refusals, real = iter(range(20)), socket.socket.accept

    def accept(listener: socket.socket) -> Any:
        if next(refusals, None) is not None:
            raise OSError(24, "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"read")
        assert (await answered(reader)).endswith(b"read 0")
        writer.close()
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1, lines


async def test_invalid_requests_are_answered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, _, port):
        for text in (b"\x16\x03\x01 no request\r\n\r\n", b"GET / HTTP/1.1\r\nbad header" + bytes(100_000)) * 25:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text)
            assert (await reader.read()).startswith(b"HTTP/1.1 4")
            writer.close()
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) <= 5


@pytest.mark.parametrize(
    ("descriptors", "count"), [(256, 128), (1024, 704), (100, 50), (10**6, limits.CONNECTIONS_MAX)]
)
def test_the_number_of_connections_follows_from_the_number_of_descriptors(descriptors: int, count: int) -> None:
    assert connections_max(descriptors) == count
