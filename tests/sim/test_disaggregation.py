"""Prefill and decode engines under faults, in virtual time: every request ends once, with the right tokens."""

import asyncio

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared import limits
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.society import Answer, Society, make_tokenizer
from tests.sim.test_society import expected, settled
from tests.support.simulation import run_simulation

BUS = f"antiphon.v{limits.PROTOCOL_VERSION}"
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def text(number: int) -> str:
    return f"prompt {number} of many, which is not short at all"


def check(answer: Answer, number: int) -> None:
    assert answer.error is None, answer.error
    assert answer.token_ids == {0: expected(text(number), MAX_TOKENS)}
    assert answer.finish == {0: "length"}


def asked(society: Society, count: int, first: int = 0) -> "list[asyncio.Task[Answer]]":
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    return [
        asyncio.create_task(
            society.ask(
                GenerationRequest(
                    request_id=f"r{number}", model="", params=params, inputs=PromptInputs(texts=(text(number),))
                )
            )
        )
        for number in range(first, first + count)
    ]


async def all_right(tasks: "list[asyncio.Task[Answer]]") -> None:
    for number, answer in enumerate(await asyncio.gather(*tasks)):
        check(answer, number)


def simulate(model_dir: str, scenario, seed: int = 0, prefill: int = 1, decode: int = 1, **engine: int) -> None:
    async def main() -> None:
        society = Society(model_dir, seed)
        for kind in ("gateway", "tokenizer", "detokenizer"):
            await society.start(kind)
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                options = {"num_blocks": 64, "num_host_blocks": 512, **engine}
                await society.start("engine", f"{role}{number}", role=role, **options)
        await society.ready()
        await asyncio.sleep(2 * limits.HEARTBEAT_INTERVAL_S)
        await scenario(society)
        await asyncio.sleep(3 * limits.KV_LEASE_S)
        await settled(society)
        for engine_ in society.engines():
            core = engine_.engine._core
            assert core.swap.pool.num_free == core.swap.pool.num_blocks
            assert not core.transfers.num_saved_blocks

    run_simulation(main, seed)


def counters(society: Society, name: str):
    return society.members[name].service.engine.counters()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_prompts_are_computed_on_prefill_engines_only(model_dir, prefill, decode, seed):
    async def scenario(society: Society) -> None:
        await all_right(asked(society, 24))
        for number in range(prefill):
            assert counters(society, f"prefill{number}").kv_saved_tokens > 0
        for number in range(decode):
            found = counters(society, f"decode{number}")
            assert found.kv_loaded_tokens > 0
            assert found.kv_failed_loads == 0

    simulate(model_dir, scenario, seed, prefill, decode)


def test_more_requests_than_there_is_room_for_wait_and_get_their_turn(model_dir):
    async def scenario(society: Society) -> None:
        await all_right(asked(society, 150))

    simulate(model_dir, scenario, num_blocks=40, num_host_blocks=60)


@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_engine_costs_nobody_a_token(model_dir, victim, seed):
    async def scenario(society: Society) -> None:
        tasks = asked(society, 24)
        await asyncio.sleep(0.01 + 0.03 * seed)
        society.kill(victim)
        await all_right(tasks)

    simulate(model_dir, scenario, seed, 2, 2)


@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
@pytest.mark.parametrize("seed", range(2))
def test_the_only_engine_of_a_role_dies_and_the_other_serves(model_dir, victim, seed):
    async def scenario(society: Society) -> None:
        tasks = asked(society, 12)
        await asyncio.sleep(0.02 + 0.05 * seed)
        society.kill(victim)
        await all_right(tasks)

    simulate(model_dir, scenario, seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_frozen_prefill_engine_costs_nobody_a_token(model_dir, seed):
    async def scenario(society: Society) -> None:
        tasks = asked(society, 24)
        await asyncio.sleep(0.01 + 0.03 * seed)
        member = society.members["prefill0"]
        society.freeze(member)
        await all_right(tasks)
        society.thaw(member)

    simulate(model_dir, scenario, seed)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_blocks_are_computed_again(model_dir, seed):
    async def scenario(society: Society) -> None:
        society.network.damage = 0.1
        await all_right(asked(society, 24))
        assert society.network.num_damaged > 3
        assert counters(society, "decode0").kv_failed_loads > 0

    simulate(model_dir, scenario, seed)


@pytest.mark.parametrize("seed", range(2))
def test_lost_orders_for_prompts_cost_time_only(model_dir, seed):
    async def scenario(society: Society) -> None:
        fault = society.bus.drop(f"{BUS}.eng.prefill0.*.ctl", 0.5)
        await all_right(asked(society, 24))
        assert fault.hits
        fault.remove()

    simulate(model_dir, scenario, seed)


@pytest.mark.parametrize("when_s", [0.0, 0.02, 0.05, 0.2])
def test_a_request_that_is_cancelled_frees_both_engines(model_dir, when_s):
    async def scenario(society: Society) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        answers = [Answer() for _ in range(8)]
        tasks = [
            asyncio.create_task(
                society.ask(
                    GenerationRequest(
                        request_id=f"r{number}", model="", params=params, inputs=PromptInputs(texts=(text(number),))
                    ),
                    answer=answer,
                )
            )
            for number, answer in enumerate(answers)
        ]
        await asyncio.sleep(0.02 + when_s)
        for answer in answers:
            society.cancel(society.members["gateway0"], answer)
        await asyncio.gather(*tasks)

    simulate(model_dir, scenario)


def test_what_a_killed_gateway_owned_is_dropped_on_both_engines(model_dir):
    async def scenario(society: Society) -> None:
        tasks = asked(society, 12)
        await asyncio.sleep(0.06)
        society.kill("gateway0")
        assert all(answer.lost for answer in await asyncio.gather(*tasks))

    simulate(model_dir, scenario)


def test_the_choices_of_a_prompt_have_one_transfer(model_dir):
    async def scenario(society: Society) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        answer = await society.ask(
            GenerationRequest(request_id="r0", model="", params=params, inputs=PromptInputs(texts=(text(0),)), n=3)
        )
        assert answer.token_ids == dict.fromkeys(range(3), expected(text(0), MAX_TOKENS))
        assert counters(society, "decode0").kv_loads == 1
        assert counters(society, "prefill0").kv_saved_tokens == len(text(0))

    simulate(model_dir, scenario)
