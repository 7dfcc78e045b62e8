"""What each API key has in the logs on the bus, of which several gateways fill their parts (`access.log_part`)."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.edge.access.kept_images import KeptImages, kept_image
from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.guests.background.store import BackgroundStore, EventBatch
from antiphon.services.gateway.guests.responses.stored.records import LogRecords
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore, StoredResponse
from antiphon.services.gateway.guests.resume.record import StreamRecord
from antiphon.services.gateway.guests.resume.store import StreamStore
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import ScriptedBackend, call
from tests.integration.test_background_responses import until
from tests.integration.test_streams import CHAT, KEY_FILE, gateway, good_day_again, ids_of

pytestmark = pytest.mark.nats
NAMES = ("one", "two")
SIZE = 10_000
"""Bytes of an entry. The logs have room for 35, so each of the two gateways keeps 10 of them."""


@pytest.fixture(autouse=True)
def _small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STREAM_STORE_BYTES", "BACKGROUND_RECORD_BYTES", "BACKGROUND_EVENT_BYTES"):
        monkeypatch.setattr(limits, name, {"memory": 35 * SIZE})
    monkeypatch.setattr(limits, "RESPONSES_BYTES_MAX", 35 * SIZE)
    monkeypatch.setattr(limits, "STREAM_STORE_TIMEOUT_S", 60.0)


@pytest.fixture
async def logs(nats_connect: Any, nats_server: Any, subjects: Any) -> list[GatewayLogs]:
    hosts = [
        Host(
            transport=await nats_connect(nats_server, name),
            subjects=subjects,
            clock=SystemClock(),
            id=f"gateway-{name}",
            instance_id="boot",
        )
        for name in NAMES
    ]
    return [GatewayLogs(host, "memory", lambda: 2) for host in hosts]


def response(key: str, number: int, size: int = SIZE) -> StoredResponse:
    told = {"id": f"resp_{key}{number}", "text": "x" * (size - 200)}
    return StoredResponse(response=told, input_items=[], turns=[], key_name=key)


def record(key: str, name: str, owner: str = "gateway-one") -> StreamRecord:
    body = b"x" * (SIZE - 300)
    return StreamRecord(
        request_id=f"{key}{name}",
        path="/v1/x",
        body=body,
        key_name=key,
        client_request_id="",
        timeout="",
        created=0,
        seed=1,
        owner_id=owner,
        owner_instance_id="boot",
        fence=1,
        renewed_at=0.0,
        outlives_client=True,
        journal_from=1,
    )


async def gone(find: Callable[[str], Awaitable[Any]], name: str) -> None:
    async def is_gone() -> bool:
        return await find(name) is None

    await until(is_gone)


async def test_a_flood_of_responses_leaves_those_of_other_keys(logs: list[GatewayLogs]):
    stores = [ResponseStore(LogRecords(KeptImages(one), "Responses")) for one in logs]
    for number in range(4):
        await stores[number % 2].put(response("alice", number))
    for number in range(60):
        await stores[number % 2].put(response("bob", number))
    for store in stores:
        for number in range(4):
            assert await store.get(f"resp_alice{number}") is not None
        for number in range(44):
            await gone(store.get, f"resp_bob{number}")
        for number in range(46, 60):
            assert await store.get(f"resp_bob{number}") is not None
    await stores[0].put(response("bob", 99, 11 * SIZE))
    assert await stores[0].get("resp_bob99") is None, "larger than the gateway's part"
    assert await stores[1].get("resp_alice0") is not None


async def test_a_response_whose_image_another_key_or_gateway_has_too_keeps_it(logs: list[GatewayLogs]):
    images = [KeptImages(one) for one in logs]
    file = b"p" * SIZE
    name = kept_image(file)
    for key, place in (("alice", 0), ("bob", 0), ("carol", 0), ("carol", 1)):
        await images[place].put(key, {name: file})
    for number in range(20):
        await images[0].part.append("bob", logs[0].host.subjects.response(f"b{number}"), b"x" * SIZE)
    for number in range(20):
        await images[0].part.append("carol", logs[0].host.subjects.response(f"c{number}"), b"x" * SIZE)

    async def bobs(_: str) -> Any:
        return (await images[1].get("bob", [name])).get(name)

    await gone(bobs, "")
    last = logs[0].host.subjects.response("c0")
    await gone(lambda _: _payload(images[1], last), "")
    for key in ("alice", "carol"):
        assert await images[1].get(key, [name]) == {name: file}


async def _payload(images: KeptImages, subject: str) -> bytes | None:
    found = await images.part.log.last(subject)
    return found.payload or None if found is not None else None


async def test_a_flood_of_streams_leaves_those_of_other_keys(nats_connect: Any, nats_server: Any, subjects: Any):
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    alice, bob = ({"authorization": f"Bearer sk-{name}", "x-antiphon-resumable": "1"} for name in NAMES)
    transports = [await nats_connect(nats_server, name) for name in NAMES]

    async def stream(port: int, headers: dict[str, str], pad: int) -> str:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "user": "u" * pad}
        return ids_of((await call(port, "POST", CHAT, body, headers)).body)[0].replace(":", "?from=")

    async with (
        gateway(transports[0], subjects, ScriptedBackend(reply=good_day_again), keys=keys) as (first, _),
        gateway(transports[1], subjects, ScriptedBackend(reply=good_day_again), "gateway-2", keys=keys) as (second, _),
    ):
        ports = (first, second)
        mine = [await stream(ports[number % 2], alice, 100) for number in range(6)]
        others = [await stream(ports[number % 2], bob, SIZE) for number in range(60)]
        for port in ports:
            for number, one in enumerate((*mine, others[-1])):
                found = await call(port, "GET", f"/v1/streams/{one}", headers=bob if one in others else alice)
                assert found.status == 200, (number, port == first)
        lost = await call(first, "GET", f"/v1/streams/{others[0]}", headers=bob)
        assert (lost.status, lost.error["code"]) == (404, "not_found")


async def test_a_record_is_dropped_only_after_its_run_and_only_by_its_owner(logs: list[GatewayLogs]):
    one, two = [StreamStore(KeptImages(each)) for each in logs]
    await one.open()
    for name in ("running", "moved", "ended"):
        assert await one.create(record("bob", name))
        one.use(f"bob{name}")

    async def is_stored() -> bool:
        return await one.find("bobmoved") is not None

    await until(is_stored)
    found = await one.find("bobmoved")
    assert found is not None
    assert await two.replace(replace(found[0], owner_id="gateway-two"), found[1])
    for name in ("ended", "moved"):
        one.release(f"bob{name}")
    for number in range(20):
        assert await one.create(record("bob", str(number)))
        await one.find(f"bob{number}")
    await gone(one.find, "bob0")
    assert await one.find("bobended") is None
    for name in ("bobrunning", "bobmoved"):
        assert await two.find(name) is not None
    for number in range(4):
        assert await one.create(record("bob", f"more{number}"))
        one.use(f"bobmore{number}")
    assert not await one.create(record("bob", "one-too-many")), "running ones may have a half"
    for number in range(2):
        assert await one.create(record("alice", str(number)))
        one.use(f"alice{number}")
    assert not await one.create(record("alice", "one-too-many"))


async def test_the_events_of_ended_background_responses_are_dropped_before_those_of_running_ones(
    logs: list[GatewayLogs],
):
    one, two = [BackgroundStore(KeptImages(each)) for each in logs]

    async def write(owner: str, name: str) -> None:
        written = record(owner, name)
        one.use(written.request_id)
        last = 0
        for number in range(3):
            batch = EventBatch(fence=1, first=number, events=(b"x" * (SIZE // 3),), ended=number == 2)
            appended = await one.append(written, batch, last)
            assert appended
            last = appended

    await write("bob", "running")
    await write("alice", "a")
    one.release("alicea")
    for number in range(20):
        await write("bob", str(number))
        await one.forget(f"bob{number}")

    async def is_dropped() -> bool:
        found = await two.last("bob0")
        return found is None or not found[0].events

    await until(is_dropped)
    with pytest.raises(ServiceError, match="dropped events"):
        await two.history("bob0")
    for name in ("bobrunning", "alicea", "bob19"):
        assert len((await two.history(name)).events) == 3


async def test_a_background_request_that_has_no_room_is_not_recorded(logs: list[GatewayLogs]):
    store = BackgroundStore(KeptImages(logs[0]))
    for number in range(5):
        assert await store.create(record("bob", str(number)))
        store.use(f"bob{number}")
    assert await store.create(record("bob", "one-too-many")) is None
    assert await store.create(record("alice", "")) is not None
    await store.forget("bob0")
    assert await store.find("bob0") is None
    assert await store.create(record("bob", "now")) is not None
