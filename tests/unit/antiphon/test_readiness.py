"""The launcher's readiness message and the small HTTP client behind it."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator

import pytest

from antiphon.async_client import get
from antiphon.launch import readiness
from antiphon.launch.readiness import ServerAddress, announce, ready_message


class Server:
    """Answers /readyz with 503 until `ready`, then as a gateway would."""

    def __init__(self) -> None:
        self.port = 0
        self.ready_after = 3
        self.tokens: list[str] = []
        self.listed = ["a 'model'", "another"]
        """The models; at first only the first of them."""
        self._asked = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = request.split()[1]
        if path == "/readyz":
            self._asked += 1
            status, body = (
                ("200 OK", "{}") if self._asked > self.ready_after else ("503 Nope", '{"reason": "no engine yet"}')
            )
        else:
            self.tokens += [line.split()[2] for line in request.splitlines() if line.startswith("Authorization")]
            listed = self.listed if len(self.tokens) > 1 else self.listed[:1]
            status, body = "200 OK", json.dumps({"data": [{"id": name} for name in listed]})
        writer.write(f"HTTP/1.1 {status}\r\nContent-Type: x\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    listening.close()
    await listening.wait_closed()


async def test_the_message_comes_when_the_server_is_ready(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "REMINDER_S", 0.0)
    said: list[str] = []
    pids = {"engine-1": 42}
    models = ["another", "a 'model'"]
    place = ServerAddress(host="0.0.0.0", port=server.port, token="sk-4711")
    await announce(place, models, lambda: pids, lambda _name, line: said.append(line))
    out = capsys.readouterr().out
    assert f"http://127.0.0.1:{server.port}/v1\n" in out
    assert "another, a 'model'" in out
    assert "engine-1 42" in out
    assert "sk-4711" not in out
    assert server.tokens == ["sk-4711", "sk-4711"]
    assert any("waiting for the model 'another'" in line for line in said)
    assert any("no engine yet" in line for line in said)


def test_the_command_line_to_try_survives_odd_names() -> None:
    text = ready_message(ServerAddress(host="::1", port=80), ["it's"], {}, 1.0)
    assert "http://[::1]:80/v1" in text
    line = next(line for line in text.splitlines() if "curl" in line)
    assert json.loads(shlex.split(line)[-1])["model"] == "it's"


async def test_a_server_without_openais_api_is_ready_by_its_probe_and_shows_generate(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ServerAddress(host="127.0.0.1", port=server.port, token="key", openai=False)
    await announce(place, ["never listed"], dict, lambda _name, _line: None)
    out = capsys.readouterr().out
    assert f"http://127.0.0.1:{server.port}/generate\n" in out
    assert server.tokens == []
    assert "antiphon chat" not in out
    line = next(line for line in out.splitlines() if "curl" in line)
    assert json.loads(shlex.split(line)[-1])["prompt"]


async def test_nobody_there_is_status_0() -> None:
    assert (await get("127.0.0.1", 1, "/readyz")).status == 0


async def test_a_server_that_is_silent_or_talks_nonsense_is_status_0() -> None:
    async def nonsense(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\n")
        writer.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    for handler in (nonsense, silent):
        listening = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        assert (await get("127.0.0.1", port, "/", timeout_s=0.2)).status == 0
        listening.close()
        await listening.wait_closed()
