"""Requests with an `Idempotency-Key` at two gateways, with a real store. The backend is scripted: see `edge`.

`tests/system/reliability/test_repeated.py` has whole systems whose gateways are killed.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.guests.idempotency.store import BusAnswers
from antiphon.services.gateway.guests.resume.streams import Streams
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from tests.integration.edge import Connection, ScriptedBackend, call, serving, text_batches
from tests.integration.test_streams import BODY, CHAT, good_day_again, ids_of, store_of

pytestmark = pytest.mark.nats

WHOLE: dict[str, Any] = {**BODY, "stream": False}
KEY = {"idempotency-key": "k"}


class Pair:
    """Two gateways. `living`: those whose heartbeats arrive."""

    def __init__(self) -> None:
        self.living = {("one", "boot"), ("two", "boot")}
        self.backends = {name: ScriptedBackend(reply=good_day_again) for name in ("one", "two")}
        self.ports: dict[str, int] = {}
        self.streams: dict[str, Streams] = {}

    def num_requests(self) -> int:
        return sum(len(each.requests) for each in self.backends.values())

    @contextlib.asynccontextmanager
    async def gateway(self, name: str, transport: Any, subjects: Any) -> AsyncIterator[None]:
        host = Host(transport=transport, subjects=subjects, clock=SystemClock(), id=name, instance_id="boot")
        streams = Streams(host, store_of(host), 30.0, heard=lambda: self.living)
        answers = BusAnswers(GatewayLogs(host, "memory", lambda: 2), lambda: self.living, streams.can_resume)
        running = asyncio.create_task(streams.journal.run())
        async with serving(self.backends[name], offers=[streams, answers]) as port:
            async with asyncio.timeout(60):
                while not streams.journal.is_open:
                    await asyncio.sleep(0.01)
            self.ports[name], self.streams[name] = port, streams
            yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def pair(nats_connect: Any, nats_server: Any, subjects: Any) -> AsyncIterator[Pair]:
    found = Pair()
    async with contextlib.AsyncExitStack() as stack:
        for name in ("one", "two"):
            await stack.enter_async_context(found.gateway(name, await nats_connect(nats_server, name), subjects))
        yield found


async def test_a_repetition_at_another_gateway_waits_for_the_answer_of_the_first(pair: Pair):
    pair.backends["one"].manual = True
    first = asyncio.create_task(call(pair.ports["one"], "POST", CHAT, WHOLE, KEY))
    generation = await pair.backends["one"].generations.get()
    again = asyncio.create_task(call(pair.ports["two"], "POST", CHAT, WHOLE, KEY))
    conflict = await call(pair.ports["two"], "POST", CHAT, {**WHOLE, "seed": 2}, {"idempotency-key": "k"})
    assert conflict.status == 409
    await asyncio.sleep(0.3)
    assert not again.done()
    generation.put(*text_batches("Good ", "day"), None)
    assert (await again).body == (await first).body
    assert (await again).headers["idempotency-replayed"] == "true"
    assert pair.num_requests() == 1


async def test_a_repetition_goes_on_where_the_gateway_that_died_was(pair: Pair):
    pair.backends["one"].manual = True
    first = asyncio.create_task(call(pair.ports["one"], "POST", CHAT, WHOLE, KEY))
    generation = await pair.backends["one"].generations.get()
    generation.put(text_batches("Good ", "day")[0])
    async with asyncio.timeout(60):
        while not pair.streams["one"].journal.position:
            await asyncio.sleep(0.01)
    pair.living.discard(("one", "boot"))
    again = await call(pair.ports["two"], "POST", CHAT, WHOLE, KEY)
    assert again.json["choices"][0]["message"]["content"] == "Good day"
    [begun], [continued] = (pair.backends[name].requests for name in ("one", "two"))
    assert (continued.request_id, continued.params.seed) == (begun.request_id, begun.params.seed)
    assert [len(one) for one in continued.guests.resumed.token_ids] == [1], "one token was in the journal"
    # That gateway only stood still: its run has ended.
    generation.put(None)
    assert (await first).status in (200, 409)


@pytest.mark.parametrize("where", ["one", "two"])
async def test_a_repeated_stream_is_the_first_one_from_its_beginning(pair: Pair, where: str):
    first = await call(pair.ports["one"], "POST", CHAT, BODY, KEY)
    again = await call(pair.ports[where], "POST", CHAT, BODY, KEY)
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert ids_of(again.body)[-1] == ids_of(first.body)[-1]
    assert again.body.endswith(b"data: [DONE]\n\n")
    assert (await call(pair.ports[where], "POST", CHAT, {**BODY, "seed": 3}, KEY)).status == 409


async def test_what_failed_may_be_sent_again_anywhere(pair: Pair):
    pair.backends["one"].refusal = ServiceError("server_is_overloaded", "Full.")
    for body in (WHOLE, BODY):
        key = {"idempotency-key": f"failed-{body['stream']}"}
        assert (await call(pair.ports["one"], "POST", CHAT, body, key)).status == 503
        assert (await call(pair.ports["one"], "POST", CHAT, {**body, "temperature": 9}, key)).status == 400
        assert (await call(pair.ports["two"], "POST", CHAT, body, key)).status == 200


async def test_an_answer_that_is_too_large_is_known_to_its_gateway_alone(pair: Pair, monkeypatch):
    monkeypatch.setattr(limits, "IDEMPOTENCY_SHARED_BYTES_MAX", 10)
    first, here = [await call(pair.ports["one"], "POST", CHAT, WHOLE, KEY) for _ in range(2)]
    assert here.body == first.body
    elsewhere = await call(pair.ports["two"], "POST", CHAT, WHOLE, KEY)
    assert elsewhere.json["id"] != first.json["id"]


async def test_a_stream_that_cannot_be_recorded_is_refused(pair: Pair):
    refused = await call(pair.ports["one"], "POST", CHAT, {**BODY, "n": limits.STREAM_SEQUENCES_MAX + 1}, KEY)
    assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")
    pair.streams["one"].journal.is_open = False
    refused = await call(pair.ports["one"], "POST", CHAT, BODY, KEY)
    assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")


async def test_a_client_that_leaves_its_repeatable_stream_finds_the_rest(pair: Pair):
    pair.backends["one"].manual = True
    async with Connection(pair.ports["one"]) as connection:
        await connection.send("POST", CHAT, json.dumps(BODY).encode(), KEY)
        generation = await pair.backends["one"].generations.get()
        generation.put(text_batches("Good ", "day")[0])
        await connection.head()
    generation.put(*text_batches("Good ", "day")[1:], None)
    again = await call(pair.ports["two"], "POST", CHAT, BODY, KEY)
    assert again.body.endswith(b"data: [DONE]\n\n")
