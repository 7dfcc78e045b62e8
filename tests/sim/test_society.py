"""The society of all four actors under faults, in virtual time: every request ends once, with the right tokens."""

import asyncio

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, OutputText, PromptInputs
from antiphon.shared import limits
from antiphon.shared.messages import TokenEvents
from antiphon.shared.parameters.sampling import BeamParams, SamplingParams
from antiphon.shared.request.choices import choice_params
from tests.sim.model import HashModel, beam_references
from tests.sim.society import Answer, Society, make_tokenizer, next_token, worker_of
from tests.support.simulation import run_simulation

BUS = f"antiphon.v{limits.PROTOCOL_VERSION}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def expected(prompt: str, count: int, salt: int = 0) -> list[int]:
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(next_token(tokens, salt))
    return tokens[len(prompt.encode()) :]


def greedy(number: int, max_tokens: int = 20, **kwargs) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(
        request_id=f"r{number}",
        model="",
        params=params,
        inputs=PromptInputs(texts=(f"prompt {number} of many",)),
        **kwargs,
    )


def check(answer: Answer, number: int, max_tokens: int = 20) -> None:
    assert answer.error is None, answer.error
    want = expected(f"prompt {number} of many", max_tokens)
    assert answer.token_ids == {0: want}
    assert answer.texts[0] == bytes(want).decode()
    assert answer.finish == {0: "length"}


async def whole(model_dir: str, seed: int, **counts: int) -> Society:
    society = Society(model_dir, seed)
    for kind in ("gateway", "tokenizer", "detokenizer", "engine"):
        for _ in range(counts.get(kind, 1)):
            await society.start(kind)
    if counts.get("engine", 1):
        await society.ready()
    return society


async def settled(society: Society) -> None:
    """After a run nothing is left anywhere."""
    await asyncio.sleep(3 * limits.ORPHAN_S)
    for engine in society.engines():
        assert engine.actor.sequences.num_live == 0
        assert len(engine.actor.sequences) == 0
        load = engine.engine.load()
        assert load.num_running == load.num_waiting == 0
        assert load.num_free_blocks == engine.engine.facts.num_blocks


def simulate(model_dir: str, scenario, seed: int = 0, **counts: int):
    async def main():
        society = await whole(model_dir, seed, **counts)
        await scenario(society)
        await settled(society)
        return society.bus.fingerprint

    return run_simulation(main, seed)


async def many(society: Society, count: int = 12) -> None:
    answers = await asyncio.gather(*(society.ask(greedy(i)) for i in range(count)))
    for number, answer in enumerate(answers):
        check(answer, number)


@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_its_own_tokens(model_dir, seed):
    simulate(model_dir, many, seed)


def test_replicas_share_the_work(model_dir):
    async def scenario(society: Society) -> None:
        await many(society)
        for engine in society.engines():
            assert engine.engine.counters().generation_tokens > 0

    simulate(model_dir, scenario, engine=2, detokenizer=2, tokenizer=2)


def test_the_same_seed_gives_the_same_run(model_dir):
    first, second, other = (simulate(model_dir, many, seed, engine=2) for seed in (7, 7, 8))
    assert first == second
    assert first != other


@pytest.mark.matrix("B-03", "B-16")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("subject", [f"{BUS}.det.*.*.tok", f"{BUS}.gw.*.*.txt"])
def test_lost_token_and_text_messages_are_repaired(model_dir, subject, seed):
    async def scenario(society: Society) -> None:
        fault = society.bus.drop(subject, 0.2)
        await many(society)
        assert fault.hits > 3
        fault.remove()

    simulate(model_dir, scenario, seed)


@pytest.mark.matrix("B-04")
@pytest.mark.parametrize("subject", [f"{BUS}.det.*.*.tok", f"{BUS}.gw.*.*.txt"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_lost_first_or_last_message_is_repaired(model_dir, subject, place):
    async def scenario(society: Society) -> None:
        fault = society.bus.drop(subject, lambda delivery: _is_edge(delivery, place) and fault.hits == 0)
        check(await society.ask(greedy(1)), 1)
        assert fault.hits == 1

    simulate(model_dir, scenario)


def _is_edge(delivery, place: str) -> bool:
    from antiphon.shared.codec import Decoder
    from antiphon.shared.messages import TextEvents

    message = Decoder([TokenEvents, TextEvents]).decode(delivery.payload)
    event = message.events[0]
    return event.position == 0 if place == "first" else event.finish_reason is not None


@pytest.mark.matrix("B-05")
@pytest.mark.parametrize("seed", range(2))
def test_duplicated_and_reordered_messages_change_nothing(model_dir, seed):
    async def scenario(society: Society) -> None:
        society.bus.reordering = True
        fault = society.bus.duplicate(f"{BUS}.>", 0.2)
        slow = society.bus.delay(f"{BUS}.det.*.*.tok", 0.0, 0.05)
        await many(society)
        assert fault.hits > 10
        assert slow.hits > 10

    simulate(model_dir, scenario, seed)


@pytest.mark.matrix("B-06")
@pytest.mark.parametrize("subject", [f"{BUS}.eng.*.*.ctl", f"{BUS}.det.*.*.ctl", f"{BUS}.inbox.>"])
def test_lost_commands_and_answers_are_asked_again(model_dir, subject):
    async def scenario(society: Society) -> None:
        fault = society.bus.drop(subject, 0.2)
        await many(society, 6)
        fault.remove()

    simulate(model_dir, scenario)


@pytest.mark.matrix("R-01")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", ["tokenizer0", "detokenizer0", "engine0"])
def test_a_killed_replica_costs_nobody_a_token(model_dir, victim, seed):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society))
        await asyncio.sleep(0.02 + 0.05 * seed)
        society.kill(victim)
        await asked

    simulate(model_dir, scenario, seed, engine=2, detokenizer=2, tokenizer=2)


@pytest.mark.matrix("R-03")
@pytest.mark.parametrize("victim", ["tokenizer0", "detokenizer0", "engine0"])
def test_a_frozen_replica_costs_nobody_a_token(model_dir, victim):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society))
        await asyncio.sleep(0.1)
        society.bus.freeze(victim)
        await asked
        society.bus.thaw(victim)

    simulate(model_dir, scenario, engine=2, detokenizer=2, tokenizer=2)


@pytest.mark.matrix("R-05")
def test_the_only_engine_comes_back_and_old_and_new_streams_go_on(model_dir):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society, 4))
        await asyncio.sleep(0.1)
        society.kill("engine0")
        await asyncio.sleep(2.0)
        late = asyncio.create_task(society.ask(greedy(9)))
        await asyncio.sleep(0.1)
        await society.start("engine", "engine0")
        await asked
        assert (await late).error is None

    simulate(model_dir, scenario)


@pytest.mark.matrix("R-05")
def test_without_any_engine_a_running_request_ends_with_an_error_and_a_new_one_is_refused(model_dir):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(society.ask(greedy(1)))
        await asyncio.sleep(0.1)
        society.kill("engine0")
        answer = await asked
        assert answer.error is not None
        assert answer.error.code == "no_engine"
        refused = society.members["gateway0"].service.actor.backend
        with pytest.raises(Exception, match="No engine is ready"):
            refused.generate(greedy(2))

    simulate(model_dir, scenario)


@pytest.mark.matrix("G-01")
def test_a_cancelled_request_frees_its_blocks(model_dir):
    async def scenario(society: Society) -> None:
        gateway = society.members["gateway0"].service.actor.backend
        generation = gateway.generate(greedy(1, max_tokens=100))
        updates = generation.updates()
        await anext(updates)
        await generation.cancel("the client left")
        await asyncio.sleep(0.2)
        assert society.engines()[0].engine.load().num_running == 0

    simulate(model_dir, scenario)


@pytest.mark.matrix("R-10")
def test_what_a_killed_gateway_owned_is_dropped(model_dir):
    async def scenario(society: Society) -> None:
        generation = society.members["gateway0"].service.actor.backend.generate(greedy(1, max_tokens=100))
        await anext(generation.updates())
        society.kill("gateway0")
        await asyncio.sleep(0.2)

    simulate(model_dir, scenario, gateway=2)


def test_a_stop_string_ends_a_sequence_at_the_string(model_dir):
    async def scenario(society: Society) -> None:
        text = bytes(expected("prompt 1 of many", 20)).decode()
        stop = text[8:11]
        answer = await society.ask(greedy(1, output=OutputText(stop=(stop,))))
        assert answer.error is None
        assert answer.texts[0] == text[: text.index(stop)]
        assert answer.finish == {0: "stop"}

    simulate(model_dir, scenario)


def test_choices_differ_and_prompts_keep_their_order(model_dir):
    async def scenario(society: Society) -> None:
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
        request = GenerationRequest(
            request_id="r1", model="", params=params, inputs=PromptInputs(texts=("one", "two")), n=2
        )
        answer = await society.ask(request)
        assert answer.error is None
        assert answer.token_ids[0] == expected("one", 8, salt=5)
        assert answer.token_ids[2] == expected("two", 8, salt=5)
        assert len({tuple(ids) for ids in answer.token_ids.values()}) == 4

    simulate(model_dir, scenario)


@pytest.mark.matrix("R-12")
def test_a_small_block_pool_preempts_and_still_gives_the_same_tokens(model_dir):
    async def scenario(society: Society) -> None:
        await society.start("engine", num_blocks=24)
        await society.ready()
        await many(society, 10)
        assert society.engines()[0].engine.counters().preemptions > 0

    simulate(model_dir, scenario, engine=0)


CHOICES = 4
CHOICES_PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=5)


async def choices(society: Society, during: str = "") -> None:
    """Several choices of a long prompt; each is what its seed alone gives."""
    prompt = "a prompt of thirty-nine characters, ok?"
    request = GenerationRequest(
        request_id="r1", model="", params=CHOICES_PARAMS, inputs=PromptInputs(texts=(prompt,)), n=CHOICES
    )
    asked = asyncio.create_task(society.ask(request))
    if during:
        while not any(engine.engine.counters().generation_tokens > CHOICES for engine in society.engines()):
            await asyncio.sleep(0.005)
        society.kill(during)
    answer = await asked
    assert answer.error is None, answer.error
    for index in range(CHOICES):
        seed = choice_params(CHOICES_PARAMS, index).seed
        assert answer.token_ids[index] == expected(prompt, 12, seed)
    assert len({tuple(tokens) for tokens in answer.token_ids.values()}) == CHOICES


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_choices_of_a_prompt_run_on_one_engine_that_computes_it_once(model_dir, caching, seed):
    async def main() -> None:
        society = Society(model_dir, seed, enable_prefix_caching=caching)
        for kind in ("gateway", "tokenizer", "detokenizer", "engine", "engine"):
            await society.start(kind)
        await society.ready()
        await choices(society)
        workers = [worker_of(engine) for engine in society.engines()]
        # Each choice computes less than a block of the prompt for itself, and all but the last of its tokens.
        computed = sorted(worker.num_computed for worker in workers)
        assert computed[0] == 0
        assert 39 + 11 * CHOICES <= computed[1] <= 39 + (CHOICES - 1) * 4 + 11 * CHOICES
        await settled(society)

    run_simulation(main, seed)


def test_choices_whose_engine_dies_go_on_together_on_another(model_dir):
    async def scenario(society: Society) -> None:
        busy = asyncio.create_task(choices(society, during="engine0"))
        await busy
        (left,) = society.engines()
        prefill = worker_of(left).num_computed - 11 * CHOICES
        assert prefill < 2 * 39

    simulate(model_dir, scenario, engine=2)


BEAM_PROMPT = "a prompt to search from"
BEAM_PARAMS = SamplingParams(max_tokens=12, temperature=0.0, beam=BeamParams(4))


async def beams(society: Society, *, fails: bool = False) -> None:
    """A beam search; its results are those of the reference. `fails`: whether its engine dies meanwhile."""
    asked = asyncio.create_task(
        society.ask(
            GenerationRequest(
                request_id="r1", model="", params=BEAM_PARAMS, inputs=PromptInputs(texts=(BEAM_PROMPT,)), n=3
            )
        )
    )
    while fails:
        await asyncio.sleep(0.005)
        for name in ("engine0", "engine1"):
            if society.members[name].service.engine.load().num_running == 4:
                society.kill(name)
                fails = False
                break
    answer = await asked
    assert answer.error is None, answer.error
    wanted = beam_references(HashModel(), list(BEAM_PROMPT.encode()), 4, 12)[:3]
    assert [answer.token_ids[index] for index in range(3)] == [list(one.token_ids) for one in wanted]
    assert [answer.texts[index] for index in range(3)] == [one.text for one in wanted]


def test_the_results_of_a_beam_search_come_from_one_search_on_one_engine(model_dir):
    async def scenario(society: Society) -> None:
        await beams(society)
        computed = sorted(worker_of(engine).num_computed for engine in society.engines())
        assert computed == [0, len(BEAM_PROMPT) + 4 * 11]

    simulate(model_dir, scenario, engine=2)


def test_a_beam_search_whose_engine_dies_begins_anew_on_another(model_dir):
    async def scenario(society: Society) -> None:
        await beams(society, fails=True)
        (left,) = society.engines()
        assert worker_of(left).num_computed == len(BEAM_PROMPT) + 4 * 11

    simulate(model_dir, scenario, engine=2)


@pytest.mark.parametrize("subject", ["tok", "txt"])
def test_lost_log_probabilities_of_a_prompt_are_sent_again(model_dir, subject, monkeypatch):
    monkeypatch.setattr(limits, "PROMPT_LOGPROBS_TOKENS_MAX", 3)

    async def scenario(society: Society) -> None:
        fault = society.bus.drop(f"{BUS}.*.*.*.{subject}", 0.5)
        params = SamplingParams(max_tokens=20, temperature=0.0, prompt_logprobs=1)
        asked = asyncio.create_task(
            society.ask(
                GenerationRequest(
                    request_id="r1", model="", params=params, inputs=PromptInputs(texts=(BEAM_PROMPT,)), n=1
                )
            )
        )
        await asyncio.sleep(2.0)
        fault.remove()
        answer = await asked
        assert fault.hits > 0
        assert answer.error is None, answer.error
        assert answer.prompts[0] == list(BEAM_PROMPT.encode())
        assert answer.token_ids[0] == expected(BEAM_PROMPT, 20)

    simulate(model_dir, scenario)
