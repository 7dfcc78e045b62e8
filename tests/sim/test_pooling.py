"""Pooling sequences in the society of all actors: each vector arrives once, whatever is lost on the way."""

import asyncio

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared import limits
from antiphon.shared.parameters.pooling import PoolingKind, PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.model import HashModel
from tests.sim.society import Answer, Society, make_tokenizer
from tests.sim.test_society import simulate

BUS = f"antiphon.v{limits.PROTOCOL_VERSION}"
KINDS: tuple[PoolingKind, ...] = ("last", "mean", "cls")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def texts_of(number: int) -> tuple[str, ...]:
    return tuple(f"text {index} of request {number}, which is one of many" for index in range(16))


def request(number: int) -> GenerationRequest:
    pooling = PoolingParams(kind=KINDS[number % len(KINDS)])
    return GenerationRequest(
        request_id=f"r{number}",
        model="",
        params=SamplingParams(max_tokens=1),
        inputs=PromptInputs(texts=texts_of(number)),
        pooling=pooling,
    )


def check(answer: Answer, number: int) -> None:
    assert answer.error is None, answer.error
    kind = KINDS[number % len(KINDS)]
    wanted = [HashModel().vector(list(text.encode()), kind) for text in texts_of(number)]
    assert [answer.vectors[index] for index in range(len(wanted))] == wanted
    assert set(answer.finish.values()) == {"stop"}
    assert not any(answer.token_ids.values())


async def many(society: Society, count: int = 6) -> None:
    answers = await asyncio.gather(*(society.ask(request(number)) for number in range(count)))
    for number, answer in enumerate(answers):
        check(answer, number)


def test_every_input_gets_its_own_vector_and_no_stream_is_opened(model_dir):
    async def scenario(society: Society) -> None:
        heard: list[str] = []
        for subject in (f"{BUS}.det.>", f"{BUS}.gw.*.*.tok"):
            society.bus.drop(subject, lambda delivery: bool(heard.append(delivery.subject)))
        await many(society)
        assert heard
        assert all(subject.endswith(".tok") and ".gw." in subject for subject in heard)

    simulate(model_dir, scenario, engine=2)


@pytest.mark.parametrize("seed", range(2))
def test_lost_vectors_are_sent_again(model_dir, seed):
    async def scenario(society: Society) -> None:
        fault = society.bus.drop(f"{BUS}.gw.*.*.tok", 0.4)
        await many(society)
        assert fault.hits > 1
        fault.remove()

    simulate(model_dir, scenario, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", ["engine0", "detokenizer0", "tokenizer0"])
def test_a_killed_replica_costs_no_vector(model_dir, victim, seed):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society))
        await asyncio.sleep(0.02 + 0.05 * seed)
        society.kill(victim)
        await asked

    simulate(model_dir, scenario, seed, engine=2, detokenizer=2, tokenizer=2)


def test_the_only_engine_dies_and_its_successor_computes_the_vectors(model_dir):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society))
        await asyncio.sleep(0.1)
        assert society.engines()[0].engine.has_work
        society.kill("engine0")
        await asyncio.sleep(2.0)
        await society.start("engine", "engine0")
        await asked

    simulate(model_dir, scenario)


def test_a_small_block_pool_preempts_and_still_gives_the_same_vectors(model_dir):
    async def scenario(society: Society) -> None:
        await society.start("engine", num_blocks=34, num_host_blocks=8)
        await society.ready()
        texts = GenerationRequest(
            request_id="t",
            model="",
            params=SamplingParams(max_tokens=60, temperature=0.0),
            inputs=PromptInputs(texts=("one", "two")),
        )
        await asyncio.gather(many(society), society.ask(texts))

    simulate(model_dir, scenario, engine=0)
