"""Whom a gateway asks whether it still exists, and when."""

import asyncio
from typing import Any

from services.gateway.requests.death_probe import DeathProbe
from services.gateway.requests.sequence_state import Address
from shared import limits
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.messages import Heartbeat, PoolStatus, StreamStatus
from shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock

INTERVAL_S = limits.HEARTBEAT_INTERVAL_S
LATE_S = limits.PROBE_INTERVALS * INTERVAL_S + 0.01
D1, T1 = Address("d1", "b1"), Address("t1", "b1")


class Gateway:
    """A probe whose question is answered by the test. Heard at time 0 of a detokenizer and a tokenizer."""

    def __init__(self, *, is_gone: bool) -> None:
        self.bus = MemoryBus(0)
        self.members = Members()
        self.asked: list[Address] = []
        self.dead: list[Address] = []
        self.is_gone_answer = is_gone
        clients: Any = self
        host = Host(self.bus.connect("g1"), Subjects(), SimClock(), "g1", "b0")
        self.probe = DeathProbe(host, self.members, clients, self.dead.append)
        self.members.observe(Heartbeat("detokenizer", *D1, 1, "ready", 1, INTERVAL_S, StreamStatus()), 0.0)
        self.members.observe(Heartbeat("tokenizer", *T1, 1, "ready", 1, INTERVAL_S, PoolStatus()), 0.0)

    async def is_gone(self, service: str, member: Address) -> bool:
        self.asked.append(member)
        await asyncio.sleep(0)
        return self.is_gone_answer

    async def tick(self, now: float) -> None:
        self.probe.tick(now)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_detokenizer_that_misses_a_heartbeat_is_asked_and_lost_if_its_process_has_ended() -> None:
    gateway = Gateway(is_gone=True)
    await gateway.tick(INTERVAL_S)
    assert gateway.asked == []
    await gateway.tick(LATE_S)
    assert (gateway.asked, gateway.dead) == ([D1], [D1])
    assert gateway.members.get("detokenizer", "d1") is None
    await gateway.tick(LATE_S + INTERVAL_S)
    assert gateway.asked == [D1]


async def test_one_whose_process_exists_is_asked_again_and_keeps_its_lease() -> None:
    gateway = Gateway(is_gone=False)
    await gateway.tick(LATE_S)
    await gateway.tick(LATE_S + INTERVAL_S)
    assert (gateway.asked, gateway.dead) == ([D1, D1], [])
    assert gateway.members.get("detokenizer", "d1")


async def test_one_that_was_started_again_meanwhile_is_not_lost() -> None:
    gateway = Gateway(is_gone=True)
    gateway.probe.tick(LATE_S)
    gateway.members.observe(Heartbeat("detokenizer", "d1", "b2", 1, "ready", 1, INTERVAL_S, StreamStatus()), LATE_S)
    await gateway.tick(LATE_S)
    assert (gateway.asked, gateway.dead) == ([D1], [])
    assert gateway.members.get("detokenizer", "d1")


async def test_after_the_bus_was_gone_nobody_is_asked_for_a_lease() -> None:
    gateway = Gateway(is_gone=True)
    gateway.bus.partition("g1")
    await gateway.tick(LATE_S)
    gateway.bus.heal("g1")
    back_s = LATE_S + INTERVAL_S
    gateway.members.observe(Heartbeat("detokenizer", *D1, 1, "ready", 2, INTERVAL_S, StreamStatus()), back_s)
    await gateway.tick(back_s + LATE_S)
    assert gateway.asked == []
    await gateway.tick(LATE_S + limits.LEASE_S)
    assert gateway.dead == [D1]


async def test_a_connection_that_was_lost_and_came_back_between_two_ticks_counts_as_well() -> None:
    gateway = Gateway(is_gone=True)
    gateway.bus.partition("g1")
    gateway.bus.heal("g1")
    await gateway.tick(LATE_S)
    assert gateway.asked == []


async def test_one_that_ends_hands_its_work_over_and_is_not_asked() -> None:
    gateway = Gateway(is_gone=True)
    gateway.members.observe(Heartbeat("detokenizer", *D1, 1, "draining", 2, INTERVAL_S, StreamStatus()), 0.0)
    await gateway.tick(LATE_S)
    assert gateway.asked == []
