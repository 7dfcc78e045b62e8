"""Limits, deadlines and usage records as a client and an operator see them. The backend is scripted: see `edge`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.services.gateway.edge.access.usage import Receiver, UsageLedger
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import UsageRecord
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import Connection, Reply, ScriptedBackend, call, serving, text_batches
from tests.unit.gateway.http.test_multipart import CONTENT_TYPE, form

HELLO = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
KEY_FILE = """
[[keys]]
name = "slow"
key = "sk-slow"
requests-per-minute = 2
tokens-per-minute = 600

[[keys]]
name = "narrow"
key = "sk-narrow"
concurrent-requests = 1

[[keys]]
name = "triple"
key = "sk-triple"
concurrent-requests = 3

[[keys]]
name = "free"
key = "sk-free"
"""


class Records:
    """A receiver of usage records."""

    def __init__(self) -> None:
        self.all: list[UsageRecord] = []
        self.ledger = UsageLedger("gateway-1", [Receiver("test", self._take)])

    async def _take(self, records: Any) -> None:
        self.all += records

    async def wait(self, count: int) -> list[UsageRecord]:
        async with asyncio.timeout(60):
            while len(self.all) < count:
                await asyncio.sleep(0.01)
        return self.all


@contextlib.asynccontextmanager
async def limited(backend: ScriptedBackend, records: Records | None = None, **settings: Any) -> AsyncIterator[int]:
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    async with serving(backend, keys=keys, usage=(records or Records()).ledger, **settings) as port:
        yield port


async def ask(port: int, key: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    with_key = {"authorization": f"Bearer {key}", **(headers or {})}
    return await call(port, "POST", CHAT, {"messages": HELLO, **fields}, with_key)


async def test_a_limited_key_is_told_what_is_left_and_when_to_come_back():
    async with limited(ScriptedBackend()) as port:
        first = await ask(port, "sk-slow", max_tokens=99)
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert 25 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert (first.headers["x-ratelimit-limit-tokens"], first.headers["x-ratelimit-remaining-tokens"]) == (
            "600",
            "500",
        )
        streamed = await ask(port, "sk-slow", max_tokens=1, stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        # The estimate of the first answer was 100 tokens; it had 5.
        assert int(streamed.headers["x-ratelimit-remaining-tokens"]) in range(590, 595)
        for stream in (False, True):
            refused = await ask(port, "sk-slow", stream=stream)
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert refused.error["type"] == "rate_limit_error"
            assert 29 <= int(refused.headers["retry-after"]) <= 38
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        other = await ask(port, "sk-free")
        assert other.status == 200
        assert not any(name.startswith("x-ratelimit") for name in other.headers)


async def test_a_request_beyond_those_at_the_same_time_is_refused():
    backend = ScriptedBackend(manual=True)
    async with limited(backend) as port:
        first = asyncio.create_task(ask(port, "sk-narrow"))
        generation = await backend.generations.get()
        assert (await ask(port, "sk-narrow")).status == 429
        generation.put(*text_batches("Good ", "day"), None)
        assert (await first).status == 200
        again = asyncio.create_task(ask(port, "sk-narrow"))
        (await backend.generations.get()).put(*text_batches("Good ", "day"), None)
        assert (await again).status == 200


async def test_a_deadline_comes_from_the_body_the_header_or_the_server():
    backend = ScriptedBackend()
    async with limited(backend, request_timeout=20.0) as port:
        for header, field, passed in (
            (None, None, 20.0),
            ("5", None, 5.0),
            (None, 7, 7.0),
            ("5.5", 2.5, 2.5),
            ("2", 9, 2.0),
        ):
            headers = {"x-request-timeout": header} if header else {}
            assert (await ask(port, "sk-free", headers, timeout=field)).status == 200
            assert backend.requests[-1].timeout_s == passed
        for header, field, param in (
            ("21", None, "X-Request-Timeout"),
            ("soon", None, "X-Request-Timeout"),
            ("-1", None, "X-Request-Timeout"),
            ("nan", None, "X-Request-Timeout"),
            (None, 21, "timeout"),
            (None, 0, "timeout"),
            (None, "5", "timeout"),
        ):
            refused = await ask(port, "sk-free", {"x-request-timeout": header} if header else {}, timeout=field)
            assert (refused.status, refused.error["param"]) == (400, param)
    async with limited(backend) as port:
        await ask(port, "sk-free", timeout=1e6)
        assert backend.requests[-1].timeout_s == 1e6
        await ask(port, "sk-free")
        assert backend.requests[-1].timeout_s == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_has_one_record_of_what_it_used(stream: bool):
    records = Records()
    async with limited(ScriptedBackend(), records) as port:
        reply = await ask(port, "sk-free", {"x-request-id": "mine-1"}, n=2, stream=stream)
        assert (reply.status, reply.headers["x-request-id"]) == (200, "mine-1")
        [record] = await records.wait(1)
    answer = reply.events[0] if stream else reply.json
    assert answer["id"] == f"chatcmpl-{record.request_id}"
    assert (record.key, record.model, record.gateway_id) == ("free", "org/toy", "gateway-1")
    assert (record.outcome, record.error_code, record.finish_reasons) == ("completed", "", ("stop", "stop"))
    assert (record.prompt_tokens, record.computed_tokens, record.completion_tokens) == (3, 7, 4)
    assert (record.cached_tokens, record.discarded_tokens, record.client_request_id) == (0, 0, "mine-1")
    assert 0 < record.time_to_first_token_s <= record.duration_s
    assert record.received_at > 1_700_000_000


async def test_a_client_that_leaves_and_an_engine_that_fails_are_recorded_once():
    records, backend = Records(), ScriptedBackend(manual=True)
    async with limited(backend, records) as port:
        async with Connection(port) as connection:
            body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
            await connection.send("POST", CHAT, body, {"authorization": "Bearer sk-narrow"})
            (await backend.generations.get()).put(*text_batches("Good ", "day")[:1])
            await connection.head()
            await connection.chunk()
        await records.wait(1)
        failing = asyncio.create_task(ask(port, "sk-narrow"))
        (await backend.generations.get()).put(ServiceError("engine_failure", "The engine failed."))
        assert (await failing).status == 500
        await records.wait(2)
        await asyncio.sleep(0.05)
        cancelled, failed = records.all
    assert (cancelled.outcome, cancelled.completion_tokens, cancelled.finish_reasons) == ("cancelled", 1, ())
    assert (failed.outcome, failed.error_code, failed.completion_tokens) == ("failed", "engine_failure", 0)


async def test_a_refused_request_has_no_record():
    records, backend = Records(), ScriptedBackend(refusal=ServiceError("server_is_overloaded", "Full."))
    async with limited(backend, records) as port:
        for _ in range(5):
            assert (await ask(port, "sk-slow")).status == 503, "what was not run does not count"
        assert (await ask(port, "sk-none")).status == 401
        assert (await ask(port, "sk-slow", temperature=9)).status == 400
    assert records.all == []


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ä", "a\tb", "<script>"])
async def test_a_request_id_that_is_not_well_formed_is_not_repeated(given: str):
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "GET", "/version", headers={"x-request-id": given} if given else {})
        assert reply.status == 200
        assert reply.headers["x-request-id"].isalnum()
        assert len(reply.headers["x-request-id"]) == 22
    async with serving(ScriptedBackend()) as port:
        assert (await call(port, "GET", "/nowhere", headers={"x-request-id": "a-1.b:c_2"})).headers[
            "x-request-id"
        ] == "a-1.b:c_2"


async def test_metrics_count_the_records():
    records = Records()
    async with serving(ScriptedBackend(), usage=records.ledger) as port:
        assert (await call(port, "POST", CHAT, {"messages": HELLO})).status == 200
        await records.wait(1)
        assert records.all[0].key == "anonymous"
        page = (await call(port, "GET", "/metrics")).body.decode()
    assert 'antiphon:usage_records_delivered_total{receiver="test"} 1.0' in page
    assert 'antiphon:usage_records_dropped_total{receiver="test"} 0.0' in page


# --- Idempotency-Key --------------------------------------------------------------------------------------------------


async def repeatable(port: int, key: str, client: str = "sk-free", path: str = CHAT, **fields: Any) -> Reply:
    body = {"messages": HELLO, **fields} if path == CHAT else {"prompt": "hi", **fields}
    return await call(port, "POST", path, body, {"authorization": f"Bearer {client}", "idempotency-key": key})


@pytest.mark.matrix("G-06")
async def test_a_repeated_request_gets_the_first_answer_and_runs_once():
    backend, records = ScriptedBackend(), Records()
    async with limited(backend, records) as port:
        first, again = await repeatable(port, "k-1"), await repeatable(port, "k-1")
        assert (first.status, again.status) == (200, 200)
        assert again.body == first.body
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert len(backend.requests) == 1
        for other in (
            await repeatable(port, "k-2"),
            await repeatable(port, "k-1", client="sk-narrow"),
            await repeatable(port, "k-1", path="/v1/completions"),
        ):
            assert other.status == 200
            assert other.json["id"] != first.json["id"]
        conflict = await repeatable(port, "k-1", max_tokens=7)
        assert (conflict.status, conflict.error["code"]) == (409, "idempotency_conflict")
        assert conflict.error["type"] == "conflict_error"
        assert len(await records.wait(4)) == 4


@pytest.mark.matrix("G-06")
async def test_a_repetition_waits_for_the_first_even_if_the_first_client_has_left():
    backend = ScriptedBackend(manual=True)
    async with limited(backend) as port:
        async with Connection(port) as connection:
            body = b'{"messages":[{"role":"user","content":"hi"}]}'
            headers = {"authorization": "Bearer sk-free", "idempotency-key": "k"}
            await connection.send("POST", CHAT, body, headers)
            generation = await backend.generations.get()
        waiting = [asyncio.create_task(call(port, "POST", CHAT, body, headers)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert (await repeatable(port, "k", max_tokens=3)).status == 409
        generation.put(*text_batches("Good ", "day"), None)
        replies = await asyncio.gather(*waiting)
        assert [reply.status for reply in replies] == [200] * 3
        assert len({reply.body for reply in replies}) == 1
        assert len(backend.requests) == 1


async def test_a_failed_request_may_be_sent_again():
    backend = ScriptedBackend(refusal=ServiceError("server_is_overloaded", "Full."))
    async with limited(backend) as port:
        assert (await repeatable(port, "k")).status == 503
        assert (await repeatable(port, "k", temperature=9)).status == 400
        backend.refusal = None
        assert (await repeatable(port, "k")).status == 200
        backend.refusal = RuntimeError("a bug")
        assert (await repeatable(port, "k-2")).status == 500
        assert (await repeatable(port, "k")).status == 200


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
async def test_a_key_that_is_not_well_formed_is_refused(key: str):
    async with limited(ScriptedBackend()) as port:
        refused = await repeatable(port, key)
        assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")
        refused = await repeatable(port, "k", stream=True)
        assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")
        assert (await repeatable(port, "k", stream=False)).status == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_ollamas_streams_cannot_be_repeated_although_they_need_no_field(prefix: str):
    async with limited(ScriptedBackend(), root_path=prefix) as port:
        headers = {"authorization": "Bearer sk-free", "idempotency-key": "k"}
        for path in ("/api/chat", "/api/generate"):
            body = {"model": "org/toy", "messages": HELLO} if "chat" in path else {"model": "org/toy", "prompt": "hi"}
            for stream in ({}, {"stream": None}, {"stream": True}):
                refused = await call(port, "POST", prefix + path, {**body, **stream}, headers)
                assert (refused.status, "cannot be repeated" in refused.json["error"]) == (400, True)
            whole = [await call(port, "POST", prefix + path, {**body, "stream": False}, headers) for _ in range(2)]
            assert [reply.status for reply in whole] == [200, 200]
            assert whole[1].headers["idempotency-replayed"] == "true"


async def test_an_upload_cannot_be_repeated_whatever_its_size():
    async with limited(ScriptedBackend()) as port:
        body = form([("purpose", None, b"batch"), ("file", "a", b"x")])
        headers = {
            "authorization": "Bearer sk-free",
            "content-type": "multipart/form-data; boundary=edge",
            "idempotency-key": "k",
        }
        refused = await call(port, "POST", "/v1/files", body, headers)
        assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")
        assert "An upload cannot be repeated" in refused.error["message"]


async def test_whatever_a_request_asks_for_counts_as_a_request_of_its_key():
    """Also what computes nothing on an engine: tokens of a text, uploads, batches, searches, replays."""
    data = form([("purpose", None, b"batch"), ("file", "a", b"x")])
    asked: list[tuple[str, str, Any, dict[str, str]]] = [
        ("POST", "/tokenize", {"prompt": "hello"}, {}),
        ("POST", "/detokenize", {"tokens": [65]}, {}),
        ("POST", "/v1/messages/count_tokens", {"messages": HELLO}, {}),
        ("POST", "/v1/files", data, {"content-type": CONTENT_TYPE}),
        ("POST", "/v1/batches", {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}, {}),
        ("POST", "/v1/replay", {"record": {}}, {}),
        ("POST", CHAT, {"messages": HELLO, "temperature": 9}, {}),
        ("POST", CHAT, b"[" * 1000, {}),
        ("GET", "/v1/requests?q=word", b"", {}),
    ]
    for method, path, body, headers in asked:
        async with limited(ScriptedBackend(), recorder=Recorder(10)) as port:
            slow = {"authorization": "Bearer sk-slow", **headers}
            for expected in ("1", "0"):
                answer = await call(port, method, path, body, slow)
                assert answer.status in (200, 400, 404), path
                assert answer.headers["x-ratelimit-remaining-requests"] == expected, path
            refused = await call(port, method, path, body, slow)
            assert (refused.status, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0"), path
            for free in ("/v1/models", "/v1/requests", "/v1/files"):
                assert (await call(port, "GET", free, headers=slow)).status == 200
            cancelled = await call(port, "POST", "/v1/responses/resp_x/cancel", b"{}", slow)
            assert cancelled.status == 404, "to give work up is always possible"


async def test_a_key_has_no_more_bodies_on_their_way_than_requests_at_the_same_time():
    async with limited(ScriptedBackend()) as port, Connection(port) as slow:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-narrow\r\ncontent-length: 40\r\n\r\n"
        slow.writer.write(head.encode())
        await slow.writer.drain()
        async with asyncio.timeout(60):
            while (await ask(port, "sk-narrow")).status != 429:
                pass
        assert (await ask(port, "sk-free")).status == 200
        await slow.close()
        async with asyncio.timeout(60):
            while (await ask(port, "sk-narrow")).status != 200:
                pass


async def test_sequences_count_among_the_requests_at_the_same_time():
    backend = ScriptedBackend(manual=True)
    async with limited(backend) as port:
        for fields in ({"n": 2}, {"n": 1, "best_of": 2, "prompt": "x"}, {"prompt": ["x", "y"]}):
            path = "/v1/completions" if "prompt" in fields else CHAT
            body = {**({} if "prompt" in fields else {"messages": HELLO}), **fields}
            refused = await call(port, "POST", path, body, {"authorization": "Bearer sk-narrow"})
            assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "invalid_value", "n")
        held = asyncio.create_task(ask(port, "sk-triple", n=2))
        generation = await backend.generations.get()
        assert (await ask(port, "sk-triple", n=2)).status == 429
        other = asyncio.create_task(ask(port, "sk-triple"))
        (await backend.generations.get()).put(*text_batches("Good ", "day"), None)
        assert (await other).status == 200
        generation.put(*text_batches("Good ", "day"), *text_batches("Good ", "day", index=1), None)
        assert (await held).status == 200


async def test_a_search_has_few_words():
    async with limited(ScriptedBackend(), recorder=Recorder(10)) as port:
        free = {"authorization": "Bearer sk-free"}
        for found, words in (
            (200, "a+b+a+" * 12),
            (200, "+".join("abcdefgh")),
            (400, "+".join("abcdefghi")),
            (400, "x" * 201),
        ):
            assert (await call(port, "GET", f"/v1/requests?q={words}", headers=free)).status == found, words
