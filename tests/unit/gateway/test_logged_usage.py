"""Usage records on the bus: each request has one, whichever gateways die, stand still or take it over. Virtual time."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.edge.access.usage import DeliveryError
from antiphon.services.gateway.guests.offers import RecordedOutput
from antiphon.services.gateway.guests.usage import book
from antiphon.services.gateway.guests.usage.book import LoggedUsage
from antiphon.services.gateway.guests.usage.delivery import Delivery
from antiphon.services.gateway.guests.usage.log import UsageLog
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.messages import UsageOutcome, UsageRecord
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation

SETTLED_S = limits.USAGE_LOST_S + 4 * limits.USAGE_LOOK_S


def record(request_id: str, gateway: str, outcome: UsageOutcome = "completed", tokens: int = 5) -> UsageRecord:
    return UsageRecord(
        request_id=request_id, gateway_id=gateway, key="team", model="m", outcome=outcome, completion_tokens=tokens
    )


@dataclass
class World:
    """Gateways on one bus, with one sink. `resumable`: what is recorded of requests, by id."""

    bus: MemoryBus = field(default_factory=MemoryBus)
    living: set[tuple[str, str]] = field(default_factory=set)
    resumable: dict[str, RecordedOutput] = field(default_factory=dict)
    sunk: list[UsageRecord] = field(default_factory=list)
    sink_is_down: bool = False
    direct: list[UsageRecord] = field(default_factory=list)
    num_started: int = 0

    def start(self, name: str) -> "Gateway":
        self.num_started += 1
        return Gateway(self, name, f"i{self.num_started}")

    async def deliver(self, records) -> None:
        await asyncio.sleep(0.01)
        if self.sink_is_down:
            raise DeliveryError("down")
        self.sunk += records

    async def recorded(self, request_id: str) -> RecordedOutput | None:
        return self.resumable.get(request_id)

    def outcomes(self) -> dict[str, str]:
        """What the sink has, each once."""
        assert not [one for one, count in Counter(each.request_id for each in self.sunk).items() if count > 1]
        return {one.request_id: one.outcome for one in self.sunk}


class Gateway:
    """The usage book of one process of a gateway."""

    def __init__(self, world: World, name: str, instance: str) -> None:
        self.world, self.name, self.address = world, name, (name, instance)
        clock, transport = SimClock(), world.bus.connect(f"{name}-{instance}")
        self.transport = transport
        host = Host(transport=transport, subjects=Subjects(), clock=clock, id=name, instance_id=instance)
        usage = UsageLog(GatewayLogs(host, "memory"))
        delivery = Delivery(usage, "sink", world.deliver, clock, lambda: set(world.living))
        self.book = LoggedUsage(usage, clock, lambda: set(world.living), world.recorded, delivery)
        self.book.otherwise = world.direct.append
        self.tasks = [asyncio.create_task(work) for work in self.book.work()]
        world.living.add(self.address)

    def opened(self, request_id: str) -> None:
        self.book.opened(record(request_id, self.name, "lost", 0))

    def ended(self, request_id: str, outcome: UsageOutcome = "completed") -> None:
        self.book.record(record(request_id, self.name, outcome))

    async def killed(self) -> None:
        self.world.bus.crash(f"{self.name}-{self.address[1]}")
        self.world.living.discard(self.address)
        await self.stopped()

    async def stopped(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def left(self) -> None:
        """An orderly shutdown."""
        await self.book.flush()
        await self.book.finish()
        await self.stopped()
        self.world.living.discard(self.address)


def test_a_request_whose_gateway_was_killed_is_recorded_once_by_another_one():
    async def main() -> None:
        world = World()
        one, two, three = (world.start(f"g{number}") for number in range(3))
        for number in range(4):
            one.opened(f"r{number}")
        one.ended("r0")
        await asyncio.sleep(5)
        await one.killed()
        await asyncio.sleep(SETTLED_S)
        assert world.outcomes() == {"r0": "completed", "r1": "lost", "r2": "lost", "r3": "lost"}
        for each in (two, three):
            await each.stopped()

    run_simulation(main)


def test_the_only_gateway_records_after_its_restart_what_it_had_begun():
    async def main() -> None:
        world = World()
        one = world.start("g0")
        one.opened("r0")
        await asyncio.sleep(1)
        await one.killed()
        again = world.start("g0")
        await asyncio.sleep(SETTLED_S)
        assert world.outcomes() == {"r0": "lost"}
        await again.stopped()

    run_simulation(main)


def test_a_request_that_can_be_resumed_is_waited_for_and_then_recorded_with_its_tokens():
    async def main() -> None:
        world = World()
        one, two = world.start("g0"), world.start("g1")
        one.opened("resumed")
        one.opened("abandoned")
        one.opened("complete")
        until = SimClock().time_ns() / 1e9 + 600
        for name in ("resumed", "abandoned", "complete"):
            world.resumable[name] = RecordedOutput(until, name == "complete", 10, 4, 7)
        await one.killed()
        await asyncio.sleep(SETTLED_S)
        assert world.outcomes() == {"complete": "completed"}
        two.opened("resumed")
        await asyncio.sleep(700)
        assert world.outcomes() == {"complete": "completed", "abandoned": "lost"}
        [abandoned] = [each for each in world.sunk if each.request_id == "abandoned"]
        counts = abandoned.prompt_tokens, abandoned.cached_tokens, abandoned.computed_tokens
        assert (*counts, abandoned.completion_tokens) == (10, 4, 13, 7)
        two.ended("resumed")
        await asyncio.sleep(5)
        assert world.outcomes()["resumed"] == "completed"
        await two.stopped()

    run_simulation(main)


def test_a_run_that_was_taken_over_is_recorded_only_if_nobody_continues_it():
    async def main() -> None:
        world = World()
        one, two = world.start("g0"), world.start("g1")
        for name in ("continued", "given_up"):
            one.opened(name)
            one.book.left(record(name, "g0", "cancelled"))
        two.opened("continued")
        two.ended("continued")
        await asyncio.sleep(SETTLED_S + limits.USAGE_LOOK_ALL_S)
        assert world.outcomes() == {"continued": "completed", "given_up": "cancelled"}
        assert not await two.book._usage.opened()
        for each in (one, two):
            await each.stopped()

    run_simulation(main)


def test_a_sink_that_is_away_gets_everything_later_from_whichever_gateway_is_left(monkeypatch):
    monkeypatch.setattr(limits, "USAGE_BATCH_MAX", 60)

    async def main() -> None:
        world = World(sink_is_down=True)
        one, two = world.start("g0"), world.start("g1")
        for number in range(250):
            one.opened(f"r{number}")
            one.ended(f"r{number}")
        await asyncio.sleep(30)
        await one.left()
        assert not world.sunk
        world.sink_is_down = False
        await asyncio.sleep(60)
        assert [each.request_id for each in world.sunk] == [f"r{number}" for number in range(250)]
        assert two.book.counts()["sink"].num_delivered == 250
        await two.stopped()

    run_simulation(main)


def test_without_a_log_records_take_the_direct_way_and_with_one_they_wait_for_it():
    async def main() -> None:
        world = World()
        world.bus.has_store = False
        one = world.start("g0")
        one.opened("r0")
        one.ended("r0")
        await asyncio.sleep(limits.USAGE_LOG_WAIT_S + 30)
        assert [each.request_id for each in world.direct] == ["r0"]
        world.bus.has_store = True
        one.ended("r1")
        await asyncio.sleep(5)
        world.bus.has_store = False
        one.ended("r2")
        await asyncio.sleep(60)
        world.bus.has_store = True
        await asyncio.sleep(120)
        assert [each.request_id for each in world.direct] == ["r0"]
        assert world.outcomes() == {"r1": "completed", "r2": "completed"}
        await one.stopped()

    run_simulation(main)


@pytest.mark.parametrize("seed", range(10))
def test_each_request_has_one_record_whatever_happens(seed: int, monkeypatch):
    """Gateways are killed, stand still and return; requests end, are taken over, or resumed after their end."""
    monkeypatch.setattr(book, "LOOK_S", 0.5)

    async def main() -> None:
        chance, world = random.Random(seed), World()
        gateways = [world.start(f"g{number}") for number in range(3)]
        running: dict[str, Gateway] = {}
        known: set[str] = set()
        for step in range(150):
            await asyncio.sleep(chance.random() * 2)
            one = chance.choice(gateways)
            match chance.choice(["begin", "begin", "end", "end", "take", "again", "kill", "silent", "sink"]):
                case "begin":
                    running[f"r{step}"] = one
                    known.add(f"r{step}")
                    one.opened(f"r{step}")
                case "end" if running:
                    name = chance.choice(sorted(running))
                    running.pop(name).ended(name)
                case "take" if running:
                    name = chance.choice(sorted(running))
                    running[name].book.left(record(name, running[name].name, "cancelled"))
                    running[name] = one
                    one.opened(name)
                case "again" if known - running.keys():
                    name = chance.choice(sorted(known - running.keys()))
                    one.opened(name)
                    one.ended(name)
                case "kill":
                    await one.killed()
                    running = {name: owner for name, owner in running.items() if owner is not one}
                    gateways[gateways.index(one)] = world.start(one.name)
                case "silent":
                    world.living.discard(one.address)
                    await asyncio.sleep(chance.random() * limits.USAGE_LOST_S / 2)
                    world.living.add(one.address)
                case "sink":
                    world.sink_is_down = not world.sink_is_down
                case _:
                    pass
        world.sink_is_down = False
        for name, owner in running.items():
            owner.ended(name)
        await asyncio.sleep(limits.USAGE_LOOK_ALL_S + SETTLED_S)
        assert {each.request_id for each in world.sunk} == known
        log = await gateways[0].book._usage.records(0, 10**6)
        assert Counter(each.request_id for _, each in log) == Counter(known)
        assert not await gateways[0].book._usage.opened()
        for each in gateways:
            await each.stopped()

    run_simulation(main, seed)
