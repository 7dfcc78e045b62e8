"""Sequences of a resumed request return to the engines that have their KV, in virtual time."""

import asyncio

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.path.generation import GuestOptions, ResumedOutput
from antiphon.shared import limits
from tests.sim.society import Member, Society
from tests.sim.test_society import expected, greedy, model_dir, simulate

__all__ = ["model_dir"]
STEP_S, KNOWN, COUNT = 0.03, 10, 60


async def holding(society: Society, num_tokens: int) -> Member:
    """Returns the engine that runs the first sequence when it has computed this number of tokens."""
    while True:
        for name in ("engine0", "engine1"):
            if any(
                entry.last_position >= num_tokens for entry in society.members[name].service.actor.sequences.entries()
            ):
                return society.members[name]
        await asyncio.sleep(STEP_S)


@pytest.mark.parametrize("lives", [True, False], ids=["its engine lives", "its engine was replaced"])
def test_a_resumed_sequence_returns_to_its_engine_and_ends_its_former_run(model_dir, lives):
    async def scenario(society: Society) -> None:
        for engine in society.engines():
            engine.driver.step_s = STEP_S
        begun = asyncio.create_task(society.ask(greedy(0, max_tokens=COUNT)))
        home = await holding(society, KNOWN)
        society.kill("gateway0")
        address = home.host.id, home.host.instance_id
        # Without preference the other engine would get the sequence, because it has nothing to do.
        beside = [
            asyncio.create_task(
                society.ask(greedy(number, COUNT, guests=GuestOptions(engine=home.host.id)), "gateway1")
            )
            for number in range(1, 5)
        ]
        await asyncio.sleep(10 * STEP_S)
        tokens = expected("prompt 0 of many", KNOWN)
        former = ResumedOutput(
            token_ids=(tuple(tokens),),
            cumulative_logprobs=(0.0,),
            num_cached_tokens=(0,),
            fence=2,
            engines=(address if lives else (home.host.id, "former"),),
        )
        again = asyncio.create_task(
            society.ask(replace(greedy(0, COUNT), guests=GuestOptions(resumed=former)), "gateway1")
        )
        await asyncio.sleep(3 * STEP_S)
        found = {
            name: [entry for entry in society.members[name].service.actor.sequences.entries() if is_first(entry)]
            for name in ("engine0", "engine1")
        }
        run = {name: [entry.attempt > limits.ATTEMPTS_PER_RUN for entry in entries] for name, entries in found.items()}
        other = "engine1" if home.name == "engine0" else "engine0"
        assert run == ({home.name: [True], other: []} if lives else {home.name: [False], other: [True]})
        answer = await again
        assert answer.error is None, answer.error
        assert answer.token_ids == {0: expected("prompt 0 of many", COUNT)[KNOWN:]}
        await asyncio.gather(*beside, return_exceptions=True)
        await asyncio.gather(begun, return_exceptions=True)

    simulate(model_dir, scenario, engine=2, gateway=2)


def is_first(entry) -> bool:
    return entry.sequence_id.startswith("r0")
