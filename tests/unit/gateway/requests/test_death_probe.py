"""Whom a gateway asks whether it still exists, and when."""

import asyncio
from typing import Any

import pytest

from services.gateway.requests.liveness.death_probe import CLOSES_S, DeathProbe
from services.gateway.requests.sequence_state import Address
from shared import limits
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.codec import encode
from shared.messages import Heartbeat, MemberEnded, PoolStatus, StreamStatus
from shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation

INTERVAL_S = limits.HEARTBEAT_INTERVAL_S
LATE_S = limits.PROBE_INTERVALS * INTERVAL_S + 0.01
D1, T1 = Address("d1", "b1"), Address("t1", "b1")


class Gateway:
    """A probe whose question is answered by the test. Heard at time 0 of a detokenizer and a tokenizer."""

    def __init__(self, *, is_gone: bool) -> None:
        self.bus = MemoryBus(0)
        self.launcher = self.bus.connect("launcher")
        self.members = Members()
        self.asked: list[Address] = []
        self.dead: list[Address] = []
        self.is_gone_answer = is_gone
        clients: Any = self
        host = Host(self.bus.connect("g1"), Subjects(), SimClock(), "g1", "b0")
        self.probe = DeathProbe(host, self.members, clients, self.dead.append)
        self.members.observe(Heartbeat("detokenizer", *D1, 1, "ready", 1, INTERVAL_S, StreamStatus()), 0.0)
        self.members.observe(Heartbeat("tokenizer", *T1, 1, "ready", 1, INTERVAL_S, PoolStatus()), 0.0)

    async def is_gone(self, service: str, member: Address, timeout_s: float = 0.0) -> bool:
        self.asked.append(member)
        await asyncio.sleep(0)
        return self.is_gone_answer

    async def told(self, service: Any, member_id: str) -> None:
        """A launcher says that a member has ended."""
        await self.launcher.publish(Subjects().ended(), encode(MemberEnded(service, member_id)))
        await asyncio.sleep(CLOSES_S + 0.1)

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


@pytest.mark.parametrize("is_gone", [True, False])
def test_one_of_which_a_launcher_says_that_it_has_ended_is_asked_at_once(is_gone: bool) -> None:
    async def main() -> None:
        gateway = Gateway(is_gone=is_gone)
        await gateway.probe.listen()
        await gateway.told("tokenizer", "t1")
        await gateway.told("detokenizer", "unknown")
        assert gateway.asked == []
        await gateway.told("detokenizer", "d1")
        assert (gateway.asked, gateway.dead) == ([D1], [D1] if is_gone else [])
        assert (gateway.members.get("detokenizer", "d1") is None) is is_gone

    run_simulation(main, 0)


def test_what_a_launcher_says_counts_no_more_than_a_missing_heartbeat_after_the_bus_was_gone() -> None:
    async def main() -> None:
        gateway = Gateway(is_gone=True)
        await gateway.probe.listen()
        gateway.bus.partition("g1")
        gateway.bus.heal("g1")
        await gateway.told("detokenizer", "d1")
        assert gateway.asked == []

    run_simulation(main, 0)


def test_a_malformed_message_of_a_launcher_is_ignored() -> None:
    async def main() -> None:
        gateway = Gateway(is_gone=True)
        await gateway.probe.listen()
        await gateway.bus.connect("other").publish(Subjects().ended(), b"\xc1")
        await gateway.told("detokenizer", "d1")
        assert gateway.dead == [D1]

    run_simulation(main, 0)
