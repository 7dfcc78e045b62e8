"""Whom a gateway asks whether it still exists, and when."""

import asyncio
from typing import Any

import pytest

from antiphon.services.gateway.path.liveness.death_probe import ENDED_WAITS_S, DeathProbe
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.services.gateway.path.service_clients import ProbeResult
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.codec import encode
from antiphon.shared.messages import MemberEnded, PoolStatus, StreamStatus
from antiphon.shared.subjects import Subjects
from tests.support.heartbeats import heartbeat
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation

INTERVAL_S = limits.HEARTBEAT_INTERVAL_S
LATE_S = limits.PROBE_INTERVALS * INTERVAL_S + 0.01
D1, T1 = Address("d1", "b1"), Address("t1", "b1")


class Gateway:
    """A probe whose question is answered by the test. Heard at time 0 of a detokenizer and a tokenizer."""

    def __init__(self, *, finds: ProbeResult) -> None:
        self.bus = MemoryBus(0)
        self.launcher = self.bus.connect("launcher")
        self.members = Members()
        self.asked: list[Address] = []
        self.dead: list[Address] = []
        self.finds: ProbeResult = finds
        clients: Any = self
        host = Host(transport=self.bus.connect("g1"), subjects=Subjects(), clock=SimClock(), id="g1", instance_id="b0")
        self.tested = DeathProbe(
            host, self.members, clients, lambda beat, _: self.dead.append(Address(beat.id, beat.instance_id))
        )
        self.members.observe(heartbeat("detokenizer", *D1, StreamStatus(), interval_s=INTERVAL_S), 0.0)
        self.members.observe(heartbeat("tokenizer", *T1, PoolStatus(), interval_s=INTERVAL_S), 0.0)

    async def probe(self, service: str, member: Address, timeout_s: float) -> ProbeResult:
        self.asked.append(member)
        found: ProbeResult = self.finds
        await asyncio.sleep(timeout_s if found == "silent" else 0)
        return found

    async def told(self, service: Any, member_id: str) -> None:
        """A launcher says that a member has ended."""
        await self.launcher.publish(Subjects().ended(), encode(MemberEnded(service, member_id)))
        await asyncio.sleep(sum(ENDED_WAITS_S))

    async def tick(self, now: float) -> None:
        self.tested.tick(now)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_detokenizer_that_misses_a_heartbeat_is_asked_and_lost_if_its_process_has_ended() -> None:
    gateway = Gateway(finds="gone")
    await gateway.tick(INTERVAL_S)
    assert gateway.asked == []
    await gateway.tick(LATE_S)
    assert (gateway.asked, gateway.dead) == ([D1], [D1])
    assert gateway.members.get("detokenizer", "d1") is None
    await gateway.tick(LATE_S + INTERVAL_S)
    assert gateway.asked == [D1]


async def test_one_whose_process_exists_is_asked_again_and_keeps_its_lease() -> None:
    gateway = Gateway(finds="answers")
    await gateway.tick(LATE_S)
    await gateway.tick(LATE_S + INTERVAL_S)
    assert (gateway.asked, gateway.dead) == ([D1, D1], [])
    assert gateway.members.get("detokenizer", "d1")


def test_one_that_does_not_answer_is_asked_again_after_its_time_to_answer() -> None:
    async def main() -> None:
        gateway = Gateway(finds="silent")
        await gateway.tick(LATE_S)
        await gateway.tick(LATE_S + 0.01)
        assert gateway.asked == [D1]
        await asyncio.sleep(limits.LEASE_S)
        await gateway.tick(LATE_S + 0.02)
        assert (gateway.asked, gateway.dead) == ([D1, D1], [])
        assert gateway.members.get("detokenizer", "d1")

    run_simulation(main, 0)


@pytest.mark.parametrize("finds", ["silent", "answers"])
def test_one_that_answers_has_a_new_lease_and_a_silent_one_keeps_the_old_one(finds: ProbeResult) -> None:
    async def main() -> None:
        gateway = Gateway(finds=finds)
        heard_at = asyncio.get_running_loop().time()
        gateway.members.observe(
            heartbeat("detokenizer", *D1, StreamStatus(), sequence=2, interval_s=INTERVAL_S), heard_at
        )
        await asyncio.sleep(LATE_S)
        await gateway.tick(heard_at + LATE_S)
        assert bool(gateway.members.alive("detokenizer", heard_at + limits.LEASE_S + LATE_S)) is (finds == "answers")

    run_simulation(main, 0)


async def test_one_that_was_started_again_meanwhile_is_not_lost() -> None:
    gateway = Gateway(finds="gone")
    gateway.tested.tick(LATE_S)
    gateway.members.observe(heartbeat("detokenizer", "d1", "b2", StreamStatus(), interval_s=INTERVAL_S), LATE_S)
    await gateway.tick(LATE_S)
    assert (gateway.asked, gateway.dead) == ([D1], [])
    assert gateway.members.get("detokenizer", "d1")


async def test_after_the_bus_was_gone_nobody_is_asked_until_members_have_connected_again() -> None:
    gateway = Gateway(finds="gone")
    gateway.bus.partition("g1")
    await gateway.tick(LATE_S)
    gateway.bus.heal("g1")
    back_s = LATE_S + INTERVAL_S
    gateway.members.observe(heartbeat("detokenizer", *D1, StreamStatus(), sequence=2, interval_s=INTERVAL_S), back_s)
    await gateway.tick(back_s + LATE_S)
    assert gateway.asked == []
    beat = heartbeat("detokenizer", *D1, StreamStatus(), sequence=3, interval_s=INTERVAL_S)
    gateway.members.observe(beat, limits.RECONNECT_S)
    await gateway.tick(LATE_S + limits.RECONNECT_S)
    assert gateway.dead == [D1]


async def test_a_connection_that_was_lost_and_came_back_between_two_ticks_counts_as_well() -> None:
    gateway = Gateway(finds="gone")
    gateway.bus.partition("g1")
    gateway.bus.heal("g1")
    await gateway.tick(LATE_S)
    assert gateway.asked == []


async def test_one_that_ends_hands_its_work_over_and_is_not_asked() -> None:
    gateway = Gateway(finds="gone")
    gateway.members.observe(
        heartbeat("detokenizer", *D1, StreamStatus(), state="draining", sequence=2, interval_s=INTERVAL_S), 0.0
    )
    await gateway.tick(LATE_S)
    assert gateway.asked == []


@pytest.mark.parametrize("finds", ["gone", "silent", "answers"])
def test_one_of_which_a_launcher_says_that_it_has_ended_is_asked_at_once(finds: ProbeResult) -> None:
    async def main() -> None:
        gateway = Gateway(finds=finds)
        await gateway.tested.listen()
        await gateway.told("tokenizer", "t1")
        await gateway.told("detokenizer", "unknown")
        assert gateway.asked == []
        await gateway.told("detokenizer", "d1")
        assert gateway.asked == [D1] * (len(ENDED_WAITS_S) if finds == "silent" else 1)
        assert gateway.dead == ([D1] if finds == "gone" else [])
        assert (gateway.members.get("detokenizer", "d1") is None) is (finds == "gone")

    run_simulation(main, 0)


def test_a_bus_that_has_not_noticed_an_end_yet_is_asked_again() -> None:
    async def main() -> None:
        gateway = Gateway(finds="silent")
        await gateway.tested.listen()
        told = asyncio.create_task(gateway.told("detokenizer", "d1"))
        await asyncio.sleep(ENDED_WAITS_S[0] / 2)
        gateway.finds = "gone"
        await told
        assert (gateway.asked, gateway.dead) == ([D1, D1], [D1])

    run_simulation(main, 0)


def test_what_a_launcher_says_counts_no_more_than_a_missing_heartbeat_after_the_bus_was_gone() -> None:
    async def main() -> None:
        gateway = Gateway(finds="gone")
        await gateway.tested.listen()
        gateway.bus.partition("g1")
        gateway.bus.heal("g1")
        await gateway.told("detokenizer", "d1")
        assert gateway.asked == []

    run_simulation(main, 0)


def test_a_malformed_message_of_a_launcher_is_ignored() -> None:
    async def main() -> None:
        gateway = Gateway(finds="gone")
        await gateway.tested.listen()
        await gateway.bus.connect("other").publish(Subjects().ended(), b"\xc1")
        await gateway.told("detokenizer", "d1")
        assert gateway.dead == [D1]

    run_simulation(main, 0)
