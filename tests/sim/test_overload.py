"""Ten times more requests than an engine can do, in virtual time: what is answered, and how the rest is refused."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.services.gateway.path.placement.queue_wait import UNKNOWN_ROUNDS
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.doubles import STEP_S
from tests.sim.society import Society, make_tokenizer
from tests.support.simulation import run_simulation

ROWS, TOKENS = 8, 20
PEAK = ROWS / (TOKENS * STEP_S)
"""Requests per second that the engine can do at most."""
MOST_S = 40 * TOKENS * STEP_S / ROWS


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@dataclass
class Asked:
    sent_s: float
    took_s: float
    retry_after_s: float | None


async def load(society: Society, factor: float, seconds: float) -> list[Asked]:
    """Requests at random moments, `factor` times as many as the engine can do."""
    loop, draw = asyncio.get_running_loop(), random.Random(1)
    began, tasks = loop.time(), list[asyncio.Task[Asked]]()

    async def ask(number: int) -> Asked:
        sent = loop.time()
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        answer = await society.ask(
            GenerationRequest(
                request_id=f"r{number}",
                model="",
                params=params,
                inputs=PromptInputs(token_ids=(tuple(f"{number}".encode()),)),
            )
        )
        if answer.error is not None:
            assert answer.error.code == "server_is_overloaded"
        told = None if answer.error is None else answer.error.retry_after_s
        return Asked(sent - began, loop.time() - sent, told)

    while loop.time() - began < seconds:
        tasks.append(asyncio.create_task(ask(len(tasks))))
        await asyncio.sleep(draw.expovariate(factor * PEAK))
    return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("factor", [2, 10])
def test_with_more_than_it_can_do_a_server_answers_as_much_as_ever_and_refuses_the_rest_at_once(model_dir, factor):
    async def main() -> None:
        society = Society(model_dir, 0, max_num_seqs=ROWS, max_num_batched_tokens=512)
        for kind in ("gateway", "tokenizer", "detokenizer"):
            await society.start(kind)
        await society.start("engine", num_blocks=4096, block_size=4, max_model_len=512)
        await society.ready()
        await asyncio.sleep(1.0)
        society.members["gateway0"].service.actor.backend._max_queue_wait_s = MOST_S
        seconds = 10 * MOST_S
        asked = await load(society, factor, seconds)
        answered = [one for one in asked if one.retry_after_s is None]
        refused = [one for one in asked if one.retry_after_s is not None]
        done = sum(one.sent_s + one.took_s <= seconds for one in answered) / seconds
        assert done >= 0.85 * PEAK, (done, PEAK)
        assert len(refused) > len(asked) * (1 - 1.5 / factor), (len(refused), len(asked))
        assert max(one.took_s for one in refused) < 0.05
        steady = [one.took_s for one in answered if one.sent_s > seconds / 2]
        assert max(steady) < 2 * MOST_S + TOKENS * STEP_S, (max(steady), MOST_S)
        for one in refused:
            near = [each.took_s for each in answered if abs(each.sent_s - one.sent_s) < MOST_S / 4]
            if near and one.sent_s > seconds / 2 and one.retry_after_s is not None:
                assert one.retry_after_s <= max(1.0, 2 * max(near)), (one, near)

    run_simulation(main)


def test_of_a_crowd_that_comes_at_one_moment_a_server_takes_what_it_would_with_their_prompts_prepared(model_dir):
    """Requests whose prompts are at the tokenizer count as waiting ones."""

    async def main() -> None:
        society = Society(model_dir, 0, max_num_seqs=ROWS, max_num_batched_tokens=512)
        for kind in ("gateway", "tokenizer", "detokenizer"):
            await society.start(kind)
        await society.start("engine", num_blocks=4096, block_size=4, max_model_len=512)
        await society.ready()
        actor = society.members["gateway0"].service.actor
        actor.backend._max_queue_wait_s = MOST_S
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        requests = [
            GenerationRequest(
                request_id=f"r{number}", model="", params=params, inputs=PromptInputs(texts=(f"{number}",))
            )
            for number in range(200)
        ]
        answers = await asyncio.gather(*(society.ask(request) for request in requests))
        accepted = [answer for answer in answers if answer.error is None]
        assert len(accepted) == UNKNOWN_ROUNDS * ROWS
        assert not actor.parts.dispatcher.waits.expected.total()
        assert {answer.error.code for answer in answers if answer.error is not None} == {"server_is_overloaded"}

    run_simulation(main)
