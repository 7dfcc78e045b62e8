"""When the gateway calls a member lost."""

import pytest

from services.gateway.actor import TICK_S, GatewayActor
from shared import limits
from shared.actors.actor import Envelope
from shared.actors.host import Host
from shared.errors import ServiceError
from shared.messages import EngineStatus, Heartbeat, PoolStatus, StreamStatus
from shared.subjects import Subjects
from tests.support.memory import MemoryBus


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
    lease = round(limits.LEASE_S / TICK_S)
    ticks(actor, 1, lease - 1)
    assert actor.members.get("tokenizer", "t1")
    ticks(actor, lease, lease + 1)
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
    for number in range(1, 2 + round(limits.LEASE_S / TICK_S)):
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


def engine(name: str, model: str, path: str, *aliases: str) -> Heartbeat:
    status = EngineStatus(model, path, 512, 300, 16, 10, 10, 8, model_aliases=aliases)
    return Heartbeat("engine", name, f"boot-{name}", 1, "ready", 0, TICK_S, status)


@pytest.mark.spec("S-API-010", "S-SRV-012")
async def test_a_request_names_a_model_by_any_of_its_names_or_its_path(actor: GatewayActor) -> None:
    actor.members.observe(engine("e1", "first", "/models/first", "model", "second"), 0.0)
    actor.members.observe(engine("e2", "second", "/models/second"), 0.0)
    for model in ("first", "second"):
        for beat in (
            Heartbeat("tokenizer", f"t-{model}", "boot0001", 1, "ready", 0, TICK_S, PoolStatus(model=model)),
            Heartbeat("detokenizer", f"d-{model}", "boot0001", 1, "ready", 0, TICK_S, StreamStatus(model=model)),
        ):
            actor.members.observe(beat, 0.0)
    found = {name: actor.resolve_model(name).name for name in (None, "", "default", "first", "model", "/models/first")}
    assert set(found.values()) == {"first"}
    # Another model's own name goes before an alias.
    assert {actor.resolve_model(name).name for name in ("second", "/models/second")} == {"second"}
    assert [card.name for card in actor.models()] == ["first", "second"]
    with pytest.raises(ServiceError, match=r"'third' does not exist\. Served here: 'first', 'second'") as refused:
        actor.resolve_model("third")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
