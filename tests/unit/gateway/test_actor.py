"""What the gateway's actor makes of heartbeats: who is lost, which models are served and how they are named."""

import itertools
import math

import pytest

from services.gateway.actor import TICK_S, GatewayActor
from services.gateway.openai.request_context import system_fingerprint
from shared import limits
from shared.actors.actor import Envelope
from shared.actors.host import Host
from shared.errors import ServiceError
from shared.messages import EngineStatus, Heartbeat, PoolStatus, StreamStatus
from shared.subjects import Subjects
from tests.support.memory import MemoryBus

SEQUENCE = itertools.count()
"""Numbers of heartbeats: an older one is not heard."""
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
    host = Host(MemoryBus(0).connect("gateway"), Subjects(), HeldClock(), "g1", "boot0000")
    actor = GatewayActor(host)
    actor.members.observe(Heartbeat("tokenizer", "t1", "boot0001", 1, "ready", 0, TICK_S, PoolStatus()), 0.0)
    return actor


def ticks(actor: GatewayActor, first: int, last: int) -> None:
    for number in range(first, last + 1):
        actor.tick(number * TICK_S)


async def test_a_silent_member_is_lost_after_a_lease(actor: GatewayActor) -> None:
    ticks(actor, 1, LEASE_TICKS - 1)
    assert actor.members.get("tokenizer", "t1")
    ticks(actor, LEASE_TICKS, LEASE_TICKS)
    assert not actor.members.get("tokenizer", "t1")


async def test_a_gateway_that_stood_still_reads_what_was_said_before_it_calls_anybody_lost(actor: GatewayActor) -> None:
    ticks(actor, 1, 2)
    actor.tick(10.0)
    assert actor.members.get("tokenizer", "t1")
    actor.tick(10.0 + TICK_S)
    assert not actor.members.get("tokenizer", "t1")


async def test_heartbeats_are_when_it_looks_for_others_that_are_silent(actor: GatewayActor) -> None:
    clock = actor._host.clock  # pyright: ignore[reportPrivateUsage]
    assert isinstance(clock, HeldClock)
    for number in range(1, 1 + LEASE_TICKS):
        assert actor.members.get("tokenizer", "t1")
        clock.now = number * TICK_S
        beat = Heartbeat("detokenizer", "d1", "boot0002", 1, "ready", number, TICK_S, StreamStatus())
        actor.on_heartbeat(Envelope(beat, "heartbeat"))
    assert not actor.members.get("tokenizer", "t1")
    assert actor.members.get("detokenizer", "d1")


async def test_a_gateway_that_was_busy_for_longer_than_a_lease_still_knows_its_models(actor: GatewayActor) -> None:
    clock = actor._host.clock  # pyright: ignore[reportPrivateUsage]
    assert isinstance(clock, HeldClock)
    status = EngineStatus("toy", "/models/toy", 512, 300, 16, 100, 100, 8)
    for beat in (
        Heartbeat("engine", "e1", "boot0003", 1, "ready", 0, TICK_S, status),
        Heartbeat("tokenizer", "t2", "boot0003", 1, "ready", 0, TICK_S, PoolStatus(model="toy")),
        Heartbeat("detokenizer", "d2", "boot0003", 1, "ready", 0, TICK_S, StreamStatus(model="toy")),
    ):
        actor.members.observe(beat, 0.0)
    clock.now = 5.0
    assert actor.resolve_model("toy").name == "toy"
    actor.tick(5.0)
    actor.tick(5.0 + TICK_S)
    clock.now = 5.0 + TICK_S
    assert not actor.models()


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
    status = EngineStatus(model, path, 512, 300, 16, 10, 10, 8, model_aliases=aliases, configuration=configuration)
    for beat in (
        Heartbeat("tokenizer", f"t-{model}", "boot0001", 1, "ready", next(SEQUENCE), TICK_S, PoolStatus(model=model)),
        Heartbeat("detokenizer", f"d-{model}", "boot01", 1, "ready", next(SEQUENCE), TICK_S, StreamStatus(model=model)),
        Heartbeat("engine", name, f"instance_id-{name}", 1, "ready", next(SEQUENCE), TICK_S, status),
    ):
        actor.on_heartbeat(Envelope(beat, "heartbeat"))


@pytest.mark.spec("S-API-010:base", "S-SRV-012")
async def test_a_request_names_its_model_by_the_served_name_or_the_launch_path_or_not_at_all(
    actor: GatewayActor,
) -> None:
    with pytest.raises(ServiceError) as none_yet:
        actor.resolve_model("m")
    assert none_yet.value.code == "no_engine"
    announce(actor, "e1", "m")
    announce(actor, "e2", "other", path="/models/other")
    for name in (None, "", "default", "m", "/models/m"):
        assert actor.resolve_model(name).name == "m"
    assert actor.resolve_model("/models/other").name == "other"
    for name in ("gpt", "M", "/models"):
        with pytest.raises(ServiceError, match="'m', 'other'") as unknown:
            actor.resolve_model(name)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


@pytest.mark.spec("S-API-076")
async def test_the_fingerprint_is_that_of_the_configurations_that_serve_the_model(actor: GatewayActor) -> None:
    def fingerprint() -> str:
        return system_fingerprint(actor.resolve_model("m"))

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
    found = {name: actor.resolve_model(name).name for name in (None, "", "default", "first", "model", "/models/first")}
    assert set(found.values()) == {"first"}
    # Another model's own name goes before an alias.
    assert {actor.resolve_model(name).name for name in ("second", "/models/second")} == {"second"}
    assert [card.name for card in actor.models()] == ["first", "second"]
    with pytest.raises(ServiceError, match=r"'third' does not exist\. Served here: 'first', 'second'") as refused:
        actor.resolve_model("third")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
