"""Who is alive: leases, incarnations, one's own broken link, and the senders of heartbeats."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.shared import codec, limits
from antiphon.shared.actors.heard import is_genuine
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import EXPIRED_MAX, HeartbeatTask, HeartbeatThread, Members, interval_of
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Heartbeat, ServiceName, StreamStatus
from antiphon.shared.subjects import Subjects
from tests.support.heartbeats import heartbeat
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation

LEASE_S = 0.6


def beat(
    member_id: str = "d1", instance_id: str = "b1", sequence: int = 1, service: ServiceName = "detokenizer"
) -> Heartbeat:
    return heartbeat(service, member_id, instance_id, StreamStatus(), sequence=sequence)


def ids(heartbeats: Sequence[Heartbeat]) -> list[tuple[str, str]]:
    return [(heartbeat.id, heartbeat.instance_id) for heartbeat in heartbeats]


def test_a_heartbeat_is_of_the_member_on_whose_subject_it_came_and_names_a_process():
    subjects = Subjects("prod")
    own = subjects.heartbeat("detokenizer", "d1")
    assert is_genuine(beat(), own, subjects)
    assert not is_genuine(beat("d2"), own, subjects)
    assert not is_genuine(beat(service="engine"), own, subjects)
    assert not is_genuine(beat(), subjects.heartbeat("detokenizer", "d2"), subjects)
    for wrong in ("", "a.b", "*", ">", "a b", "x" * 1025, "\n"):
        assert not is_genuine(beat(instance_id=wrong), own, subjects)
        assert not is_genuine(beat(wrong), own, subjects)


@pytest.fixture
def members() -> Members:
    return Members(lease_s=LEASE_S)


def test_a_member_is_alive_for_one_lease_after_its_last_heartbeat(members):
    members.observe(beat(), 10.0)
    assert ids(members.alive("detokenizer", 10.0 + LEASE_S)) == [("d1", "b1")]
    assert members.expire(10.0 + LEASE_S) == []
    assert members.alive("detokenizer", 10.7) == ()
    assert ids(members.expire(10.7)) == [("d1", "b1")]
    assert members.expire(10.7) == []
    assert members.get("detokenizer", "d1") is None


def test_who_sends_heartbeats_rarely_has_a_longer_lease(members):
    slow = heartbeat("tokenizer", "t1", "b1", StreamStatus(), interval_s=interval_of("tokenizer"))
    members.observe(slow, 0.0)
    lease_s = limits.LEASE_INTERVALS * limits.TOKENIZER_HEARTBEAT_INTERVAL_S
    assert lease_s > LEASE_S
    assert ids(members.alive("tokenizer", lease_s)) == [("t1", "b1")]
    assert ids(members.expire(0.1 + lease_s)) == [("t1", "b1")]


def test_a_later_heartbeat_renews_the_lease_and_replaces_the_status(members):
    members.observe(beat(sequence=1), 10.0)
    assert members.observe(beat(sequence=2), 10.5) == []
    assert members.expire(11.0) == []
    assert members.get("detokenizer", "d1").sequence == 2


def test_members_are_kept_by_service_and_sorted_by_id(members):
    for one in (beat("z"), beat("a"), beat("a", service="engine")):
        members.observe(one, 1.0)
    assert ids(members.alive("detokenizer", 1.0)) == [("a", "b1"), ("z", "b1")]
    assert ids(members.alive("engine", 1.0)) == [("a", "b1")]
    assert members.alive("gateway", 1.0) == ()


def test_a_new_boot_replaces_the_old_one_and_reports_it_as_lost(members):
    members.observe(beat(instance_id="b1", sequence=50), 1.0)
    assert ids(members.observe(beat(instance_id="b2", sequence=1), 1.1)) == [("d1", "b1")]
    assert ids(members.alive("detokenizer", 1.1)) == [("d1", "b2")]
    assert members.expire(1.1) == []


def test_an_expired_member_is_only_silent_until_its_successor_is_heard(members):
    members.observe(beat(instance_id="b1"), 1.0)
    assert not members.is_silent("detokenizer", "d1", "b1")
    members.expire(2.0)
    assert members.is_silent("detokenizer", "d1", "b1")
    assert not members.is_silent("detokenizer", "d1", "b0")
    members.observe(beat(instance_id="b2"), 2.1)
    assert not members.is_silent("detokenizer", "d1", "b1")


def test_a_member_that_was_found_dead_is_not_silent(members):
    members.observe(beat(instance_id="b1"), 1.0)
    members.forget("detokenizer", "d1", "b1")
    members.expire(2.0)
    assert not members.is_silent("detokenizer", "d1", "b1")


def test_silent_members_are_remembered_up_to_a_limit(members):
    for number in range(EXPIRED_MAX + 1):
        members.observe(beat(f"d{number}"), 1.0)
    members.expire(2.0)
    silent = [members.is_silent("detokenizer", f"d{number}", "b1") for number in range(EXPIRED_MAX + 1)]
    assert silent == [False] + [True] * EXPIRED_MAX


def test_a_late_heartbeat_of_a_replaced_incarnation_changes_nothing(members):
    members.observe(beat(instance_id="b1"), 1.0)
    members.observe(beat(instance_id="b2"), 1.1)
    assert members.observe(beat(instance_id="b1", sequence=99), 1.2) == []
    assert ids(members.alive("detokenizer", 1.2)) == [("d1", "b2")]


def test_a_heartbeat_out_of_order_does_not_renew_the_lease(members):
    members.observe(beat(sequence=5), 1.0)
    members.observe(beat(sequence=4), 1.5)
    assert ids(members.expire(1.7)) == [("d1", "b1")]


def test_a_member_that_was_only_silent_comes_back(members):
    members.observe(beat(sequence=1), 1.0)
    assert len(members.expire(3.0)) == 1
    assert members.observe(beat(sequence=2), 4.0) == []
    assert ids(members.alive("detokenizer", 4.0)) == [("d1", "b1")]


def test_a_member_found_dead_in_another_way_is_forgotten_unless_it_restarted_meanwhile(members):
    members.observe(beat(instance_id="b1"), 1.0)
    assert not members.forget("detokenizer", "d1", "b0")
    assert members.forget("detokenizer", "d1", "b1")
    assert not members.forget("detokenizer", "d1", "b1")
    assert members.expire(9.0) == []


def test_no_lease_runs_while_the_own_link_is_down_and_each_gets_a_whole_one_afterwards(members):
    members.observe(beat(), 1.0)
    members.suspend(1.2)
    members.suspend(50.0)
    assert members.expire(100.0) == []
    assert ids(members.alive("detokenizer", 100.0)) == [("d1", "b1")]
    members.resume(100.0)
    members.resume(100.1)
    assert members.expire(100.0 + LEASE_S) == []
    assert ids(members.expire(100.7)) == [("d1", "b1")]


def test_who_was_silent_before_the_link_broke_gets_no_new_lease(members):
    members.observe(beat("dead"), 1.0)
    members.observe(beat("alive"), 1.6)
    members.suspend(1.7)
    members.resume(5.0)
    assert ids(members.expire(5.0)) == [("dead", "b1")]
    assert ids(members.alive("detokenizer", 5.0)) == [("alive", "b1")]


def test_after_the_own_link_was_down_members_have_time_to_connect_again():
    short = Members(lease_s=limits.RECONNECT_S / 2)
    short.observe(beat(), 1.0)
    short.suspend(1.1)
    short.resume(5.0)
    short.observe(beat(sequence=2), 5.1)
    assert short.expire(5.0 + limits.RECONNECT_S) == []
    assert ids(short.expire(5.1 + limits.RECONNECT_S)) == [("d1", "b1")]


def test_a_member_that_was_heard_without_a_heartbeat_has_a_new_lease(members):
    members.observe(beat(), 1.0)
    members.heard("detokenizer", "d1", "b0", 1.5)
    members.heard("detokenizer", "d2", "b1", 1.5)
    assert ids(members.alive("detokenizer", 1.0 + LEASE_S)) == [("d1", "b1")]
    members.heard("detokenizer", "d1", "b1", 1.5)
    assert ids(members.alive("detokenizer", 1.5 + LEASE_S)) == [("d1", "b1")]
    assert [age_s for _, age_s in members.ages(1.75)] == [0.75]
    assert ids(members.expire(2.2)) == [("d1", "b1")]


def test_a_member_that_sends_no_heartbeat_any_more_is_lost_although_it_is_heard(members):
    members.observe(beat(), 1.0)
    for tenths in range(1, 30):
        members.heard("detokenizer", "d1", "b1", 1.0 + tenths / 10)
    assert ids(members.alive("detokenizer", 1.0 + limits.STATUS_AGE_MAX_S)) == [("d1", "b1")]
    assert ids(members.expire(1.1 + limits.STATUS_AGE_MAX_S)) == [("d1", "b1")]


def test_a_member_that_is_spared_lives_again_with_its_next_heartbeat(members):
    members.observe(beat(), 1.0)
    assert members.expire_silent(5.0, lambda one: True) == []
    assert members.alive("detokenizer", 5.0) == ()
    assert [age_s for _, age_s in members.ages(5.0)] == [4.0]
    members.observe(beat(sequence=2), 5.1)
    assert ids(members.alive("detokenizer", 5.2)) == [("d1", "b1")]


def test_a_member_that_is_spared_is_lost_when_it_is_replaced_or_silent_for_too_long(members):
    members.observe(beat(), 1.0)
    assert members.expire_silent(1.0 + limits.LONE_SILENCE_S, lambda one: True) == []
    assert ids(members.observe(beat(instance_id="b2"), 1.0 + limits.LONE_SILENCE_S)) == [("d1", "b1")]
    members.observe(beat("d2"), 1.0)
    [(lost, silent_s)] = members.expire_silent(1.5 + limits.LONE_SILENCE_S, lambda one: True)
    assert (lost.id, silent_s) == ("d2", 0.5 + limits.LONE_SILENCE_S)


PAUSES_S = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["beat", "heard"]), st.sampled_from("ab"), st.integers(0, 3), PAUSES_S),
        st.tuples(st.sampled_from(["suspend", "resume", "expire"]), st.just(""), st.just(0), PAUSES_S),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(EVENTS)
def test_an_incarnation_is_lost_once_and_a_replaced_one_never_comes_back(events):
    members, now = Members(lease_s=LEASE_S), 0.0
    known: dict[str, str] = {}
    replaced: set[tuple[str, str]] = set()
    for sequence, (event, name, number, pause_s) in enumerate(events, 1):
        now += pause_s
        if event == "beat":
            instance_id = f"b{number}"
            lost = members.observe(beat(name, instance_id, sequence), now)
            expected = (
                []
                if (name, instance_id) in replaced or known.get(name) in (None, instance_id)
                else [(name, known[name])]
            )
            assert ids(lost) == expected
            replaced.update(expected)
            if (name, instance_id) not in replaced:
                known[name] = instance_id
        elif event == "heard":
            members.heard("detokenizer", name, f"b{number}", now)
        elif event == "expire":
            for lost_id, lost_instance_id in ids(members.expire(now)):
                assert known.pop(lost_id) == lost_instance_id
        else:
            getattr(members, event)(now)
        alive = members.alive("detokenizer", now)
        assert dict(ids(alive)).items() <= known.items()
        assert alive == members._find_alive("detokenizer", now).members
    members.resume(now)
    assert dict(ids(members.expire(now + 2 * LEASE_S))) == known


class Detokenizer:
    """What heartbeats need of a service: it is never started."""

    name: ServiceName = "detokenizer"

    def __init__(self) -> None:
        self.streams = 0
        self.asked = 0

    def status(self) -> StreamStatus:
        self.asked += 1
        return StreamStatus(num_streams=self.streams)

    async def start(self, host: Host) -> None:
        raise AssertionError

    async def drain(self) -> None:
        raise AssertionError

    async def run(self) -> None:
        raise AssertionError


def listen(transport, heard: list[tuple[float, Heartbeat]]):
    decoder, loop = codec.Decoder((Heartbeat,)), asyncio.get_running_loop()
    receive = lambda delivery: heard.append((loop.time(), decoder.decode(delivery.payload)))  # noqa: E731
    return transport.subscribe(Subjects().heartbeats("detokenizer"), receive)


def simulated(scenario):
    """Runs `scenario(bus, sender, service, heard)` in virtual time and returns what was heard."""

    async def main():
        bus, heard, service = MemoryBus(), [], Detokenizer()
        host = Host(transport=bus.connect("d1"), subjects=Subjects(), clock=SimClock(), id="d1", instance_id="b1")
        await listen(bus.connect("watcher"), heard)
        await scenario(bus, HeartbeatTask(host, service, interval_s=0.1), service, heard)
        await asyncio.sleep(0.001)
        return [(round(at, 6), heartbeat) for at, heartbeat in heard]

    return run_simulation(main)


def test_heartbeats_come_at_once_and_then_at_their_interval_with_state_and_load():
    async def scenario(bus, sender, service, heard):
        await sender.start("ready")
        await asyncio.sleep(0.15)
        service.streams = 3
        await asyncio.sleep(0.1)
        await sender.stop()

    heard = simulated(scenario)
    assert [at for at, _ in heard] == [0.0, 0.1, 0.2, 0.25]
    assert [h.sequence for _, h in heard] == [1, 2, 3, 4]
    assert [h.status.num_streams for _, h in heard] == [0, 0, 3, 3]
    assert [h.state for _, h in heard] == ["ready", "ready", "ready", "draining"]
    assert {(h.service, h.id, h.instance_id, h.protocol, h.interval_s) for _, h in heard} == {
        ("detokenizer", "d1", "b1", limits.PROTOCOL_VERSION, 0.1)
    }


def test_heartbeats_come_at_the_same_beats_whenever_they_begin():
    async def scenario(bus, sender, service, heard):
        await asyncio.sleep(0.07)
        await sender.start("ready")
        await asyncio.sleep(0.35)

    assert [at for at, _ in simulated(scenario)] == [0.07, 0.2, 0.3, 0.4]


def test_a_change_of_state_is_announced_at_once():
    async def scenario(bus, sender, service, heard):
        await sender.start("ready")
        await asyncio.sleep(0.03)
        await sender.announce("draining")
        await asyncio.sleep(0.1)

    assert [(at, h.state) for at, h in simulated(scenario)] == [(0.0, "ready"), (0.03, "draining"), (0.1, "draining")]


def test_no_heartbeat_is_kept_for_later_while_the_bus_is_away():
    async def scenario(bus, sender, service, heard):
        await sender.start("ready")
        await asyncio.sleep(0.05)
        bus.partition("d1")
        await asyncio.sleep(1.0)
        bus.heal("d1")
        await asyncio.sleep(0.1)

    assert [at for at, _ in simulated(scenario)] == [0.0, 1.1]


def test_a_status_that_fails_ends_the_heartbeats_and_says_why():
    async def scenario(bus, sender, service, heard):
        service.status = lambda: 1 // 0
        await sender.start("ready")
        with pytest.raises(ZeroDivisionError):
            await sender.failed()

    assert simulated(scenario) == []


# --- the thread, on a real server -------------------------------------------------------------------------------------


@pytest.fixture
async def threaded(nats_server, nats_connect, subjects):
    """A heartbeat thread, the queue of what it says, and the service that it asks for its status."""
    heard: asyncio.Queue[Heartbeat] = asyncio.Queue()
    decoder = codec.Decoder((Heartbeat,))
    watcher = await nats_connect(nats_server, "watcher")
    await watcher.subscribe(
        subjects.heartbeats("detokenizer"), lambda delivery: heard.put_nowait(decoder.decode(delivery.payload))
    )
    await watcher.barrier()
    host = Host(transport=watcher, subjects=subjects, clock=SystemClock(), id="d1", instance_id="b1")

    async def connect() -> NatsTransport:
        return await NatsTransport.connect(
            [nats_server.url], name="beats", inbox_prefix="beats", credentials=nats_server.credentials
        )

    service = Detokenizer()
    sender = HeartbeatThread(host, service, connect, interval_s=0.02)
    yield sender, heard, service
    await sender.stop()


@pytest.mark.nats
async def test_the_thread_sends_while_the_main_loop_is_busy(threaded):
    sender, heard, service = threaded
    await sender.start("ready")
    first = await asyncio.wait_for(heard.get(), 60)
    asked, deadline = service.asked, time.monotonic() + 60
    while service.asked < asked + 6:  # a step that blocks the loop; the sixth is asked for when the fifth is sent
        assert time.monotonic() < deadline
        time.sleep(0.01)  # noqa: ASYNC251
    following = [(await asyncio.wait_for(heard.get(), 60)).sequence for _ in range(5)]
    assert following == [*range(first.sequence + 1, first.sequence + 6)]


@pytest.mark.nats
async def test_the_thread_announces_a_state_and_says_a_last_word(threaded):
    sender, heard, _ = threaded
    await sender.start("ready")
    await sender.announce("draining")
    await sender.stop()
    await sender.failed()
    states = []
    while not states or states[-1] != "draining":
        states.append((await asyncio.wait_for(heard.get(), 60)).state)
    assert states[0] == "ready"


@pytest.mark.nats
async def test_a_thread_that_cannot_connect_says_so_at_the_start(subjects, unused_port):
    def connect():
        url = f"nats://127.0.0.1:{unused_port}"
        return NatsTransport.connect([url], name="beats", inbox_prefix="beats", wait_s=0.1)

    host = Host(transport=MemoryBus().connect("d1"), subjects=subjects, clock=SystemClock(), id="d1", instance_id="b1")
    sender = HeartbeatThread(host, Detokenizer(), connect)
    with pytest.raises(ServiceError):
        await sender.start("ready")
    await sender.stop()


def test_a_heartbeat_that_the_bus_does_not_take_is_counted_and_warned_of(caplog):
    async def scenario(bus, sender, service, heard):
        bus.max_payload = 10
        await sender.start("ready")
        await asyncio.sleep(0.25)
        assert sender.unsent == 3
        bus.max_payload = 2**20
        await asyncio.sleep(0.1)
        await sender.stop()

    heard = simulated(scenario)
    assert [h.sequence for _, h in heard] == [4, 5]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("heartbeat 1 of d1 not sent" in message for message in warned)
