"""Which requests had the engines while another one waited for them."""

import asyncio
from typing import Any

import pytest

from antiphon.services.gateway.ops.timeline.contention import NAMED_MAX, Wait, contention, during, wait_of
from antiphon.services.gateway.ops.timeline.directory import BusRecordDirectory
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.ops.timeline.recorder import Recorder as AnyRecorder
from antiphon.services.gateway.ops.timeline.request_record import RequestRecord
from antiphon.services.gateway.path.record import RequestFacts
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import Decoder, encode
from antiphon.shared.messages import GatewayStatus, RecordListQuery, RecordQuery
from antiphon.shared.subjects import Subjects
from tests.support.heartbeats import heartbeat
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation

CREATED = 1_000.0


def timeline(*spans: tuple[str, str | None, float], duration_s: float = 0.0) -> dict[str, Any]:
    """A timeline whose spans have these causes, places and durations."""
    told: list[dict[str, Any]] = []
    at = 0.0
    for cause, where, seconds in spans:
        told.append({"cause": cause, "where": where, "start_s": at, "end_s": at + seconds})
        at += seconds
    return {"id": "slow", "model": "toy", "created": CREATED, "duration_s": duration_s or at, "spans": told}


def other(name: str, began: float, ended: float, engine: str = "engine-1", **more: Any) -> dict[str, Any]:
    """A request that an engine computed between these seconds, counted from `CREATED`; it arrived a second before."""
    phases = {"admission": 0.4, "engine_queue": 0.6, "prefill": 0.1, "decode": ended - began - 0.1, "delivery": 0.5}
    facts = {"id": name, "client_request_id": None, "key": "red", "model": "toy", "state": "completed"}
    facts |= {"engines": [engine], "completion_tokens": 7}
    return {**facts, "created": CREATED + began - 1, "duration_s": ended - began + 1.5, "phases": phases, **more}


def test_a_wait_is_the_time_in_both_queues():
    found = timeline(("admission", None, 0.1), ("gateway_queue", None, 7.0), ("engine_queue", "engine-2", 3.8))
    wait = wait_of(found)
    assert wait is not None
    assert (wait.from_s, wait.to_s, wait.engine) == (0.1, pytest.approx(10.9), "")
    assert during(found, wait) == (CREATED + 0.1, pytest.approx(CREATED + 10.9))
    alone = wait_of(timeline(("gateway_queue", None, 0.001), ("engine_queue", "engine-2", 3.8)))
    assert alone is not None
    assert alone.engine == "engine-2", "in the queue of an engine it waits for this one"


def test_who_hardly_waited_has_no_wait():
    assert wait_of(timeline(("gateway_queue", None, 0.1), ("decode", "engine-1", 0.2))) is None
    assert wait_of(timeline(("engine_queue", "engine-1", 0.5), ("decode", "engine-1", 20.0))) is None
    assert wait_of(timeline(("decode", "engine-1", 20.0))) is None


def named(wait: Wait, *others: dict[str, Any], key: str = "") -> list[tuple[str, float]]:
    found = contention(timeline(("gateway_queue", None, 10.0)), wait, list(others), key)
    return [] if found is None else [(one["id"], one["overlap_s"]) for one in found["requests"]]


def test_requests_that_an_engine_computed_meanwhile_are_named_longest_first():
    wait = Wait(2.0, 10.0, "")
    assert named(
        wait,
        other("before", -5.0, 1.9),
        other("begins", -5.0, 4.0),
        other("within", 3.0, 8.5, "engine-2"),
        other("whole", 0.0, 30.0),
        other("after", 10.1, 12.0),
        other("slow", 2.0, 10.0),
        other("elsewhere", 2.0, 10.0, model="other"),
        other("waits too", 2.0, 10.0, phases={"gateway_queue": 8.0}),
    ) == [("whole", 8.0), ("within", 5.5), ("begins", 2.0)]
    assert named(Wait(2.0, 10.0, "engine-2"), other("a", 0.0, 5.0), other("b", 0.0, 5.0, "engine-2")) == [("b", 3.0)]
    assert named(wait) == []


def told(*others: dict[str, Any], key: str = "", engine: str = "") -> dict[str, Any]:
    found = contention(timeline(("gateway_queue", None, 10.0)), Wait(0.0, 10.0, engine), list(others), key)
    assert found is not None
    return found


def test_the_sentence_counts_the_requests_and_tells_of_the_key_with_most():
    reds = [other(f"red-{number}", 1.0, 5.0) for number in range(3)]
    assert told(*reds)["text"] == "Meanwhile, the engines were computing 3 other requests."
    assert told(reds[0], engine="engine-1")["text"] == "Meanwhile, engine-1 was computing 1 other request."
    mixed = told(*reds, other("blue", 1.0, 5.0, key="blue"))
    assert mixed["text"] == "Meanwhile, the engines were computing 4 other requests, 3 of the key red."
    many = told(*[other(f"n{number}", 1.0, 5.0) for number in range(NAMED_MAX + 5)])
    assert (many["num_requests"], len(many["requests"])) == (NAMED_MAX + 5, NAMED_MAX)


def test_requests_of_other_keys_are_counted_and_not_named():
    found = told(other("mine", 1.0, 5.0), other("secret-1", 1.0, 9.0, key="blue"), key="red")
    assert found["text"] == "Meanwhile, the engines were computing 2 other requests, 1 of other API keys."
    assert [one["id"] for one in found["requests"]] == ["mine"]
    assert (found["num_requests"], found["num_hidden"]) == (2, 1)
    assert "secret" not in str(found)
    assert "blue" not in str(found)


def recorded(recorder: AnyRecorder, name: str, at_s: float, placed_s: float, first_s: float, ended_s: float) -> None:
    """Records a request that arrived at `at_s`; the other times are seconds since its arrival."""
    now = [0.0]
    record = recorder.begin(RequestFacts(request_id=name, model="toy", key="red"), 0.0)
    assert isinstance(record, RequestRecord)
    record._now = lambda: now[0]  # pyright: ignore[reportPrivateUsage]
    record.created = CREATED + at_s
    record.admitted()
    record.tokenized(3)
    for now[0], event in (
        (placed_s, lambda: record.placed(0, 1, "engine-1", "d")),
        (first_s, lambda: record.arrived(0, 1)),
        (ended_s, lambda: record.arrived(0, 1)),
    ):
        event()
    record.ended("completed", "", 3, 0, 2, ("stop",))


def test_the_requests_of_all_gateways_are_looked_up_only_for_one_that_waited():
    async def main() -> None:
        bus, subjects, clock = MemoryBus(0), Subjects(), SimClock()
        here, there = Recorder(8), Recorder(8)
        recorded(here, "slow", 0.0, 6.0, 6.1, 6.5)
        recorded(here, "quick", 0.0, 0.0, 0.1, 0.5)
        recorded(there, "far", -1.0, 0.0, 0.1, 5.0)
        recorded(there, "long ago", -100.0, 0.0, 0.1, 5.0)
        host = Host(transport=bus.connect("g"), subjects=subjects, clock=clock, id="g-1", instance_id="b1")
        other_host = Host(transport=bus.connect("h"), subjects=subjects, clock=clock, id="g-2", instance_id="b2")
        beats = [
            heartbeat("gateway", name, boot, GatewayStatus(num_requests=0, num_waiting=0), interval_s=1.0)
            for name, boot in IDS
        ]
        local = BusRecordDirectory(here, host, lambda: beats)
        remote = BusRecordDirectory(there, other_host, lambda: beats)
        heard: list[RecordListQuery | RecordQuery] = []
        queries: Decoder[Any] = Decoder([RecordListQuery, RecordQuery])

        async def answer(delivery: Delivery) -> None:
            query = queries.decode(delivery.payload)
            heard.append(query)
            await other_host.transport.publish(delivery.reply, encode(remote.answer(query)))

        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        await other_host.transport.subscribe(
            subjects.gateway_peers("g-2", "b2"), lambda delivery: tasks.append(loop.create_task(answer(delivery)))
        )
        quick = await local.timeline("quick", "red")
        assert quick is not None
        assert quick["meanwhile"] is None
        assert heard == []
        slow = await local.timeline("slow", "red")
        assert slow is not None
        assert [one["id"] for one in slow["meanwhile"]["requests"]] == ["far", "quick"]
        [query] = heard
        assert isinstance(query, RecordListQuery)
        assert [one["id"] for one in remote.answer(query).requests] == ["far"], "only what ran then is sent"  # pyright: ignore
        assert await local.timeline("unknown", "red") is None

    run_simulation(main, 0)


IDS = (("g-1", "b1"), ("g-2", "b2"))
