"""Engines that say that their computing stands still, in virtual time: no token is lost or given twice."""

import asyncio

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.society import SimulatedEngine, Society, next_token
from tests.sim.test_society import many, model_dir, simulate

__all__ = ["model_dir"]


def stall(society: Society, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step ends there any more, and its heartbeats say so, as the watchdog would have them."""
    engine = society.members[name].service
    assert isinstance(engine, SimulatedEngine)
    monkeypatch.setattr(engine.engine._loop, "step", lambda: True)
    monkeypatch.setattr(engine, "reported_state", lambda: "stalled")


@pytest.mark.parametrize("seed", range(2))
def test_streams_of_a_stalled_engine_go_on_elsewhere_and_it_is_used_again_when_it_goes_on(model_dir, seed):
    async def scenario(society: Society) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = asyncio.create_task(many(society))
            await asyncio.sleep(0.05 + 0.03 * seed)
            stall(society, "engine0", monkeypatch)
            await asyncio.sleep(0.5)
            stalled = society.members["engine0"].service
            assert len(stalled.actor.sequences) == 0
            await asked
        await asyncio.sleep(0.5)
        before = stalled.engine.counters().generation_tokens
        await many(society)
        assert stalled.engine.counters().generation_tokens > before

    simulate(model_dir, scenario, seed, engine=2, detokenizer=2)


@pytest.mark.parametrize("seconds", [0.3, 1.0, 5.0])
def test_the_only_engine_stalls_and_its_streams_wait_for_it(model_dir, seconds):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society))
        await asyncio.sleep(0.1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            stall(society, "engine0", monkeypatch)
            await asyncio.sleep(seconds)
        await asked

    simulate(model_dir, scenario)


@pytest.mark.parametrize("seed", range(2))
def test_engines_that_stall_in_turns_cost_nobody_a_token(model_dir, seed):
    async def scenario(society: Society) -> None:
        asked = asyncio.create_task(many(society, 24))
        for turn in range(8):
            with pytest.MonkeyPatch.context() as monkeypatch:
                stall(society, f"engine{turn % 2}", monkeypatch)
                await asyncio.sleep(0.17)
            await asyncio.sleep(0.03)
        await asked

    simulate(model_dir, scenario, seed, engine=2, detokenizer=2)


def test_the_choices_of_a_prompt_move_together(model_dir):
    async def scenario(society: Society) -> None:
        params = SamplingParams(max_tokens=30, temperature=0.0)
        request = GenerationRequest(
            request_id="r1", model="", params=params, inputs=PromptInputs(texts=("a prompt",)), n=4
        )
        asked = asyncio.create_task(society.ask(request))
        await asyncio.sleep(0.1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in ("engine0", "engine1"):
                if len(society.members[name].service.actor.sequences):
                    stall(society, name, monkeypatch)
            answer = await asked
        tokens = list(b"a prompt")
        for _ in range(30):
            tokens.append(next_token(tokens, 0))
        assert answer.error is None
        assert answer.token_ids == dict.fromkeys(range(4), tokens[8:])

    simulate(model_dir, scenario, engine=2)
