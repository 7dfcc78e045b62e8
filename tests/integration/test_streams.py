"""Recorded streams at the HTTP edge, with a real store: who may resume one, until when, and what if there is no store.

The backend is scripted: see `edge`. `tests/system/reliability/test_streams.py` has whole systems whose processes die.
"""

import asyncio
import contextlib
import gc
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.edge.access.kept_images import KeptImages, kept_image
from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.guests.responses import response_object
from antiphon.services.gateway.guests.resume.running import RunningStream
from antiphon.services.gateway.guests.resume.store import StreamStore
from antiphon.services.gateway.guests.resume.streams import Streams
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import GenerationRequest
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import StreamTaken
from antiphon.shared.security.api_keys import ANONYMOUS, keys_of_text
from antiphon.shared.subjects import Subjects
from tests.integration.edge import Connection, ScriptedBackend, call, endings, serving, text_batches
from tests.integration.seen_images import data_url, eye, seen

pytestmark = pytest.mark.nats

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "seed": 1}
GREETING = "Good ", "day", "."
KEY_FILE = """
[[keys]]
name = "one"
key = "sk-one"

[[keys]]
name = "two"
key = "sk-two"
"""


def store_of(host: Host) -> StreamStore:
    logs = GatewayLogs(host, "memory", lambda: 2)
    return StreamStore(KeptImages(logs))


@contextlib.asynccontextmanager
async def gateway(
    transport: Any, subjects: Any, backend: ScriptedBackend, name: str = "gateway-1", **options: Any
) -> AsyncIterator[tuple[int, Streams]]:
    host = Host(transport=transport, subjects=subjects, clock=SystemClock(), id=name, instance_id="boot")
    heard = options.pop("heard", set)
    streams = Streams(host, store_of(host), options.pop("grace_s", 30.0), records_all=True, heard=heard)
    running = asyncio.create_task(streams.journal.run())
    async with serving(backend, offers=[streams], **options) as port:
        async with asyncio.timeout(60):
            while not streams.journal.is_open:
                await asyncio.sleep(0.01)
        yield port, streams
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def again(*texts: str) -> Callable[[GenerationRequest], list[Any]]:
    """As an engine that gets the first tokens as output: their text comes with the next token."""

    def reply(request: GenerationRequest) -> list[Any]:
        num_known = 0 if request.guests.resumed is None else len(request.guests.resumed.token_ids[0])
        text = "".join(texts[:num_known])
        return [
            [replace(batch[0], text=text + batch[0].text if number == num_known else batch[0].text)]
            for number, batch in enumerate(text_batches(*texts))
            if number >= num_known
        ]

    return reply


good_day_again = again("Good ", "day")


async def opened(backend: ScriptedBackend, connection: Connection) -> Any:
    """Begins a resumable stream, which gets its first token; returns its generation."""
    await connection.send("POST", CHAT, json.dumps(BODY).encode(), {"x-antiphon-resumable": "1"})
    generation = await backend.generations.get()
    generation.put(text_batches(*GREETING)[0])
    await connection.head()
    return generation


async def journaled(streams: Streams) -> None:
    """Returns when the journal has all tokens of the streams that run."""
    async with asyncio.timeout(60):
        while any(one.has_news for one in streams.journal.running.values()):
            await asyncio.sleep(0.01)


def ids_of(body: bytes) -> list[str]:
    return [line[4:] for line in body.decode().split("\n") if line.startswith("id: ")]


async def test_a_stream_is_resumed_with_its_id_time_and_seed(nats_connect, nats_server, subjects):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(reply=good_day_again)
    async with gateway(transport, subjects, backend) as (port, _):
        first = await call(port, "POST", CHAT, {**BODY, "seed": None})
        last = ids_of(first.body)[1]
        rest = await call(port, "GET", f"/v1/streams/{last.replace(':', '?from=')}")
        again = await call(port, "POST", CHAT, {**BODY, "seed": None}, {"last-event-id": last})
        described = (await call(port, "GET", "/openapi.json")).json["paths"]["/v1/streams/{stream_id}"]["get"]
    assert list(described["responses"]["200"]["content"]) == ["text/event-stream"]
    assert rest.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert rest.body == again.body
    assert first.body.endswith(rest.body)
    one, two, _ = backend.requests
    assert one.params.seed == two.params.seed is not None
    assert (one.guests.resumed, two.guests.resumed.fence) == (None, 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}),
    ],
)
async def test_a_stream_of_another_api_is_resumed_in_its_own_form(
    nats_connect, nats_server, subjects, path, body, monkeypatch
):
    # Each run says in whole seconds when it was completed.
    monkeypatch.setattr(response_object, "time", SimpleNamespace(time=lambda: 1_700_000_000.0))
    # With its first tokens known, the engine would give the text of both in one piece, and so in one event.
    monkeypatch.setattr(limits, "STREAM_JOURNAL_S", 600.0)
    transport = await nats_connect(nats_server, "one")
    async with gateway(transport, subjects, ScriptedBackend(reply=good_day_again)) as (port, _):
        first = await call(port, "POST", path, body)
        events = first.body.split(b"\n\n")
        for number, last in enumerate(ids_of(first.body)[:-1], start=1):
            rest = await call(port, "GET", f"/v1/streams/{last.replace(':', '?from=')}")
            again = await call(port, "POST", path, body, {"last-event-id": last})
            assert rest.body == again.body == b"\n\n".join(events[number:]), last


async def test_a_stream_with_a_large_image_is_resumed_with_it(nats_connect, nats_server, subjects):
    large, resumable = random.Random(5).randbytes(1_300_000), {"x-antiphon-resumable": "1"}
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": data_url(large)}}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "seed": 1}
    transport, backend = await nats_connect(nats_server, "one"), eye(reply=good_day_again)
    async with gateway(transport, subjects, backend) as (port, streams):
        # The space of stored responses is not for every stream.
        assert ids_of((await call(port, "POST", CHAT, body)).body) == []
        first = await call(port, "POST", CHAT, body, resumable)
        last = ids_of(first.body)[1]
        rest = await call(port, "GET", f"/v1/streams/{last.replace(':', '?from=')}")
        again = await call(port, "POST", CHAT, body, {"last-event-id": last})
        assert rest.status == 200
        assert first.body.endswith(rest.body)
        assert rest.body == again.body
        assert [seen(request) for request in backend.requests] == [[("user", ["What?", large])]] * 4
        other = await call(port, "POST", CHAT, {**body, "seed": 2}, {"last-event-id": last})
        assert "another body" in other.error["message"]
        files = streams.store.images
        await files.part.log.clear(files.subjects(ANONYMOUS.name, kept_image(large))[0])
        lost = await call(port, "POST", CHAT, body, {"last-event-id": last})
        assert (lost.status, lost.error["code"]) == (410, "stream_expired")


async def test_a_connection_whose_response_is_resumed_elsewhere_gets_an_error_and_the_response_goes_on(
    nats_connect, nats_server, subjects
):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    async with gateway(transport, subjects, backend) as (port, _), Connection(port) as connection:
        await connection.send("POST", "/v1/responses", b'{"input":"hi","stream":true}')
        generation = await backend.generations.get()
        steps = text_batches("Good ", "day")
        generation.put(steps[0])
        await connection.head()
        shown = b""
        while b"output_text.delta" not in shown:
            shown += await connection.chunk()
        last = ids_of(shown)[-1]
        resumed = asyncio.create_task(call(port, "GET", f"/v1/streams/{last.replace(':', '?from=')}"))
        again = await backend.generations.get()
        again.put([replace(steps[1][0], text="Good day")], None)
        taken = await connection.rest()
        rest = await resumed
        assert b"event: error" in taken
        assert b'"code":"stream_taken"' in taken
        assert b"response.failed" not in taken
        assert b'"delta":"day"' in rest.body
        response = json.loads(rest.body.split(b"data: ")[-1])["response"]
        assert (await call(port, "GET", f"/v1/responses/{response['id']}")).json == response


async def test_only_the_key_that_began_a_stream_may_resume_it(nats_connect, nats_server, subjects):
    transport = await nats_connect(nats_server, "one")
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    async with gateway(transport, subjects, ScriptedBackend(reply=good_day_again), keys=keys) as (port, streams):
        one, two = ({"authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        first = await call(port, "POST", CHAT, BODY, one)
        path = f"/v1/streams/{ids_of(first.body)[0].replace(':', '?from=')}"
        assert (await call(port, "GET", path, headers=one)).status == 200
        foreign = await call(port, "GET", path, headers=two)
        none = await call(port, "GET", f"/v1/streams/{'a' * 22}", headers=two)
        found = await streams.journal._store.find(ids_of(first.body)[0].partition(":")[0])
    assert (foreign.status, foreign.error["code"]) == (none.status, none.error["code"]) == (404, "not_found")
    assert found is not None
    assert b"sk-one" not in repr(found).encode()


async def test_a_stream_whose_client_is_gone_can_be_ended_by_its_key_and_is_gone_then(
    nats_connect, nats_server, subjects
):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    async with gateway(transport, subjects, backend) as (port, _):
        async with Connection(port) as connection:
            generation = await opened(backend, connection)
            stream_id = ids_of(await connection.chunk())[0].partition(":")[0]
        ended = await call(port, "DELETE", f"/v1/streams/{stream_id}")
        await asyncio.wait_for(generation.stopped.wait(), 60)
        late = await call(port, "GET", f"/v1/streams/{stream_id}")
        unknown = await call(port, "DELETE", f"/v1/streams/{'a' * 22}")
    assert ended.json == {"id": stream_id, "object": "stream.deleted", "deleted": True}
    assert (late.status, late.error["code"]) == (410, "stream_expired")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")


async def test_a_stream_that_is_too_old_is_gone(nats_connect, nats_server, subjects, monkeypatch):
    transport = await nats_connect(nats_server, "one")
    async with gateway(transport, subjects, ScriptedBackend()) as (port, _):
        first = await call(port, "POST", CHAT, BODY)
        monkeypatch.setattr(limits, "STREAM_RESUME_S", 0.0)
        late = await call(port, "POST", CHAT, BODY, {"last-event-id": ids_of(first.body)[1]})
    assert (late.status, late.error["code"]) == (410, "stream_expired")
    assert "Send the request again" in late.error["message"]


async def test_a_client_that_disconnects_cancels_its_stream_unless_it_is_resumable(nats_connect, nats_server, subjects):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    async with gateway(transport, subjects, backend) as (port, _):
        for resumable in ("0", "1"):
            async with Connection(port) as connection:
                headers = {"x-antiphon-resumable": resumable}
                await connection.send(
                    "POST", CHAT, b'{"messages":[{"role":"user","content":"hi"}],"stream":true}', headers
                )
                generation = await backend.generations.get()
                steps = text_batches("Good ", "day")
                generation.put(steps[0])
                await connection.head()
                await connection.chunk()
            if resumable == "0":
                await asyncio.wait_for(generation.stopped.wait(), 60)
            else:
                await asyncio.sleep(0.2)
                assert not generation.stopped.is_set()
                generation.put(steps[1], None)
                await asyncio.wait_for(generation.stopped.wait(), 60)
                assert generation.waiting == 0


@pytest.mark.parametrize("resumable", ["0", "1"])
async def test_a_stream_that_ends_is_no_client_that_has_gone(nats_connect, nats_server, subjects, resumable):
    transport, recorder = await nats_connect(nats_server, "one"), Recorder(8)
    async with gateway(transport, subjects, ScriptedBackend(), recorder=recorder) as (port, _):
        with uncollected() as left:
            for _ in range(4):
                whole = await call(port, "POST", CHAT, BODY, {"x-antiphon-resumable": resumable})
                assert whole.body.endswith(b"data: [DONE]\n\n")
            metrics = (await call(port, "GET", "/metrics")).body.decode()
        assert "client_closed_request" not in metrics
        assert await endings(recorder) == [("completed", "")] * 4
        assert left == [], "a stream leaves no reference cycle, which would need the garbage collector"


@pytest.mark.parametrize("headers", [None, {}, {"x-antiphon-resumable": "1"}])
async def test_the_body_of_an_abandoned_stream_is_freed_at_once(nats_connect, nats_server, subjects, headers):
    """`headers`: those of a recorded stream; None: the stream is not recorded."""
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    body = json.dumps({**BODY, "user": "x" * (1 << 19)}).encode()

    def holders() -> list[Any]:
        # Other packages have kinds of their own, which load something when they are asked.
        scopes = [one for one in gc.get_objects() if type(one) is dict and isinstance(one.get("state"), dict)]
        return [one for one in scopes if one["state"].get("body") == body]

    async with contextlib.AsyncExitStack() as stack:
        if headers is None:
            port = await stack.enter_async_context(serving(backend))
        else:
            port, _ = await stack.enter_async_context(gateway(transport, subjects, backend, grace_s=0.1))
        with uncollected() as left:
            for _ in range(2):
                async with Connection(port) as connection:
                    await connection.send("POST", CHAT, body, headers)
                    generation = await backend.generations.get()
                    generation.put(text_batches(*GREETING)[0])
                    await connection.head()
                    assert holders() == [], "a stream that runs needs its body no more, or has it in its record"
                await asyncio.wait_for(generation.stopped.wait(), 60)
                del generation
                backend.requests.clear()
            await call(port, "GET", "/metrics")
        assert left == []


@contextlib.contextmanager
def uncollected() -> Iterator[list[Any]]:
    """Collects nothing in the block. Then the list has what only the collector could free: streams and exceptions.

    Of what was made in the block: earlier tests leave tasks to the collector too, at any time later.
    """
    found: list[Any] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [one for one in gc.garbage if isinstance(one, RunningStream | RequestContext | BaseException)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
        gc.collect()
        # As at the start of the tests (`tests/conftest.py`).
        gc.freeze()


async def test_the_grace_of_a_stream_without_its_client_ends(nats_connect, nats_server, subjects):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    recorder = Recorder(8)
    async with gateway(transport, subjects, backend, grace_s=0.3, recorder=recorder) as (port, _):
        async with Connection(port) as connection:
            generation = await opened(backend, connection)
        await asyncio.wait_for(generation.stopped.wait(), 60)
        assert await endings(recorder) == [("cancelled", "client_closed_request")]
    assert generation.cancelled == ["abort"]


async def test_a_stream_that_fails_without_its_client_leaves_no_report_of_a_lost_exception(
    nats_connect, nats_server, subjects, caplog: pytest.LogCaptureFixture
):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    async with gateway(transport, subjects, backend) as (port, _):
        async with Connection(port) as connection:
            generation = await opened(backend, connection)
        await asyncio.sleep(0.2)
        generation.put(ServiceError("engine_failure", "The engine has failed."))
        await asyncio.wait_for(generation.stopped.wait(), 60)
        await asyncio.sleep(0.1)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_gateway_that_shuts_down_waits_for_no_client_to_come_back(nats_connect, nats_server, subjects):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    recorder = Recorder(8)
    async with gateway(transport, subjects, backend, recorder=recorder) as (port, streams):
        async with Connection(port) as connection:
            generation = await opened(backend, connection)
        await asyncio.sleep(0.2)
        assert not generation.stopped.is_set()
        await streams.leave()
        await asyncio.wait_for(generation.stopped.wait(), 60)
        assert await endings(recorder) == [("cancelled", "draining")]


async def test_a_stream_that_a_gateway_hands_over_ends_because_of_the_shutdown(
    nats_connect, nats_server, subjects, caplog: pytest.LogCaptureFixture
):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    recorder = Recorder(8)
    async with gateway(transport, subjects, backend, recorder=recorder) as (port, streams):
        async with Connection(port) as connection:
            generation = await opened(backend, connection)
            streams.hand_over()
            await asyncio.wait_for(generation.stopped.wait(), 60)
            assert not (await connection.reader.read()).endswith(b"0\r\n\r\n"), "interrupted, not ended"
        assert "completing response" not in caplog.text
        assert await endings(recorder) == [("cancelled", "draining")]


async def test_the_former_run_at_another_gateway_ends(nats_connect, nats_server, subjects):
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    other, recorder = ScriptedBackend(), Recorder(8)
    told: list[Any] = []
    async with (
        gateway(transport, subjects, backend, recorder=recorder) as (port, streams),
        gateway(transport, subjects, other, "gateway-2") as (second, _),
        Connection(port) as connection,
    ):
        subscription = await transport.subscribe(subjects.gateway_peers("gateway-1", "boot"), told.append)
        await connection.send("POST", CHAT, b'{"messages":[{"role":"user","content":"hi"}],"stream":true}')
        generation = await backend.generations.get()
        generation.put(text_batches("Good ", "day")[0])
        await connection.head()
        first = await connection.chunk()
        await journaled(streams)
        request_id, _, where = ids_of(first)[-1].partition(":")
        rest = await call(second, "GET", f"/v1/streams/{request_id}?from={where}")
        assert b'"day"' in rest.body
        assert b"Good" not in rest.body
        while not told:
            await asyncio.sleep(0.01)
        streams.on_taken(StreamTaken(request_id, 1))
        assert not generation.stopped.is_set(), "its own token is not above its own"
        streams.on_taken(StreamTaken(request_id, 2))
        assert b"stream_taken" in await connection.rest()
        await subscription.unsubscribe()
        assert await endings(recorder) == [("cancelled", "stream_taken")]
    assert other.requests[0].guests.resumed.token_ids == ((1,),)


async def test_a_run_that_missed_the_takeover_ends_when_it_renews_its_record(
    nats_connect, nats_server, subjects, monkeypatch
):
    monkeypatch.setattr(limits, "STREAM_RENEW_S", 0.5)
    transport, backend = await nats_connect(nats_server, "one"), ScriptedBackend(manual=True)
    async with (
        gateway(transport, subjects, backend) as (port, _),
        gateway(transport, subjects, ScriptedBackend(), "gateway-2") as (second, _),
        Connection(port) as connection,
    ):
        await connection.send("POST", CHAT, b'{"messages":[{"role":"user","content":"hi"}],"stream":true}')
        generation = await backend.generations.get()
        generation.put(text_batches("Good ", "day")[0])
        await connection.head()
        request_id = ids_of(await connection.chunk())[-1].partition(":")[0]
        await asyncio.sleep(0.7)
        assert (await call(second, "GET", f"/v1/streams/{request_id}")).status == 200
        assert b"stream_taken" in await connection.rest()


async def test_a_stream_that_gateways_die_of_is_refused_after_its_third_start(nats_connect, nats_server, subjects):
    transport, heard, last = await nats_connect(nats_server, "one"), set[tuple[str, str]](), ""
    async with contextlib.AsyncExitStack() as stack:

        async def restarted(name: str, living: str = "") -> tuple[int, ScriptedBackend, Streams]:
            heard.clear()
            heard.update((one, "boot") for one in (name, living) if one)
            backend = ScriptedBackend(manual=True)
            made = gateway(transport, subjects, backend, name, heard=lambda: heard, grace_s=0.1)
            port, streams = await stack.enter_async_context(made)
            return port, backend, streams

        async def resumed(port: int, backend: ScriptedBackend, _: Streams) -> Any:
            connection = await stack.enter_async_context(Connection(port))
            await connection.send("GET", f"/v1/streams/{last.replace(':', '?from=')}")
            return await backend.generations.get()

        port, backend, streams = await restarted("gateway-1")
        connection = await stack.enter_async_context(Connection(port))
        _, last = await begun(backend, connection)
        await journaled(streams)
        for number in range(2, 7):
            await resumed(*await restarted(f"gateway-{number}", f"gateway-{number - 1}"))  # no gateway has died
        for number in range(7, 9):
            await resumed(*await restarted(f"gateway-{number}"))
        port, backend, _ = await restarted("gateway-9")
        refused = await call(port, "GET", f"/v1/streams/{last.replace(':', '?from=')}")
        assert (refused.status, refused.error["code"]) == (410, "stream_expired")
        assert "started 3 times" in refused.error["message"]
        assert backend.requests == []


async def begun(backend: ScriptedBackend, connection: Connection) -> tuple[Any, str]:
    """A resumable stream with one token; returns its generation, and the id of its last event."""
    generation = await opened(backend, connection)
    found: list[str] = []
    while not found:
        found = ids_of(await connection.chunk())
    return generation, found[-1]


async def test_streams_from_before_and_during_a_restart_of_the_bus_can_be_resumed(
    nats_connect, private_nats_server, subjects, monkeypatch
):
    monkeypatch.setattr(limits, "STREAM_STORE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(limits, "STREAM_STORE_AWAY_S", 60.0)
    monkeypatch.setattr(limits, "STREAM_RENEW_S", 3600.0)
    transport, backend = await nats_connect(private_nats_server, "one"), ScriptedBackend(manual=True)
    second_backend = ScriptedBackend(reply=again(*GREETING))
    async with (
        gateway(transport, subjects, backend, grace_s=0.1) as (port, streams),
        gateway(transport, subjects, second_backend, "gateway-2") as (second, _),
        Connection(port) as before,
        Connection(port) as during,
    ):
        async with asyncio.timeout(60):
            generation, first = await begun(backend, before)
            await journaled(streams)
            private_nats_server.kill()  # its memory, and the records in it, are lost
            generation.put(text_batches(*GREETING)[1])
            while streams.journal.is_open:
                await asyncio.sleep(0.01)
            assert streams.journal.opens_soon
            _, other = await begun(backend, during)
            private_nats_server.start()
            while not streams.journal.is_open or any(one.revision == 0 for one in streams.journal.running.values()):
                await asyncio.sleep(0.01)
            for last in (first, other):
                request_id, _, where = last.partition(":")
                rest = await call(second, "GET", f"/v1/streams/{request_id}?from={where}")
                assert rest.status == 200, rest.body
                assert rest.body.endswith(b"data: [DONE]\n\n")
                assert b"".join(re.findall(rb'"content":"([^"]*)"', rest.body)) == b"day."


async def test_without_a_store_streams_have_no_ids_and_cannot_be_resumed(nats_connect, nats_server, namespace):
    transport = await nats_connect(nats_server, "one")
    host = Host(
        transport=transport,
        subjects=Subjects(f"{namespace}-without"),
        clock=SystemClock(),
        id="gateway-1",
        instance_id="boot",
    )
    unopened = Streams(host, store_of(host), 0.0)
    for offers, code in (((), "not_found"), ((unopened,), "bus_unavailable")):
        async with serving(ScriptedBackend(), offers=offers) as port:
            first = await call(port, "POST", CHAT, BODY)
            assert first.status == 200
            assert not ids_of(first.body)
            refused = await call(port, "GET", f"/v1/streams/{'a' * 22}")
            assert refused.error["code"] == code
