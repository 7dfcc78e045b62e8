"""The order in which the sequences of a lost engine are computed again, in virtual time."""

import asyncio

from tests.sim.society import Society
from tests.sim.test_society import check, greedy, model_dir, simulate

__all__ = ["model_dir"]
STEP_S = 0.03


def test_the_shortest_sequences_of_a_lost_engine_are_computed_again_first(model_dir):
    async def scenario(society: Society) -> None:
        for engine in society.engines():
            engine.driver.step_s = STEP_S
        asked: list[asyncio.Task[None]] = []

        async def ask(number: int) -> None:
            check(await society.ask(greedy(number, max_tokens=60)), number, 60)

        for number in range(10):
            asked.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(2 * STEP_S)
        society.kill("engine0")
        table = society.members["engine1"].service.actor.sequences
        resumed: dict[str, int] = {}  # in the order in which the other engine gets them
        while len(set(resumed.values())) <= 2:
            await asyncio.sleep(0.005)
            resumed |= {entry.sequence_id: entry.first_position for entry in table.entries() if entry.first_position}
        lengths = list(resumed.values())
        assert lengths == sorted(lengths)
        await asyncio.gather(*asked)

    simulate(model_dir, scenario, engine=2)
