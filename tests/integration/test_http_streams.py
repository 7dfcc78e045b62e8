"""Streams, disconnects and slow clients at the HTTP edge, over raw sockets. The backend is scripted: see `edge`."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.errors import ServiceError
from tests.integration.edge import (
    Connection,
    Reply,
    ScriptedBackend,
    ScriptedGeneration,
    call,
    endings,
    serving,
    text_batches,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION: dict[str, Any] = {"prompt": "hi", "stream": True}
GOLDEN = Path(__file__).parents[1] / "golden"
REAL_DELAY_S = 60.0


def update(text: str, index: int = 0, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(index=index, text=text, **{"token_ids": (1,), **fields})


async def start(connection: Connection, body: Any, path: str = "/v1/chat/completions") -> None:
    await connection.send("POST", path, json.dumps(body).encode())


async def cancelled(generation: ScriptedGeneration) -> None:
    """Returns when the edge has cancelled it."""
    await asyncio.wait_for(generation.stopped.wait(), REAL_DELAY_S)


def normal(stream: bytes) -> str:
    """A stream with its id and time replaced."""
    text = re.sub(r'"created":\d+', '"created":1700000000', stream.decode())
    return re.sub(r'"(cmpl|chatcmpl)-[A-Za-z0-9]{22}"', rf'"\1-{"A" * 22}"', text)


@pytest.mark.spec(
    "S-API-034", "S-API-085", "S-API-086", "S-API-087", "S-API-088", "S-API-089", "S-API-090", "S-DEP-041"
)
@pytest.mark.parametrize(("name", "path", "body"), [
    ("chat_stream.txt", "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    ("completion_stream.txt", "/v1/completions", COMPLETION),
])  # fmt: skip
async def test_a_whole_stream_is_what_it_was(name: str, path: str, body: Any):
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", path, body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert normal(reply.body) == (GOLDEN / name).read_text()


@pytest.mark.spec("S-API-089")
async def test_all_chunks_share_id_time_model_and_fingerprint():
    async with serving(ScriptedBackend(reply=lambda _: text_batches(*"abcdefgh"))) as port:
        events = (await call(port, "POST", "/v1/chat/completions", CHAT)).events
    assert events.pop() == "[DONE]"
    assert len({(one["id"], one["created"], one["model"], one["system_fingerprint"]) for one in events}) == 1


async def test_each_batch_of_updates_is_one_write_and_not_held_back():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, Connection(port) as connection:
        await start(connection, {**COMPLETION, "n": 3}, "/v1/completions")
        generation = await backend.generations.get()
        generation.put([update("a", 0), update("b", 1), update("c", 2)])
        await connection.head()
        assert (await connection.chunk()).count(b"data: ") == 3
        generation.put([update("d", 0), update("e", 2)])
        assert (await connection.chunk()).count(b"data: ") == 2
        generation.put([update("", 0), update("", 1)])
        generation.put([update("f", index, finish_reason="stop") for index in range(3)], None)
        assert (await connection.chunk()).count(b'"finish_reason":"stop"') == 3
        assert await connection.rest() == b"data: [DONE]\n\n"


async def test_tokens_that_come_together_share_a_chunk():
    backend = ScriptedBackend(reply=lambda _: [[update("a"), update("b"), update("c", finish_reason="length")]])
    async with serving(backend) as port:
        events = (await call(port, "POST", "/v1/completions", COMPLETION)).events
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["abc"]


async def test_silence_is_filled_with_comments_that_clients_skip():
    backend = ScriptedBackend(manual=True)
    async with serving(backend, keep_alive_s=0.02) as port, Connection(port) as connection:
        await start(connection, CHAT)
        generation = await backend.generations.get()
        assert (await connection.head())[0] == 200
        assert await connection.chunk() == b": keep-alive\n\n"
        assert await connection.chunk() == b": keep-alive\n\n"
        generation.put([update("a", finish_reason="stop")], None)
        body = await connection.rest()
    assert Reply(200, {}, body).events[-1] == "[DONE]"


@pytest.mark.matrix("G-07")
@pytest.mark.parametrize("first", [True, False])
async def test_an_error_after_the_first_byte_ends_the_stream_without_done(first: bool):
    backend = ScriptedBackend(manual=True)
    async with serving(backend, keep_alive_s=15 if first else 0.01) as port, Connection(port) as connection:
        await start(connection, CHAT)
        generation = await backend.generations.get()
        if first:
            generation.put([update("a")])
        assert (await connection.head())[0] == 200
        await connection.chunk()
        generation.put(ServiceError("engine_failure", "The engine failed."))
        events = Reply(200, {}, await connection.rest()).events
        metrics = (await call(port, "GET", "/metrics")).body
    assert events == [
        {"error": {"message": "The engine failed.", "type": "server_error", "param": None, "code": "engine_failure"}}
    ]
    assert b'antiphon:request_errors_total{code="engine_failure"} 1.0' in metrics
    assert b'vllm:request_success_total{finished_reason="error",model_name="org/toy"} 1.0' in metrics


async def test_our_own_fault_in_mid_stream_is_told_without_details(caplog: pytest.LogCaptureFixture):
    backend, recorder = ScriptedBackend(reply=lambda _: [[update("a")], KeyError("secret detail")]), Recorder(8)
    async with serving(backend, recorder=recorder) as port:
        reply = await call(port, "POST", "/v1/chat/completions", CHAT)
    assert reply.events[-1]["error"]["code"] == "internal_error"
    assert await endings(recorder) == [("cancelled", "internal_error")]
    assert b"secret" not in reply.body
    assert "[DONE]" not in reply.events
    assert sum("secret detail" in (record.exc_text or "") for record in caplog.records) == 1


async def test_a_stream_that_breaks_off_does_not_look_complete():
    backend = ScriptedBackend(reply=lambda _: text_batches("a", "b")[:1])
    async with serving(backend) as port:
        events = (await call(port, "POST", "/v1/chat/completions", CHAT)).events
    assert events[-1]["error"]["code"] == "internal_error"


@pytest.mark.matrix("G-01")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [CHAT, COMPLETION])
async def test_a_client_that_leaves_before_the_first_token_cancels_the_generation(stream: bool, body: Any):
    backend = ScriptedBackend(manual=True)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    recorder = Recorder(8)
    async with serving(backend, recorder=recorder) as port:
        connection = Connection(port)
        async with connection:
            await start(connection, {**body, "stream": stream}, path)
            generation = await backend.generations.get()
        await cancelled(generation)
        assert generation.cancelled == ["abort"]
        assert await endings(recorder) == [("cancelled", "client_closed_request")]
        metrics = (await call(port, "GET", "/metrics")).body
    assert b'vllm:request_success_total{finished_reason="abort",model_name="org/toy"} 1.0' in metrics
    assert b'antiphon:request_errors_total{code="client_closed_request"} 1.0' in metrics


@pytest.mark.matrix("G-01")
async def test_a_client_that_leaves_during_prefill_cancels_the_generation():
    backend = ScriptedBackend(manual=True)
    async with serving(backend, keep_alive_s=0.01) as port:
        async with Connection(port) as connection:
            await start(connection, CHAT)
            generation = await backend.generations.get()
            await connection.head()
            await connection.chunk()
        await cancelled(generation)


@pytest.mark.matrix("G-01")
@pytest.mark.parametrize("abrupt", [False, True])
async def test_a_client_that_leaves_in_mid_stream_cancels_the_generation(abrupt: bool):
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port:
        async with Connection(port) as connection:
            await start(connection, CHAT)
            generation = await backend.generations.get()
            generation.put([update("a")])
            await connection.head()
            await connection.chunk()
            if abrupt:
                raw = connection.writer.get_extra_info("socket")
                # Closing with a linger time of zero resets the connection.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await cancelled(generation)
        assert generation.cancelled == ["abort"]


async def test_a_client_that_leaves_while_it_sends_its_body_starts_nothing():
    backend = ScriptedBackend()
    async with serving(backend) as port:
        async with Connection(port) as connection:
            await connection.send("POST", "/v1/completions", b'{"prompt"', {"content-length": "100"})
        assert (await call(port, "POST", "/v1/completions", COMPLETION)).status == 200
    assert len(backend.requests) == 1


async def test_one_client_s_leaving_does_not_touch_the_others():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, Connection(port) as staying:
        await start(staying, CHAT)
        kept = await backend.generations.get()
        async with Connection(port) as leaving:
            await start(leaving, CHAT)
            dropped = await backend.generations.get()
        await cancelled(dropped)
        kept.put(*text_batches("a", "b"), None)
        assert (await staying.reply()).events[-1] == "[DONE]"
        await cancelled(kept)
        assert kept.cancelled == ["stop"]


async def test_a_client_that_stays_connected_may_send_its_next_request():
    async with serving(ScriptedBackend()) as port, Connection(port) as connection:
        for stream in (True, False, True):
            await start(connection, {**CHAT, "stream": stream})
            assert (await connection.reply()).status == 200


@pytest.mark.matrix("G-03")
async def test_a_slow_client_holds_back_its_own_stream_only_and_loses_nothing():
    backend = ScriptedBackend(manual=True)
    # More than the kernel's own buffers take.
    pieces, text = 1500, "x" * 16_000
    async with serving(backend) as port, Connection(port) as connection:
        transport = connection.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        await start(connection, COMPLETION, "/v1/completions")
        generation = await backend.generations.get()
        generation.put(*[[update(text)] for _ in range(pieces)])
        while (waiting := generation.waiting) != await settled(generation, waiting):
            pass
        # The server has stopped taking tokens for it long before the end: what it holds is bounded.
        assert generation.waiting > pieces // 4
        assert (await call(port, "GET", "/livez")).status == 200
        generation.put([update("", finish_reason="length")], None)
        transport.resume_reading()
        reply = await connection.reply()
    assert reply.events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == text * pieces


async def settled(generation: ScriptedGeneration, before: int) -> int:
    """The number of waiting steps a little later."""
    for _ in range(200):
        await asyncio.sleep(0)
    return generation.waiting


async def test_http_1_0_clients_get_a_stream_that_ends_with_the_connection():
    async with serving(ScriptedBackend()) as port, Connection(port) as connection:
        body = json.dumps(COMPLETION).encode()
        connection.writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        everything = await connection.reader.read()
    assert b"data: [DONE]\n\n" in everything
