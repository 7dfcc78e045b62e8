"""Fair sharing between API keys over all queues, in virtual time: what a second key feels of a flood by the first."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.edge.access.call import Call
from antiphon.services.gateway.edge.access.guard import client_of
from antiphon.services.gateway.path.generation import Client, GenerationRequest, GuestOptions, Origin, PromptInputs
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.security.api_keys import ApiKey
from tests.sim.doubles import STEP_S
from tests.sim.model import next_token
from tests.sim.society import Society, make_tokenizer
from tests.support.simulation import run_simulation

FLOOD, OTHER = Client("flood"), Client("other")
FLAGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
BLOCKS: dict[str, Any] = {"num_blocks": 4096, "block_size": 4, "max_model_len": 512}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


async def deployment(model_dir: str, gateways: int = 1) -> Society:
    society = Society(model_dir, 0, **FLAGS)
    for kind, count in (("gateway", gateways), ("tokenizer", 1), ("detokenizer", 1)):
        for _ in range(count):
            await society.start(kind)
    await society.start("engine", **BLOCKS)
    await society.ready()
    await asyncio.sleep(1.0)
    return society


def request(name: str, client: Client, length: int, max_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = tuple(f"{name:-<{length}}".encode())  # its beginning is its own: nothing is in the prefix cache
    return GenerationRequest(
        request_id=name, model="", params=params, inputs=PromptInputs(token_ids=(prompt,)), origin=Origin(client=client)
    )


async def steps_to_first_token(society: Society, asked: GenerationRequest, gateway: str = "gateway0") -> float:
    """Time to the first token in engine steps. The rest of the answer is awaited too."""
    loop = asyncio.get_running_loop()
    began, first_s = loop.time(), None
    generation = society.members[gateway].service.actor.backend.generate(asked)
    async for _ in generation.updates():
        first_s = first_s or loop.time()
    assert first_s is not None
    return (first_s - began) / STEP_S


def flood(society: Society, count: int, max_tokens: int, gateway: str = "gateway0") -> list[asyncio.Task]:
    return [
        asyncio.create_task(society.ask(request(f"f{gateway[-1]}-{number}", FLOOD, 40, max_tokens), gateway))
        for number in range(count)
    ]


async def measured(society: Society, count: int, name: str, gateway: str = "gateway0") -> list[float]:
    """Of `count` requests of the second key, with pauses in which it uses less than its share."""
    found: list[float] = []
    for number in range(count):
        asked = request(f"{name}{number}", OTHER, 200, 4)
        found.append(await steps_to_first_token(society, asked, gateway))
        await asyncio.sleep(STEP_S * (10 + number * 7.37 % 30))
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)]


@pytest.mark.matrix("G-05")
@pytest.mark.parametrize(("gateways", "asked_at"), [(1, "gateway0"), (2, "gateway1")])
def test_a_key_with_two_hundred_requests_does_not_delay_another_to_more_than_twice_its_idle_time(
    model_dir, gateways, asked_at
):
    async def main() -> None:
        society = await deployment(model_dir, gateways)
        idle = await measured(society, 20, "i", asked_at)
        crowd = [
            task for number in range(gateways) for task in flood(society, 200 // gateways, 200, f"gateway{number}")
        ]
        await asyncio.sleep(20 * STEP_S)
        busy = await measured(society, 30, "b", asked_at)
        assert sum(not task.done() for task in crowd) > 50, "the flood went on all the time"
        assert p99(busy) <= 2 * p99(idle), (p99(busy), p99(idle))
        for task in crowd:
            assert not task.done() or task.result().error is None
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    run_simulation(main)


def test_tokens_are_shared_by_weight_while_both_keys_have_more_than_fits(model_dir):
    async def main() -> None:
        society = await deployment(model_dir)
        clients = {"light": Client("light", 1.0), "heavy": Client("heavy", 3.0)}
        got: Counter[str] = Counter()

        async def ask(name: str, number: int) -> None:
            answer = await society.ask(request(f"{name}{number}", clients[name], 40, 20))
            assert answer.error is None
            got[name] += 1

        tasks = [asyncio.create_task(ask(name, number)) for number in range(150) for name in clients]
        while sum(got.values()) < 120:
            await asyncio.sleep(STEP_S)
        assert got["heavy"] / got["light"] == pytest.approx(3, rel=0.25)
        await asyncio.gather(*tasks)

    run_simulation(main)


def test_a_key_of_lower_number_goes_first(model_dir):
    async def main() -> None:
        society = await deployment(model_dir)
        crowd = flood(society, 60, 50)
        await asyncio.sleep(10 * STEP_S)
        urgent = Client("urgent", priority=-1)
        tasks = [asyncio.create_task(society.ask(request(f"u{n}", urgent, 40, 10))) for n in range(30)]
        await asyncio.gather(*tasks)
        assert sum(task.done() for task in crowd) <= 20, "only those that ran or were in the engine's queue"
        await asyncio.gather(*crowd)

    run_simulation(main)


@pytest.mark.parametrize("priority", [0, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("owner", ["batches", "interactive"])
def test_batches_of_a_key_are_behind_the_other_requests_of_all_keys(model_dir, owner, priority):
    async def main() -> None:
        society = await deployment(model_dir)
        batches = client_of(Call(key=ApiKey(name=owner, priority=priority), in_batch=True))
        interactive = client_of(Call(key=ApiKey(name="interactive", priority=2**31 - 1 if priority > 0 else 0)))
        ends: list[str] = []

        async def ask(name: str, client: Client, max_tokens: int, idle_s: float = 0.0) -> None:
            asked = replace(request(name, client, 40, max_tokens), guests=GuestOptions(idle_s=idle_s))
            answer = await society.ask(asked)
            assert answer.error is None
            assert list(answer.token_ids[0]) == continuation(asked), "whatever it had to give way to"
            ends.append(name[0])

        early = [asyncio.create_task(ask(f"b{number}", batches, 50, 1e6)) for number in range(60)]
        await asyncio.sleep(20 * STEP_S)
        engine = society.engines()[0].engine
        assert engine.load().num_idle_running == FLAGS["max_num_seqs"]
        waited_for = [asyncio.create_task(ask(f"i{number}", interactive, 10)) for number in range(60)]
        await asyncio.gather(*waited_for)
        assert ends.count("b") == 0, "they gave way at once"
        assert engine.counters().idle_preemptions >= FLAGS["max_num_seqs"] - 1
        await asyncio.gather(*early)
        assert engine.counters().generation_tokens == 60 * 50 + 60 * 10, "no token was computed twice"

    run_simulation(main)


def continuation(asked: GenerationRequest) -> list[int]:
    """The tokens that the model of the simulation gives for a greedy request."""
    tokens = list(asked.inputs.token_ids[0])
    for _ in range(asked.params.max_tokens):
        tokens.append(next_token(tokens, 0))
    return tokens[len(asked.inputs.token_ids[0]) :]


@pytest.mark.parametrize("gateways", [1, 2])
def test_idle_work_that_fills_the_engine_delays_no_request_by_more_than_a_few_steps(model_dir, gateways):
    async def main() -> None:
        society = await deployment(model_dir, gateways)
        alone = await measured(society, 15, "i", f"gateway{gateways - 1}")
        crowd = [
            asyncio.create_task(society.ask(replace(asked, guests=GuestOptions(idle_s=1e6))))
            for asked in (request(f"f{number}", Client(), 40, 200) for number in range(200))
        ]
        await asyncio.sleep(20 * STEP_S)
        busy = await measured(society, 20, "b", f"gateway{gateways - 1}")
        assert sum(not task.done() for task in crowd) > 50, "there was idle work all the time"
        assert p99(busy) <= p99(alone) + 3, (p99(busy), p99(alone))
        assert society.engines()[0].engine.load().num_idle_running == FLAGS["max_num_seqs"]
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    run_simulation(main)


def test_idle_work_becomes_ordinary_when_its_time_is_over_though_others_never_leave_a_row(model_dir):
    async def main() -> None:
        society = await deployment(model_dir)
        stop = asyncio.Event()

        async def ask_on(number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                await society.ask(request(f"o{number}-{count}", Client(), 20, 20))

        others = [asyncio.create_task(ask_on(number)) for number in range(3 * FLAGS["max_num_seqs"])]
        await asyncio.sleep(20 * STEP_S)
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await society.ask(replace(request("idle", Client(), 20, 20), guests=GuestOptions(idle_s=100 * STEP_S)))
        took = (loop.time() - began) / STEP_S
        assert answer.error is None
        assert 100 <= took <= 400, took
        stop.set()
        await asyncio.gather(*others)

    run_simulation(main)


def test_requests_without_keys_are_served_in_the_order_of_arrival_and_use_all_rows(model_dir):
    async def main() -> None:
        society = await deployment(model_dir)
        ends: list[int] = []

        async def ask(number: int) -> None:
            await society.ask(request(f"r{number}", Client(), 40, 30))
            ends.append(number)

        tasks = [asyncio.create_task(ask(number)) for number in range(40)]
        await asyncio.sleep(20 * STEP_S)
        assert society.engines()[0].engine.load().num_running == FLAGS["max_num_seqs"]
        await asyncio.gather(*tasks)
        assert ends == sorted(ends)

    run_simulation(main)


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_deadline_ends_a_request_wherever_it_is(model_dir, state):
    async def main() -> None:
        society = await deployment(model_dir)
        crowd = flood(society, 40 if state == "queued" else 0, 100)
        await asyncio.sleep(5 * STEP_S)
        began = asyncio.get_running_loop().time()
        client = FLOOD if state == "queued" else OTHER
        params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        late = GenerationRequest(
            request_id="late",
            model="",
            params=params,
            inputs=PromptInputs(token_ids=((1, 2, 3),)),
            origin=Origin(client=client),
            timeout_s=0.5,
        )
        answer = await society.ask(late)
        assert answer.error is not None
        assert (answer.error.status, answer.error.code) == (504, "deadline_exceeded")
        assert answer.ends == 1
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.5, abs=0.01)
        assert bool(answer.token_ids) is (state == "running")
        for each in await asyncio.gather(*crowd):
            assert each.error is None
        await asyncio.sleep(1.0)
        assert len(society.engines()[0].actor.sequences) == 0
        in_time = GenerationRequest(
            request_id="soon",
            model="",
            params=SamplingParams(max_tokens=3),
            inputs=PromptInputs(token_ids=((1, 2, 3),)),
            timeout_s=5.0,
        )
        assert (await society.ask(in_time)).error is None

    run_simulation(main)
