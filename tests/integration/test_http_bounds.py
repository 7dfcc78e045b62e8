"""What a client can make the HTTP server hold: headers, bodies and connections that never end; names of all kinds."""

import asyncio
import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from antiphon.shared import limits
from tests.integration.edge import Connection, ScriptedBackend, call, serving

NAMES = [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "a/../../b", "a\0b", "%00", ".", "..", "a\\..\\b",
    "\u2215etc\u2215passwd", "file:///etc/passwd", "org/toy/../../x", "x" * 10_000, "~root", "$HOME", "a;b",
    "\u202etxt",
]  # fmt: skip


@pytest.mark.matrix("G-09")
async def test_headers_beyond_their_size_are_refused():
    async with serving(ScriptedBackend()) as port:
        fits = await call(port, "GET", "/v1/models", headers={"x-long": "a" * (limits.HEADER_BYTES_MAX - 1000)})
        assert fits.status == 200
        one = await call(port, "GET", "/v1/models", headers={"x-long": "a" * limits.HEADER_BYTES_MAX})
        assert one.status == 431
        assert str(limits.HEADER_BYTES_MAX) in one.error["message"]
        many = await call(port, "GET", "/v1/models", headers={f"x-{i}": "a" * 1000 for i in range(80)})
        assert many.status == 431
        path = await call(port, "GET", "/v1/models/" + "a" * limits.HEADER_BYTES_MAX)
        assert path.status == 431


@pytest.mark.matrix("G-09")
async def test_a_header_without_end_is_refused_and_not_kept():
    async with serving(ScriptedBackend()) as port, Connection(port) as connection:
        connection.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-endless: ")
        for _ in range(limits.HEADER_BYTES_MAX // 4096 + 1):
            connection.writer.write(b"a" * 4096)
            await connection.writer.drain()
        assert (await connection.reply()).status == 431


@pytest.mark.matrix("G-09")
async def test_connections_whose_requests_never_come_are_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(limits, "HEADER_READ_S", 0.5)
    async with serving(ScriptedBackend()) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in slow[100:]:
            writer.write(b"GET / HTTP/1.1\r\nhost")
        assert (await call(port, "GET", "/v1/models")).status == 200
        async with asyncio.timeout(60):
            answers = [await reader.read() for reader, _ in slow]
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        for _, writer in slow:
            writer.close()


async def test_a_connection_in_use_is_not_closed_for_its_age(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HEADER_READ_S", 0.3)
    async with serving(ScriptedBackend()) as port, Connection(port) as connection:
        for _ in range(4):
            await connection.send("GET", "/v1/models")
            assert (await connection.reply()).status == 200
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)  # idle: the time for headers does not run between requests
        await connection.send("GET", "/v1/models")
        assert (await connection.reply()).status == 200


async def test_what_is_no_http_gets_an_error_object():
    async with serving(ScriptedBackend()) as port, Connection(port) as connection:
        connection.writer.write(b"\x16\x03\x01 this is no request\r\n\r\n")
        reply = await connection.reply()
        assert reply.status == 400
        assert reply.error["message"]


@pytest.mark.matrix("S-07")
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_names_of_models_and_files_reach_no_file(name: str, monkeypatch: pytest.MonkeyPatch):
    touched: list[str] = []

    def spy(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: object, *args: Any, **kwargs: Any) -> Any:
            touched.append(str(path))
            return real(path, *args, **kwargs)

        return opened

    async with serving(ScriptedBackend()) as port:
        for module, function in ((builtins, "open"), (io, "open"), (os, "open")):
            monkeypatch.setattr(module, function, spy(getattr(module, function)))
        for path in ("/v1/models/", "/console/", "/v1/requests/", "/v1/responses/"):
            reply = await call(port, "GET", path + quote(name, safe=""))
            assert reply.status in (400, 404), (path, reply.status)
        for path, body in (
            ("/v1/completions", {"model": name, "prompt": "x"}),
            ("/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "x"}]}),
        ):
            reply = await call(port, "POST", path, body)
            assert reply.status in (400, 404), (path, reply.status)
            assert len(reply.body) < 2000 + 2 * len(name)
    assert not touched
    await asyncio.to_thread(Path(__file__).read_bytes)
    assert touched == [__file__], "files that are opened are seen"
