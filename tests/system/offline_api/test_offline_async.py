"""The offline API in asyncio, on a real model."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from antiphon import LLM, AsyncLLMEngine, EngineArgs, RequestOutput, SamplingParams
from tests.system.offline import FLAGS, GREEDY, LONG, PROMPTS, generate


async def last(stream: Any) -> RequestOutput:
    return [result async for result in stream][-1]


@pytest.mark.spec("S-OFF-021")
async def test_the_engine_for_asyncio_gives_growing_results_of_many_requests_at_once(model: Path, llm: LLM) -> None:
    expected = generate(llm, PROMPTS, GREEDY)
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(model=str(model), **FLAGS))  # pyright: ignore[reportArgumentType]
    try:
        results = await asyncio.gather(*(last(engine.generate(prompt, GREEDY)) for prompt in PROMPTS * 4))
        assert [one.outputs[0].text for one in results] == [one.outputs[0].text for one in expected] * 4
        seen = [
            one async for one in engine.generate(LONG, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        ]
        grown = [one.outputs[0].token_ids for one in seen]
        assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(grown))
        assert [one.finished for one in seen] == [False] * (len(seen) - 1) + [True]
        chat = await last(engine.chat([{"role": "user", "content": "x"}], GREEDY))
        assert chat.outputs[0].text == llm.chat([{"role": "user", "content": "x"}], GREEDY, False)[0].outputs[0].text
        with pytest.raises(ValueError, match="maximum context length"):
            await last(engine.generate("x " * 9999, GREEDY))
        await engine.check_health()
    finally:
        await engine.shutdown()
    assert not engine.is_running
    with pytest.raises(RuntimeError, match="does not run"):
        await last(engine.generate("x", GREEDY))


async def test_a_request_ends_when_it_is_aborted_or_nobody_listens(model: Path) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    engine = AsyncLLMEngine(str(model), **FLAGS)
    try:
        stream = engine.generate("x", endless, "mine")
        first = await anext(stream)
        assert not first.finished
        with pytest.raises(ValueError, match="'mine' is in use"):
            await last(engine.generate("x", GREEDY, "mine"))
        await engine.abort("mine")
        ended = await last(stream)
        assert (ended.finished, ended.outputs[0].finish_reason) == (True, "abort")
        left = engine.generate("x", endless, "left")
        await anext(left)
        assert isinstance(left, AsyncGenerator)
        await left.aclose()
        while engine._runner.has_work:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        running = asyncio.create_task(last(engine.generate("x", endless)))
        while not engine._runner.has_work:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
    finally:
        await engine.shutdown()
    assert (await running).outputs[0].finish_reason == "abort"
