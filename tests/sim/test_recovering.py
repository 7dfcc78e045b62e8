"""Which engines compute the sequences of a lost engine again, in virtual time."""

import asyncio

from msgspec.structs import replace

from antiphon.services.gateway.path.generation import Client, Origin
from tests.sim.society import Society
from tests.sim.test_society import check, greedy, model_dir, simulate

__all__ = ["model_dir"]
STEP_S, COUNT, MANY = 0.03, 60, 24
MANY_OF, OTHER = Client("many", weight=1000.0), Client("other")


async def started(society: Society) -> list[asyncio.Task[None]]:
    """Starts `MANY` requests and returns when half of them have output."""

    async def ask(number: int) -> None:
        check(
            await society.ask(replace(greedy(number, max_tokens=COUNT), origin=Origin(client=MANY_OF))), number, COUNT
        )

    for engine in society.engines():
        engine.driver.step_s = STEP_S
    asked = [asyncio.create_task(ask(number)) for number in range(MANY)]
    while sum(entry.last_position >= 4 for one in society.engines() for entry in one.actor.sequences.entries()) < 12:
        await asyncio.sleep(STEP_S)
    return asked


async def resumed(society: Society, asked: list[asyncio.Task[None]], engine: str) -> set[str]:
    """Returns the sequences that an engine begins with output of another placement, when all requests have ended."""
    found, every = set[str](), asyncio.gather(*asked)
    while not every.done():
        entries = society.members[engine].service.actor.sequences.entries()
        found |= {entry.sequence_id for entry in entries if entry.first_position}
        await asyncio.sleep(STEP_S / 3)
    await every
    return found


def test_an_engine_that_becomes_ready_meanwhile_computes_a_part_of_them(model_dir):
    async def scenario(society: Society) -> None:
        asked = await started(society)
        society.kill("engine0")
        table = society.members["engine1"].service.actor.sequences
        while not any(entry.first_position for entry in table.entries()):
            await asyncio.sleep(STEP_S / 3)
        await society.start("engine", "engine0")
        assert await resumed(society, asked, "engine0")

    simulate(model_dir, scenario, engine=2)


def test_sequences_of_a_frozen_engine_return_to_it_when_it_goes_on(model_dir):
    async def scenario(society: Society) -> None:
        asked = await started(society)
        frozen = society.members["engine0"]
        here = {entry.sequence_id for entry in frozen.service.actor.sequences.entries()}
        society.freeze(frozen)
        await asyncio.sleep(0.8)
        society.thaw(frozen)
        assert await resumed(society, asked, "engine0") & here

    simulate(model_dir, scenario, engine=2)


def test_a_new_request_of_another_key_does_not_wait_for_them(model_dir):
    async def scenario(society: Society) -> None:
        asked = await started(society)
        society.kill("engine0")
        queue = society.members["gateway0"].service.actor.parts.dispatcher.queue
        while not len(queue):
            await asyncio.sleep(STEP_S / 10)
        new = asyncio.create_task(society.ask(replace(greedy(MANY, max_tokens=COUNT), origin=Origin(client=OTHER))))
        table = society.members["engine1"].service.actor.sequences
        before = {entry.sequence_id for entry in table.entries()}
        while not any(not entry.first_position for entry in table.entries() if entry.sequence_id not in before):
            await asyncio.sleep(STEP_S / 10)
        assert len(queue)
        check(await new, MANY, COUNT)
        await asyncio.gather(*asked)

    simulate(model_dir, scenario, engine=2)
