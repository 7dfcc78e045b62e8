"""The Responses API on a WebSocket: real sockets, a real server, and the client of `websockets`; a scripted backend."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.server import uvicorn_server
from antiphon.shared import limits
from antiphon.shared.security.api_keys import ApiKey, digest
from tests.integration.edge import CARD, Connection, ScriptedBackend, call, serving, text_batches

PATH = "/v1/responses"
TLS = Path(__file__).parents[1] / "system" / "tls"
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
DEADLINE_S = 60.0


@contextlib.asynccontextmanager
async def opened(port: int, key: str = "", **options: Any) -> AsyncIterator[ClientConnection]:
    if key:
        options["additional_headers"] = {"Authorization": f"Bearer {key}"}
    async with connect(f"ws://127.0.0.1:{port}{PATH}", **options) as socket:
        yield socket


async def send(socket: ClientConnection, **body: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", **body}))


async def turn(socket: ClientConnection, **body: Any) -> list[dict[str, Any]]:
    """Asks for a response, and returns its events."""
    if body:
        await send(socket, **body)
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(DEADLINE_S):
        while not events or events[-1]["type"] not in TERMINAL:
            text = await socket.recv()
            assert isinstance(text, str)
            events.append(json.loads(text))
    return events


async def response(socket: ClientConnection, **body: Any) -> dict[str, Any]:
    event = (await turn(socket, **body))[-1]
    assert event["type"] == "response.completed", event
    return event["response"]


async def error(socket: ClientConnection, **body: Any) -> dict[str, Any]:
    (event,) = await turn(socket, **body)
    assert event["type"] == "error"
    return {"status": event["status"], **event["error"]}


async def closed(socket: ClientConnection) -> tuple[int, str]:
    """How the server closes the connection, after all messages are read."""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await socket.recv()
        await socket.wait_closed()
    assert socket.close_code is not None
    return socket.close_code, socket.close_reason or ""


def said(backend: ScriptedBackend) -> list[str]:
    return [message.content for message in backend.requests[-1].inputs.messages]


async def test_a_response_has_the_events_of_a_streamed_post():
    async with serving(ScriptedBackend()) as port, opened(port) as socket:
        posted = (await call(port, "POST", PATH, {"input": "hi", "stream": True})).body.decode()
        expected = [json.loads(one.partition("data: ")[2]) for one in posted.split("\n\n") if "data: " in one]
        events = await turn(socket, input="hi")
        assert [one["type"] for one in events] == [one["type"] for one in expected]
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        made = events[-1]["response"]
        assert made["output"][0]["content"][0]["text"] == "Good day"
        assert (await call(port, "GET", f"{PATH}/{made['id']}")).json == made, "it is stored like any other"


async def test_a_response_that_is_not_stored_is_continued_on_its_connection_alone():
    backend = ScriptedBackend()
    async with serving(backend) as port, opened(port) as socket:
        first = await response(socket, input="one", store=False)
        second = await response(socket, input="two", store=False, previous_response_id=first["id"])
        assert said(backend) == ["one", "Good day", "two"]
        assert second["previous_response_id"] == first["id"]
        await response(socket, input="fork", store=False, previous_response_id=first["id"])
        assert said(backend) == ["one", "Good day", "fork"]
        assert (await call(port, "GET", f"{PATH}/{first['id']}")).status == 404
        async with opened(port) as other:
            unknown = await error(other, input="x", store=False, previous_response_id=first["id"])
            assert (unknown["status"], unknown["code"]) == (400, "previous_response_not_found")
            assert unknown["param"] == "previous_response_id"
            await response(other, input="anew", store=False)


async def test_a_stored_response_is_continued_from_any_connection():
    backend = ScriptedBackend()
    async with serving(backend) as port, opened(port) as socket, opened(port) as other:
        first = await response(socket, input="one")
        await response(other, input="two", previous_response_id=first["id"])
        assert said(backend) == ["one", "Good day", "two"]


async def test_a_failed_continuation_forgets_the_response_that_it_continued():
    async with serving(ScriptedBackend()) as port, opened(port) as socket:
        first = await response(socket, input="one", store=False)
        result = {"type": "function_call_output", "call_id": "call_unknown", "output": "?"}
        failed = await error(socket, input=[result], store=False, previous_response_id=first["id"])
        assert (failed["status"], failed["param"]) == (400, "input")
        assert "call_unknown" in failed["message"]
        again = await error(socket, input="two", store=False, previous_response_id=first["id"])
        assert again["code"] == "previous_response_not_found"


async def test_the_oldest_of_many_responses_is_forgotten():
    async with serving(ScriptedBackend()) as port, opened(port) as socket:
        made = [
            await response(socket, input=f"{number}", store=False) for number in range(limits.SOCKET_RESPONSES_MAX + 1)
        ]
        await response(socket, input="x", store=False, previous_response_id=made[1]["id"])
        unknown = await error(socket, input="x", store=False, previous_response_id=made[0]["id"])
        assert unknown["code"] == "previous_response_not_found"


async def test_what_is_only_prepared_can_be_continued():
    backend = ScriptedBackend()
    async with serving(backend) as port, opened(port) as socket:
        prepared = await response(socket, input=[], instructions="Be brief.", store=False, generate=False)
        assert (prepared["output"], prepared["max_output_tokens"]) == ([], None)
        assert backend.requests[0].params.max_tokens == 1, "its prompt is computed"
        assert said(backend) == ["Be brief.", ""]
        warm = await response(socket, input="long text", store=False, generate=False)
        await response(socket, input="and?", store=False, previous_response_id=warm["id"])
        assert said(backend) == ["long text", "and?"]


async def test_codex_warms_up_and_continues():
    backend = ScriptedBackend([replace(CARD, tool_format="hermes")])
    tool = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}}
    same: dict[str, Any] = {
        "model": "org/toy",
        "instructions": "You are a coding agent.",
        "tools": [tool],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}
    beta = {"OpenAI-Beta": "responses_websockets=2026-02-06"}
    async with serving(backend) as port, opened(port, additional_headers=beta, compression="deflate") as socket:
        warm = await response(socket, **same, input=[], generate=False)
        await response(socket, **same, input=[question], previous_response_id=warm["id"])
    assert said(backend) == ["You are a coding agent.", "List the files."]


async def test_responses_are_made_one_after_the_other():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, opened(port) as socket:
        for text in ("one", "two"):
            await send(socket, input=text)
        first = await backend.generations.get()
        await asyncio.sleep(0.1)
        assert backend.generations.empty(), "the second waits for the first"
        first.put(*text_batches("1"), None)
        assert (await turn(socket))[-1]["response"]["output"][0]["content"][0]["text"] == "1"
        (await backend.generations.get()).put(*text_batches("2"), None)
        assert (await turn(socket))[-1]["response"]["output"][0]["content"][0]["text"] == "2"


async def test_a_client_that_leaves_ends_its_response():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port:
        async with opened(port) as socket:
            await send(socket, input="hi")
            generation = await backend.generations.get()
            generation.put(*text_batches("a", "b")[:1])
            while json.loads(await socket.recv())["type"] != "response.output_text.delta":
                pass
        async with asyncio.timeout(DEADLINE_S):
            await generation.stopped.wait()
        assert generation.cancelled == ["abort"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": False}, "stream"),
        ({"background": True}, "background"),
        ({"stream_id": "a"}, "stream_id"),
        ({"generate": "no"}, "generate"),
        ({"temperature": -1}, "temperature"),
        ({"type": "response.steer"}, "type"),
    ],
)
async def test_what_is_wrong_is_told_and_the_connection_goes_on(body: dict[str, Any], param: str):
    async with serving(ScriptedBackend()) as port, opened(port) as socket:
        refused = await error(socket, **{"input": "hi", **body})
        assert (refused["status"], refused["param"]) == (400, param)
        await response(socket, input="hi", stream=True, background=False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"type": 1}', "\x00"])
async def test_messages_that_are_no_events_are_refused(text: str):
    async with serving(ScriptedBackend()) as port, opened(port) as socket:
        await socket.send(text)
        assert json.loads(await socket.recv())["status"] == 400
        await socket.send(json.dumps({"type": "response.processed", "response_id": "resp_x"}))  # asks for nothing
        await response(socket, input="hi")


async def test_a_connection_needs_what_a_request_needs():
    keys = ApiKeys("secret")
    async with serving(ScriptedBackend(), keys=keys) as port:
        for key in ("", "wrong"):
            with pytest.raises(InvalidStatus) as refused:
                async with opened(port, key):
                    pass
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
        async with opened(port, "secret") as socket:
            await response(socket, input="hi")
    async with serving(ScriptedBackend()) as port:
        with pytest.raises(InvalidStatus) as refused:
            async with opened(port, origin="https://stranger.example"):
                pass
        assert refused.value.response.status_code == 403
        async with opened(port, origin=f"http://127.0.0.1:{port}") as socket:
            await response(socket, input="hi")


async def test_a_key_that_is_removed_gets_no_further_responses():
    keys = ApiKeys("", file_keys=[ApiKey(name="alice", digests=(digest(b"secret"),))])
    async with serving(ScriptedBackend(), keys=keys) as port, opened(port, "secret") as socket:
        await response(socket, input="hi")
        keys.replace([])
        assert (await error(socket, input="hi"))["code"] == "invalid_api_key"


async def test_other_paths_are_no_sockets():
    async with serving(ScriptedBackend()) as port:
        for path, status in (("/v1/chat/completions", 405), ("/v1/nothing", 404), ("/nothing/v1/responses", 403)):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://127.0.0.1:{port}{path}"):
                    pass
            assert refused.value.response.status_code == status


async def test_a_connection_that_is_too_old_ends_after_its_response(monkeypatch: pytest.MonkeyPatch):
    backend = ScriptedBackend(manual=True)
    monkeypatch.setattr(limits, "SOCKET_AGE_S", 0.3)
    async with serving(backend) as port, opened(port) as socket:
        await send(socket, input="hi")
        generation = await backend.generations.get()
        await asyncio.sleep(0.5)
        refused = await error(socket, input="too late")
        assert (refused["status"], refused["code"]) == (400, "websocket_connection_limit_reached")
        generation.put(*text_batches("Good day"), None)
        assert (await turn(socket))[-1]["type"] == "response.completed"
        assert (await turn(socket))[-1]["error"]["code"] == "websocket_connection_limit_reached"
        assert (await closed(socket))[0] == 1001


async def test_a_server_that_ends_completes_the_response_and_closes():
    backend = ScriptedBackend(manual=True)
    async with contextlib.AsyncExitStack() as sockets:
        async with serving(backend) as port:
            idle, busy = [await sockets.enter_async_context(opened(port)) for _ in range(2)]
            for text in ("hi", "waits"):
                await send(busy, input=text)
            generation = await backend.generations.get()
            ending = asyncio.create_task(closed(idle))

            async def complete() -> None:
                assert await ending == (1012, "The server is shutting down. Connect again.")
                generation.put(*text_batches("Good day"), None)

            completing = asyncio.create_task(complete())
        await completing
        assert (await turn(busy))[-1]["type"] == "response.completed"
        assert (await turn(busy))[-1]["error"]["code"] == "draining"
        assert (await closed(busy))[0] == 1012


async def test_messages_are_bounded_in_size_and_number(monkeypatch: pytest.MonkeyPatch):
    backend = ScriptedBackend(manual=True)
    monkeypatch.setattr(limits, "BODY_BYTES_MAX", 20_000)
    async with serving(backend) as port:
        async with opened(port) as socket:
            await send(socket, input="a" * 30_000)
            assert (await closed(socket))[0] == 1009
        async with opened(port) as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.send("x" for _ in range(limits.SOCKET_PIECES_MAX + 2))
            assert (await closed(socket))[0] == 1009
        async with opened(port) as socket:
            for number in range(limits.SOCKET_MESSAGES_MAX + 2):
                await send(socket, input=f"{number}")
                if number == 0:
                    generation = await backend.generations.get()
            assert (await error(socket))["code"] == "rate_limit_exceeded"
            generation.put(*text_batches("Good day"), None)
            assert (await turn(socket))[-1]["type"] == "response.completed"


async def unending() -> AsyncIterator[str]:
    """The pieces of a message whose end does not come."""
    yield "a" * 15_000
    await asyncio.Event().wait()


async def test_waiting_messages_take_part_in_the_room_for_bodies(monkeypatch: pytest.MonkeyPatch):
    backend = ScriptedBackend(manual=True)
    monkeypatch.setattr(limits, "BODIES_BYTES_MAX", 50_000)
    async with serving(backend) as port:
        async with opened(port) as socket:
            for _ in range(2):
                await send(socket, input="a" * 20_000)
            generation = await backend.generations.get()
            assert (await call(port, "POST", PATH, {"input": "a" * 20_000})).status == 503
            assert (await error(socket, input="a" * 20_000))["code"] == "server_is_overloaded"
            sending = asyncio.create_task(socket.send(unending()))
            assert (await closed(socket))[0] == 1013
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            await generation.stopped.wait()
        async with opened(port) as socket:
            await send(socket, input="a" * 20_000)
            (await backend.generations.get()).put(*text_batches("Good day"), None)
            assert (await turn(socket))[-1]["type"] == "response.completed", "the room is given back"


HANDSHAKE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def frame(text: bytes) -> bytes:
    """A short message of a client in one frame; its mask changes nothing."""
    return bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text


async def test_a_client_that_runs_a_tool_need_not_answer_pings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SOCKET_PING_S", 0.1)
    async with serving(ScriptedBackend()) as port, Connection(port) as raw:
        await raw.send("GET", PATH, headers={**HANDSHAKE, "content-length": "0"})
        assert (await raw.head())[0] == 101
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(4):
                assert (await raw.reader.readexactly(6))[:2] == b"\x89\x04", "a ping"
            raw.writer.write(frame(b"{}"))
            assert b"Missing required parameter: 'type'" in await raw.reader.readuntil(b"'type'")


async def test_a_message_may_come_right_after_the_handshake():
    async with serving(ScriptedBackend()) as port, Connection(port) as raw:
        await raw.send("GET", PATH, frame(b"{}"), headers={**HANDSHAKE, "content-length": "0"})
        assert (await raw.head())[0] == 101
        async with asyncio.timeout(DEADLINE_S):
            assert b"Missing required parameter: 'type'" in await raw.reader.readuntil(b"'type'")


@pytest.mark.parametrize(
    "wrong",
    [{"sec-websocket-key": "x"}, {"sec-websocket-version": "7"}, {"x-long": "a" * 10_000}, {"content-length": "5"}],
)
async def test_a_wrong_handshake_is_answered(wrong: dict[str, str]):
    async with serving(ScriptedBackend()) as port, Connection(port) as raw:
        await raw.send("GET", PATH, headers={**HANDSHAKE, "content-length": "0", **wrong})
        async with asyncio.timeout(DEADLINE_S):
            assert (await raw.head())[0] in (400, 426)
            await raw.reader.read()


async def test_an_idle_connection_makes_room_and_a_busy_one_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uvicorn_server, "connections_max", lambda _: 2)
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, opened(port) as busy, opened(port) as idle:
        await send(busy, input="hi")
        generation = await backend.generations.get()
        assert (await call(port, "GET", "/livez")).status == 200
        assert (await closed(idle))[0] == 1006
        generation.put(*text_batches("Good day"), None)
        assert (await turn(busy))[-1]["type"] == "response.completed"


async def test_a_connection_may_be_behind_a_prefix_and_tls():
    files: dict[str, Any] = {"ssl_certfile": str(TLS / "certificate.pem"), "ssl_keyfile": str(TLS / "key.pem")}
    async with serving(ScriptedBackend(), root_path="/ai", **files) as port:
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        async with connect(f"wss://127.0.0.1:{port}/ai{PATH}", ssl=trusting) as socket:
            first = await response(socket, input="one", store=False)
            await response(socket, input="two", store=False, previous_response_id=first["id"])


async def test_openais_client_uses_the_socket():
    async with serving(ScriptedBackend()) as port:
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        async with client, client.responses.connect() as connection:
            await connection.response.create(model="org/toy", input="hi", store=False)
            events = [await connection.recv() for _ in range(10)]
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == "Good day"
            await connection.response.create(model="org/toy", input="hi", previous_response_id="resp_x")
            failed = await connection.recv()
            assert failed.type == "error"
            assert failed.error.code == "previous_response_not_found"
