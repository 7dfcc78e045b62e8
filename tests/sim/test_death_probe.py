"""How soon a gateway knows that an engine or a detokenizer has died, in virtual time."""

import asyncio

import pytest

from antiphon.services.gateway.path.sequence_state import Phase
from antiphon.shared import limits
from tests.sim.society import Society
from tests.sim.test_society import greedy, model_dir, simulate

__all__ = ["model_dir"]
STEP_S = 0.03
SOON_S = 0.35
"""Longest time until a dead process is known: two intervals of heartbeats, and messages."""


def placed_on(society: Society, name: str) -> int:
    """Returns how many running sequences the gateway has on a member."""
    requests = society.members["gateway0"].service.actor.backend.requests.values()
    sequences = [one for request in requests for one in request.sequences if one.phase is Phase.RUNNING]
    return sum(name in (one.engine.id, one.detokenizer.id) for one in sequences)


async def seconds_until_left(society: Society, name: str) -> float:
    began = asyncio.get_running_loop().time()
    while placed_on(society, name):
        await asyncio.sleep(0.005)
    return asyncio.get_running_loop().time() - began


async def running(society: Society, count: int = 12) -> list[asyncio.Task[object]]:
    for engine in society.engines():
        engine.driver.step_s = STEP_S
    asked: list[asyncio.Task[object]] = [
        asyncio.create_task(society.ask(greedy(number, max_tokens=100))) for number in range(count)
    ]
    await asyncio.sleep(0.2)
    return asked


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", ["engine0", "detokenizer0"])
def test_sequences_leave_a_killed_process_long_before_its_lease_ends(model_dir, victim, seed):
    async def scenario(society: Society) -> None:
        asked = await running(society)
        await asyncio.sleep(0.03 * seed)
        assert placed_on(society, victim)
        society.kill(victim)
        assert await seconds_until_left(society, victim) < SOON_S < limits.LEASE_S
        await asyncio.gather(*asked)

    simulate(model_dir, scenario, seed, engine=2, detokenizer=2)


def test_a_process_that_is_silent_but_exists_keeps_its_sequences_for_its_lease(model_dir):
    async def scenario(society: Society) -> None:
        asked = await running(society)
        engine = society.members["engine0"]
        society.freeze(engine)
        frozen_s = asyncio.create_task(seconds_until_left(society, "engine0"))
        await asyncio.sleep(limits.LEASE_S - limits.HEARTBEAT_INTERVAL_S)
        assert not frozen_s.done()
        assert await frozen_s >= limits.LEASE_S - limits.HEARTBEAT_INTERVAL_S
        society.thaw(engine)
        await asyncio.gather(*asked)

    simulate(model_dir, scenario, engine=2)
