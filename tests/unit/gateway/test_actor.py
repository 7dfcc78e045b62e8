"""What the gateway's actor makes of heartbeats: who is lost, which models are served and how they are named."""

import asyncio
import itertools
import math

import pytest

from antiphon.services.gateway.apis.openai.request_context import system_fingerprint
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.liveness.pulse import TICK_S
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope
from antiphon.shared.actors.host import Host
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    GatewayStatus,
    Heartbeat,
    OwnershipQuery,
    PoolStatus,
    SequenceRef,
    StreamStatus,
)
from antiphon.shared.subjects import Subjects
from tests.support.heartbeats import engine_status, heartbeat
from tests.support.memory import MemoryBus

SEQUENCE = itertools.count()
"""Numbers of heartbeats: an older one is not heard."""
STATUS = engine_status()
LEASE_TICKS = math.ceil(limits.LEASE_S / TICK_S)
"""The tick at which a member is lost that was heard at time 0 only."""


class HeldClock:
    """Stands where it is put."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 0


@pytest.fixture
async def actor() -> GatewayActor:
    """One that has just heard of a tokenizer."""
    host = Host(
        transport=MemoryBus(0).connect("gateway"),
        subjects=Subjects(),
        clock=HeldClock(),
        id="g1",
        instance_id="boot0000",
    )
    actor = GatewayActor(host)
    actor.members.observe(heartbeat("tokenizer", "t1", "boot0001", PoolStatus(), sequence=0, interval_s=TICK_S), 0.0)
    return actor


def heard(beat: Heartbeat) -> Envelope:
    return Envelope(beat, Subjects().heartbeat(beat.service, beat.id))


def ticks(actor: GatewayActor, first: int, last: int) -> None:
    for number in range(first, last + 1):
        actor.tick(number * TICK_S)


async def test_a_silent_member_is_lost_after_a_lease_and_the_log_says_so(
    actor: GatewayActor, caplog: pytest.LogCaptureFixture
) -> None:
    ticks(actor, 1, LEASE_TICKS - 1)
    assert actor.members.get("tokenizer", "t1")
    assert not caplog.records
    ticks(actor, LEASE_TICKS, LEASE_TICKS)
    assert not actor.members.get("tokenizer", "t1")
    seconds = LEASE_TICKS * TICK_S
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", f"t1 has not been heard from for {seconds:.1f} s: no other tokenizer is there")
    ]


async def test_a_member_that_starts_again_is_told_unless_it_was_draining(
    actor: GatewayActor, caplog: pytest.LogCaptureFixture
) -> None:
    actor.on_heartbeat(
        heard(heartbeat("tokenizer", "t1", "boot0002", PoolStatus(), state="draining", sequence=0, interval_s=TICK_S))
    )
    actor.on_heartbeat(heard(heartbeat("tokenizer", "t1", "boot0003", PoolStatus(), sequence=0, interval_s=TICK_S)))
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == ["t1 was started again: no other tokenizer is there"]


async def test_an_engine_that_nobody_can_replace_is_told_once_while_it_is_silent_and_not_lost(
    actor: GatewayActor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = actor.host.clock
    assert isinstance(clock, HeldClock)
    actor.on_heartbeat(heard(heartbeat("engine", "e1", "boot0002", STATUS, sequence=1, interval_s=TICK_S)))
    for number in range(1, 1 + int(5.0 / TICK_S)):
        clock.now = number * TICK_S
        actor.tick(clock.now)
    assert not actor.engines()
    assert [beat.state for beat, _ in actor.topology() if beat.service == "engine"] == ["stalled"]
    actor.on_heartbeat(heard(heartbeat("engine", "e1", "boot0002", STATUS, sequence=2, interval_s=TICK_S)))
    assert [beat.id for beat in actor.engines()] == ["e1"]
    told = [(one.levelname, one.message.split(" for ")[0]) for one in caplog.records if one.message.startswith("e1")]
    assert told == [("WARNING", "e1 has not been heard from"), ("INFO", "e1 is there again")]
    assert [one.kind for one in actor.changes.events if one.id == "e1"] == ["joined"]


async def test_a_silent_engine_is_lost_when_another_one_could_do_its_work(
    actor: GatewayActor, caplog: pytest.LogCaptureFixture
) -> None:
    clock = actor.host.clock
    assert isinstance(clock, HeldClock)
    actor.on_heartbeat(heard(heartbeat("engine", "e1", "boot0002", STATUS, sequence=1, interval_s=TICK_S)))
    for number in range(1, 3 + LEASE_TICKS):
        clock.now = number * TICK_S
        beat = heartbeat("engine", "e2", "boot0003", STATUS, sequence=number, interval_s=TICK_S)
        actor.on_heartbeat(heard(beat))
        actor.tick(clock.now)
    [told] = [one.message for one in caplog.records if one.message.startswith("e1")]
    assert told.endswith(": it had no requests")
    assert [one.id for one in actor.changes.recently_lost() if one.service == "engine"] == ["e1"]


@pytest.mark.parametrize(("other", "tells"), [("g0", False), ("g2", True)])
async def test_the_first_of_the_living_gateways_tells_of_a_lost_engine(
    actor: GatewayActor, other: str, tells: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = heartbeat("gateway", other, "boot0005", GatewayStatus(), sequence=0, interval_s=TICK_S)
    actor.on_heartbeat(heard(gateway))
    for instance in ("boot0002", "boot0003"):
        actor.on_heartbeat(heard(heartbeat("engine", "e1", instance, STATUS, sequence=0, interval_s=TICK_S)))
    told = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert told == ["e1 was started again: it had no requests"][: int(tells)]


async def test_a_gateway_that_stood_still_reads_what_was_said_before_it_calls_anybody_lost(actor: GatewayActor) -> None:
    ticks(actor, 1, 2)
    actor.tick(10.0)
    assert actor.members.get("tokenizer", "t1")
    actor.tick(10.0 + TICK_S)
    assert not actor.members.get("tokenizer", "t1")


async def test_heartbeats_are_when_it_looks_for_others_that_are_silent(actor: GatewayActor) -> None:
    clock = actor.host.clock
    assert isinstance(clock, HeldClock)
    for number in range(1, 1 + LEASE_TICKS):
        assert actor.members.get("tokenizer", "t1")
        clock.now = number * TICK_S
        beat = heartbeat("detokenizer", "d1", "boot0002", StreamStatus(), sequence=number, interval_s=TICK_S)
        actor.on_heartbeat(heard(beat))
    assert not actor.members.get("tokenizer", "t1")
    assert actor.members.get("detokenizer", "d1")


@pytest.mark.parametrize(
    ("subject", "beat"),
    [
        ("engine.e1", heartbeat("engine", "e2", "boot0002", STATUS, interval_s=TICK_S)),
        ("engine.e1", heartbeat("detokenizer", "e1", "boot0002", StreamStatus(), interval_s=TICK_S)),
        ("engine.e1", heartbeat("engine", "e" * 2000, "boot0002", STATUS, interval_s=TICK_S)),
        ("engine.e1", heartbeat("engine", "e1", "b" * 2000, STATUS, interval_s=TICK_S)),
        ("engine.e1", heartbeat("engine", "e1", "a.b", STATUS, interval_s=TICK_S)),
        (
            "engine.e1",
            heartbeat("gateway", "g2", "boot0002", GatewayStatus(num_requests=0, num_waiting=0), interval_s=TICK_S),
        ),
    ],
    ids=["of another engine", "of another service", "long id", "long instance id", "dot", "of a gateway"],
)
async def test_a_heartbeat_of_nobody_or_of_somebody_else_is_dropped_and_counted(
    actor: GatewayActor, subject: str, beat: Heartbeat
) -> None:
    known = len(actor.topology())
    actor.on_heartbeat(Envelope(beat, f"antiphon.v{limits.PROTOCOL_VERSION}.hb.{subject}"))
    assert actor.malformed == 1
    assert len(actor.topology()) == known
    assert not actor.engines()


async def test_an_answer_about_sequences_goes_to_who_has_asked_only(actor: GatewayActor) -> None:
    transport, subjects = actor.transport, Subjects()
    heard: list[object] = []
    await transport.subscribe(subjects.engine_control("*", "*"), heard.append)
    await transport.barrier()
    for reply in (subjects.engine_control("e2", "i"), subjects.models(), subjects.engine_control("e1", "i")):
        query = OwnershipQuery(
            service="engine",
            member_id="e1",
            member_instance_id="i",
            reply_subject=reply,
            sequences=(SequenceRef("r-0", 1),),
        )
        actor.on_ownership_query(Envelope(query, subjects.gateway_control("g1", "boot0000")))
    assert actor.malformed == 2
    async with asyncio.timeout(60):
        while not heard:
            await asyncio.sleep(0.01)
    assert len(heard) == 1


async def test_a_gateway_that_was_busy_for_longer_than_a_lease_still_knows_its_models(actor: GatewayActor) -> None:
    clock = actor.host.clock
    assert isinstance(clock, HeldClock)
    status = engine_status()
    for beat in (
        heartbeat("engine", "e1", "boot0003", status, sequence=0, interval_s=TICK_S),
        heartbeat("tokenizer", "t2", "boot0003", PoolStatus(model="toy"), sequence=0, interval_s=TICK_S),
        heartbeat("detokenizer", "d2", "boot0003", StreamStatus(model="toy"), sequence=0, interval_s=TICK_S),
    ):
        actor.members.observe(beat, 0.0)
    clock.now = 5.0
    assert actor.backend.resolve_model("toy").name == "toy"
    actor.tick(5.0)
    actor.tick(5.0 + TICK_S)
    clock.now = 5.0 + TICK_S
    assert not actor.backend.models()


async def test_a_gateway_that_is_always_late_still_notices(actor: GatewayActor) -> None:
    actor.tick(1.0)
    actor.tick(2.0)
    assert not actor.members.get("tokenizer", "t1")


def announce(
    actor: GatewayActor,
    name: str,
    model: str,
    configuration: str = "c1",
    path: str = "/models/m",
    aliases: tuple[str, ...] = (),
) -> None:
    """The gateway hears of a ready engine, and of a tokenizer and a detokenizer of its model."""
    status = engine_status(model, model_path=path, model_aliases=aliases, configuration=configuration)
    for beat in (
        heartbeat(
            "tokenizer", f"t-{model}", "boot0001", PoolStatus(model=model), sequence=next(SEQUENCE), interval_s=TICK_S
        ),
        heartbeat(
            "detokenizer", f"d-{model}", "boot01", StreamStatus(model=model), sequence=next(SEQUENCE), interval_s=TICK_S
        ),
        heartbeat("engine", name, f"instance_id-{name}", status, sequence=next(SEQUENCE), interval_s=TICK_S),
    ):
        actor.on_heartbeat(heard(beat))


@pytest.mark.spec("S-API-010:base", "S-SRV-012")
async def test_a_request_names_its_model_by_the_served_name_or_the_launch_path_or_not_at_all(
    actor: GatewayActor,
) -> None:
    with pytest.raises(ServiceError) as none_yet:
        actor.backend.resolve_model("m")
    assert none_yet.value.code == "no_engine"
    announce(actor, "e1", "m")
    announce(actor, "e2", "other", path="/models/other")
    for name in (None, "", "default", "m", "/models/m"):
        assert actor.backend.resolve_model(name).name == "m"
    assert actor.backend.resolve_model("/models/other").name == "other"
    for name in ("gpt", "M", "/models"):
        with pytest.raises(ServiceError, match="'m', 'other'") as unknown:
            actor.backend.resolve_model(name)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


@pytest.mark.spec("S-API-076")
async def test_the_fingerprint_is_that_of_the_configurations_that_serve_the_model(actor: GatewayActor) -> None:
    def fingerprint() -> str:
        return system_fingerprint(actor.backend.resolve_model("m"))

    announce(actor, "e1", "m", "c1")
    one = fingerprint()
    announce(actor, "e2", "m", "c1")
    announce(actor, "e3", "other", "c3")
    assert fingerprint() == one
    announce(actor, "e2", "m", "c2")
    mixed = fingerprint()
    announce(actor, "e1", "m", "c2")
    assert len({one, mixed, fingerprint()}) == 3
    announce(actor, "e1", "m", "c1")
    assert fingerprint() == mixed


@pytest.mark.spec("S-API-010:base", "S-SRV-012")
async def test_a_request_names_a_model_by_any_of_its_names_or_its_path(actor: GatewayActor) -> None:
    announce(actor, "e1", "first", path="/models/first", aliases=("model", "second"))
    announce(actor, "e2", "second", path="/models/second")
    found = {
        name: actor.backend.resolve_model(name).name
        for name in (None, "", "default", "first", "model", "/models/first")
    }
    assert set(found.values()) == {"first"}
    # Another model's own name goes before an alias.
    assert {actor.backend.resolve_model(name).name for name in ("second", "/models/second")} == {"second"}
    assert [card.name for card in actor.backend.models()] == ["first", "second"]
    with pytest.raises(ServiceError, match=r"'third' does not exist\. Served here: 'first', 'second'") as refused:
        actor.backend.resolve_model("third")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
