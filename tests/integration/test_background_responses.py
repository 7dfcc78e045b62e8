"""Responses that run in the background, at two gateways with a real bus: seen, read, cancelled and continued at either.

The backends are scripted: see `edge`. `tests/system/reliability/test_streams.py` has a whole system whose gateways die.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.guests.background.requests import BackgroundStreams
from antiphon.services.gateway.guests.background.store import BackgroundStore
from antiphon.services.gateway.guests.resume.store import StreamStore
from antiphon.services.gateway.guests.resume.streams import Streams
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import StreamTaken
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import Reply, ScriptedBackend, call, endings, serving, text_batches
from tests.integration.test_streams import KEY_FILE

pytestmark = pytest.mark.nats
PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "hi", "background": True, "seed": 1}
PIECES = ("Good ", "day ", "to ", "you")


class Gateway:
    """One gateway: its port, its backend, and what it has of background responses."""

    def __init__(self, port: int, backend: ScriptedBackend, streams: BackgroundStreams) -> None:
        self.port, self.backend, self.streams = port, backend, streams

    async def ask(self, method: str, path: str = "", body: Any = None, **headers: str) -> Reply:
        return await call(self.port, method, PATH + path, body, headers)

    async def events(self, response_id: str, after: int = -1) -> list[dict[str, Any]]:
        where = f"&starting_after={after}" if after >= 0 else ""
        reply = await self.ask("GET", f"/{response_id}?stream=true{where}")
        assert reply.status == 200, reply.body
        return [json.loads(one.partition(b"data: ")[2]) for one in reply.body.split(b"\n\n") if b"data: " in one]


class Deployment:
    """Two gateways that hear each other, unless one is taken out of `living`."""

    def __init__(self, nats_connect: Any, server: Any, subjects: Any, **options: Any) -> None:
        self.living = {("one", "boot"), ("two", "boot")}
        self._connect, self._server, self._subjects, self._options = nats_connect, server, subjects, options

    @contextlib.asynccontextmanager
    async def gateway(self, name: str, backend: ScriptedBackend) -> AsyncIterator[Gateway]:
        host = Host(
            transport=await self._connect(self._server, name),
            subjects=self._subjects,
            clock=SystemClock(),
            id=name,
            instance_id="boot",
        )
        logs = GatewayLogs(host, "memory", lambda: len(self.living))
        images = KeptImages(logs)
        tokens = StreamStore(images)
        streams = Streams(host, tokens, 30.0)
        background = BackgroundStreams(host, BackgroundStore(images), tokens, streams.journal, self._living)
        running = asyncio.create_task(streams.journal.run())
        async with serving(backend, offers=[images, streams, background], **self._options) as port:
            await until(lambda: streams.journal.is_open)
            yield Gateway(port, backend, background)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def _living(self) -> set[tuple[str, str]]:
        return self.living


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def has_text(gateway: Gateway, response_id: str, text: str) -> None:
    async def shows() -> bool:
        response = (await gateway.ask("GET", f"/{response_id}")).json
        return "".join(part["text"] for item in response["output"] for part in item["content"]) == text

    await until(shows)


async def is_in(gateway: Gateway, response_id: str, status: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def reached() -> bool:
        found.update((await gateway.ask("GET", f"/{response_id}")).json)
        return found.get("status") == status

    await until(reached)
    return found


def again(request: GenerationRequest, num_more: int) -> list[list[SequenceUpdate]]:
    """What an engine gives that goes on with a request, with the text of the tokens that it was given before."""
    assert request.guests.resumed is not None
    num_known = len(request.guests.resumed.token_ids[0])
    updates = [batch[0] for batch in text_batches(*PIECES)]
    assert request.guests.resumed.token_ids[0] == tuple(one.token_ids[0] for one in updates[:num_known])
    first = replace(updates[num_known], text="".join(PIECES[: num_known + 1]))
    return [[one] for one in [first, *updates[num_known + 1 :]]][:num_more]


@pytest.fixture
def deployment(nats_connect: Any, nats_server: Any, subjects: Any) -> Deployment:
    return Deployment(nats_connect, nats_server, subjects)


def manual() -> ScriptedBackend:
    return ScriptedBackend(manual=True)


async def test_any_gateway_shows_and_streams_a_response_that_runs_in_another(deployment: Deployment):
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        queued = (await one.ask("POST", "", BODY)).json
        name = queued["id"]
        assert (await two.ask("GET", f"/{name}")).json == queued
        generation = await one.backend.generations.get()
        steps = text_batches(*PIECES)
        generation.put(*steps[:2])
        await has_text(two, name, "Good day ")
        assert (await two.ask("GET", f"/{name}")).json["status"] == "in_progress"
        assert (await two.ask("GET", f"/{name}/input_items")).json["data"][0]["content"][0]["text"] == "hi"
        refused = await two.ask("POST", "", {"input": "and?", "previous_response_id": name})
        assert "which is in progress" in refused.error["message"]
        reading = [asyncio.create_task(gateway.events(name, after)) for gateway in (one, two) for after in (-1, 4)]
        generation.put(*steps[2:], None)
        whole, rest, same, other_rest = await asyncio.gather(*reading)
        ended = await is_in(two, name, "completed")
        assert whole == same
        assert rest == other_rest == whole[5:]
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert "".join(event["delta"] for event in whole if "delta" in event) == "Good day to you"
        assert whole[-1]["response"] == ended == (await one.ask("GET", f"/{name}")).json
        assert await two.events(name, 4) == rest
        more = await two.ask("POST", "", {"input": "and?", "previous_response_id": name, "background": True})
        assert more.status == 200
        asked = await two.backend.generations.get()
        assert [message.content for message in asked.request.inputs.messages] == ["hi", "Good day to you", "and?"]


@pytest.mark.matrix("R-17")
async def test_a_response_whose_gateway_is_gone_goes_on_at_another_and_ends_once(deployment: Deployment):
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        name = (await one.ask("POST", "", BODY)).json["id"]
        generation = await one.backend.generations.get()
        steps = text_batches(*PIECES)
        generation.put(*steps[:2])
        await has_text(two, name, "Good day ")
        reading = [asyncio.create_task(gateway.events(name)) for gateway in (one, two)]
        # Not only gone: it stands still, and wakes up when another gateway has the response.
        deployment.living = {("two", "boot")}
        resumed = await two.backend.generations.get()
        assert resumed.request.params.seed == 1
        resumed.put(*again(resumed.request, 2))
        generation.put(*steps[2:], None)
        await asyncio.wait_for(generation.stopped.wait(), 60)
        first = again(resumed.request, 9)
        resumed.put(*first[2:], None)
        ended = await is_in(two, name, "completed")
        events, same = await asyncio.gather(*reading)
        assert events == same
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event["delta"] for event in events if "delta" in event) == "Good day to you"
        kinds = [event["type"] for event in events]
        assert [kinds.count(kind) for kind in (kinds[0], "response.in_progress", "response.completed")] == [1, 1, 1]
        assert ended["output"][0]["content"][0]["text"] == "Good day to you"
        assert events[-1]["response"] == ended == (await one.ask("GET", f"/{name}")).json


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_response_is_cancelled_at_any_gateway(
    nats_connect: Any, nats_server: Any, subjects: Any, is_gone: bool
):
    recorder = Recorder(8)
    deployment = Deployment(nats_connect, nats_server, subjects, recorder=recorder)
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        name = (await one.ask("POST", "", BODY)).json["id"]
        generation = await one.backend.generations.get()
        steps = text_batches(*PIECES)
        generation.put(steps[0])
        await has_text(two, name, "Good ")
        if is_gone:
            deployment.living = {("two", "boot")}
        cancelled = (await two.ask("POST", f"/{name}/cancel")).json
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"] == "Good "
        generation.put(steps[1])
        one.streams.on_taken(StreamTaken(name.removeprefix("resp_"), 9))
        await asyncio.wait_for(generation.stopped.wait(), 60)
        assert await endings(recorder) == [("cancelled", "stream_taken")]
        for gateway in (one, two):
            assert (await gateway.ask("GET", f"/{name}")).json == cancelled
            assert (await gateway.ask("POST", f"/{name}/cancel")).json == cancelled
            assert [event["type"] for event in await gateway.events(name)][-1] == "response.output_text.delta"
        assert (await one.ask("DELETE", f"/{name}")).json["deleted"] is True
        assert (await two.ask("GET", f"/{name}")).status == 404


async def test_the_record_of_a_response_tells_that_the_api_has_cancelled_it(
    nats_connect: Any, nats_server: Any, subjects: Any
):
    recorder = Recorder(8)
    deployment = Deployment(nats_connect, nats_server, subjects, recorder=recorder)
    async with deployment.gateway("one", manual()) as one:
        name = (await one.ask("POST", "", BODY)).json["id"]
        generation = await one.backend.generations.get()
        assert (await one.ask("POST", f"/{name}/cancel")).json["status"] == "cancelled"
        assert generation.cancelled == ["abort"]
        assert await endings(recorder) == [("cancelled", "cancelled_by_api")]


async def test_a_response_that_runs_in_another_gateway_is_deleted(deployment: Deployment):
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        name = (await one.ask("POST", "", BODY)).json["id"]
        await one.backend.generations.get()
        assert (await two.ask("DELETE", f"/{name}")).json["deleted"] is True
        for gateway in (one, two):
            assert (await gateway.ask("GET", f"/{name}")).status == 404


async def test_a_failure_ends_a_response_for_all_gateways(deployment: Deployment):
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        name = (await one.ask("POST", "", BODY)).json["id"]
        generation = await one.backend.generations.get()
        generation.put(text_batches(*PIECES)[0])
        await has_text(two, name, "Good ")
        generation.put(ServiceError("engine_failure", "The engine died."))
        failed = await is_in(two, name, "failed")
        assert failed["error"] == {"code": "server_error", "message": "The engine died."}
        assert failed["output"][0]["content"][0]["text"] == "Good "
        events = await two.events(name)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1] == {
            "type": "response.failed", "sequence_number": len(events) - 1, "response": failed
        }  # fmt: skip


async def test_a_gateway_that_shuts_down_leaves_its_responses_to_others(
    nats_connect: Any, nats_server: Any, subjects: Any
):
    recorder = Recorder(8)
    deployment = Deployment(nats_connect, nats_server, subjects, recorder=recorder)
    async with deployment.gateway("two", manual()) as two:
        async with deployment.gateway("one", manual()) as one:
            name = (await one.ask("POST", "", BODY)).json["id"]
            generation = await one.backend.generations.get()
            generation.put(text_batches(*PIECES)[0])
            await has_text(two, name, "Good ")
        deployment.living = {("two", "boot")}
        assert generation.cancelled == ["abort"]
        assert await endings(recorder) == [("cancelled", "draining")]
        resumed = await two.backend.generations.get()
        resumed.put(*again(resumed.request, 9), None)
        ended = await is_in(two, name, "completed")
        assert ended["output"][0]["content"][0]["text"] == "Good day to you"


async def test_a_response_that_gateways_die_of_fails_after_its_third_start(deployment: Deployment):
    async with contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(deployment.gateway(name, manual())) for name in ("one", "two")]
        name = (await gateways[0].ask("POST", "", BODY)).json["id"]
        await gateways[0].backend.generations.get()
        for number in range(2, 4):
            deployment.living = {(f"{number}", "boot")}
            gateways.append(await stack.enter_async_context(deployment.gateway(f"{number}", manual())))
            await gateways[-1].backend.generations.get()
        last = await stack.enter_async_context(deployment.gateway("last", manual()))
        deployment.living = {("last", "boot")}
        failed = await is_in(last, name, "failed")
        assert failed["error"]["code"] == "server_error"
        assert "started 3 times" in failed["error"]["message"]
        assert last.backend.requests == []
        assert (await last.events(name))[-1]["type"] == "response.failed"


async def test_output_and_an_orderly_end_of_a_gateway_end_the_count_of_starts(deployment: Deployment):
    async with deployment.gateway("last", manual()) as last:

        async def starts() -> int:
            found = await last.streams.store.find(name.removeprefix("resp_"))
            assert found is not None
            return found[0].starts

        async with deployment.gateway("one", manual()) as one:
            name = (await one.ask("POST", "", BODY)).json["id"]
            await one.backend.generations.get()
            async with deployment.gateway("two", manual()) as two:
                deployment.living = {("two", "boot")}
                generation = await two.backend.generations.get()
                assert await starts() == 2
            assert await starts() == 1, "it has left the response in an orderly way"
            async with deployment.gateway("three", manual()) as three:
                deployment.living = {("three", "boot")}
                generation = await three.backend.generations.get()
                assert await starts() == 2
                generation.put(text_batches(*PIECES)[0])
                await has_text(three, name, "Good ")
                (run,) = three.streams.running.values()
                await until(lambda: not run.stream.journaled.has_news)  # type: ignore[union-attr]
                deployment.living = {("last", "boot")}
                await last.backend.generations.get()
                assert await starts() == 1


async def test_only_the_key_that_made_a_response_knows_it_and_it_fails_if_the_key_is_taken_away(
    nats_connect, nats_server, subjects
):
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    deployment = Deployment(nats_connect, nats_server, subjects, keys=keys)
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        mine, other = ({"authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        name = (await one.ask("POST", "", BODY, **mine)).json["id"]
        generation = await one.backend.generations.get()
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            assert (await two.ask(method, f"/{name}{path}", **other)).status == 404
        assert (await two.ask("GET", f"/{name}", **mine)).json["status"] == "queued"
        assert generation.cancelled == []
        keys.replace([key for key in keys_of_text(KEY_FILE, is_json=False, source="") if key.name == "two"])
        deployment.living = {("two", "boot")}

        async def over() -> bool:
            return await two.streams.store.find(name.removeprefix("resp_")) is None

        await until(over)
        keys.replace(keys_of_text(KEY_FILE, is_json=False, source=""))
        assert two.backend.requests == []
        assert "does not exist any more" in (await two.ask("GET", f"/{name}", **mine)).json["error"]["message"]


async def test_a_response_that_goes_on_does_not_count_against_the_limits_of_its_key_again(
    nats_connect, nats_server, subjects
):
    # Each gateway of this test counts by itself; together they would be stricter, not more lenient.
    listed = KEY_FILE.replace('key = "sk-one"', 'key = "sk-one"\nrequests_per_minute = 1')
    deployment = Deployment(
        nats_connect, nats_server, subjects, keys=ApiKeys("", keys_of_text(listed, is_json=False, source=""))
    )
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        mine = {"authorization": "Bearer sk-one"}
        name = (await one.ask("POST", "", BODY, **mine)).json["id"]
        await one.backend.generations.get()
        (await two.ask("POST", "", {"input": "whatever", "background": True}, **mine)).json["id"]
        await two.backend.generations.get()
        deployment.living = {("two", "boot")}
        resumed = await two.backend.generations.get()
        resumed.put(*[[batch[0]] for batch in text_batches(*PIECES)], None)

        async def completed() -> bool:
            return (await two.ask("GET", f"/{name}", **mine)).json["status"] == "completed"

        await until(completed)


async def test_a_response_outlives_a_bus_that_forgets_everything(nats_connect, private_nats_server, subjects):
    deployment = Deployment(nats_connect, private_nats_server, subjects)
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        name = (await one.ask("POST", "", BODY)).json["id"]
        generation = await one.backend.generations.get()
        steps = text_batches(*PIECES)
        generation.put(*steps[:2])
        await has_text(two, name, "Good day ")
        private_nats_server.kill()
        unknown = await two.ask("GET", f"/{name}")
        assert (unknown.status, unknown.error["code"]) == (503, "bus_unavailable")
        private_nats_server.start()
        generation.put(*steps[2:], None)

        async def ended() -> bool:
            reply = await two.ask("GET", f"/{name}")
            return reply.status == 200 and reply.json["status"] == "completed"

        await until(ended)
        events = await two.events(name)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event["delta"] for event in events if "delta" in event) == "Good day to you"
