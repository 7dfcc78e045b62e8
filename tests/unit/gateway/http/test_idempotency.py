"""What is kept of answered requests, and for how long."""

import itertools
from typing import Any

import pytest

from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.edge.http.idempotency import Idempotency
from antiphon.shared import limits
from antiphon.shared.security.api_keys import ApiKey

BODY = b'{"prompt": "hi"}'


class Client:
    """Asks an application that answers with a number and `size` bytes."""

    def __init__(self, size: int = 10, kind: bytes = b"text/plain") -> None:
        self.now, self.size, self.kind = 0.0, size, kind
        self._numbers = itertools.count()
        self.edge = Idempotency(self._app, lambda: self.now)

    async def _app(self, scope, receive, send) -> None:
        assert (await receive())["body"] == BODY
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self.kind)]})
        await send({"type": "http.response.body", "body": b"%d " % next(self._numbers), "more_body": True})
        await send({"type": "http.response.body", "body": b"x" * self.size})

    async def ask(self, key: str) -> int:
        sent: list[dict] = []
        messages = [{"type": "http.request", "body": BODY}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return {"type": "http.disconnect"} if len(sent) > 1 else await _for_ever()

        async def send(message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"idempotency-key", key.encode())]}
        await self.edge(scope, receive, send)
        assert (b"content-type", self.kind) in sent[0]["headers"]
        return int(sent[1]["body"].split()[0])


async def _for_ever():
    import asyncio

    await asyncio.Event().wait()


async def test_an_answer_is_kept_for_ten_minutes():
    client = Client()
    assert [await client.ask("a"), await client.ask("a")] == [0, 0]
    client.now = limits.IDEMPOTENCY_S - 1
    assert [await client.ask("b"), await client.ask("a")] == [1, 0]
    client.now += 1
    assert [await client.ask("a"), await client.ask("b")] == [2, 1]


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/x-ndjson"])
async def test_a_stream_which_may_have_failed_in_the_middle_is_not_kept(kind: bytes):
    client = Client(kind=kind)
    assert [await client.ask("a"), await client.ask("a")] == [0, 1]


async def test_the_oldest_answers_are_dropped_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(limits, "IDEMPOTENCY_ANSWERS_MAX", 2)
    client = Client()
    for key in ("a", "b", "c"):
        await client.ask(key)
    assert [await client.ask("c"), await client.ask("b"), await client.ask("a")] == [2, 1, 3]


@pytest.mark.parametrize(("size", "kept"), [(400, {"b", "c"}), (900, {"c"}), (2000, set())])
async def test_the_answers_together_are_no_larger_than_allowed(monkeypatch, size: int, kept: set[str]):
    monkeypatch.setattr(limits, "IDEMPOTENCY_BYTES_MAX", 1000)
    client = Client(size)
    for key in ("a", "b", "c"):
        await client.ask(key)
    assert {name.rpartition("\n")[2] for name in client.edge._kept} == kept
    assert client.edge._shares.num_bytes <= 1000


async def test_a_key_with_many_answers_loses_its_own_before_others_do(monkeypatch):
    monkeypatch.setattr(limits, "IDEMPOTENCY_BYTES_MAX", 1000)
    client = Client(100)

    async def ask(owner: str, key: str) -> int:
        with serving(Call(key=ApiKey(name=owner))):
            return await client.ask(key)

    assert await ask("alice", "a") == 0
    for number in range(1, 20):
        assert await ask("bob", f"{number}") == number
    assert await ask("alice", "a") == 0
    assert await ask("bob", "1") == 20
