"""How the core's work grows: lines of its code that run, not time. Twice the sequences, twice the work, never more."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from antiphon.services.engine.core.core import Core
from tests.unit.engine.core.factories import answer, make_core, prompt_of, spec

STEPS = 8
BLOCK_SIZE = 4


def lines_of(work: Callable[[], object]) -> int:
    """Lines of the core's own code that `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "services/engine/core/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def decoding(running: int, waiting: int, context: int, **core: Any) -> Core:
    """All rows decode, the queue behind them is out of rows."""
    blocks = running * (-(-(context + 64) // BLOCK_SIZE))
    made = make_core(blocks, max_num_seqs=running, budget=10**6, max_model_len=context + 100, **core)
    for number in range(running + waiting):
        made.add(
            spec(str(number), (number % 900, *prompt_of(context - 1)[:899], *([7] * (context - 900))), arrival=number)
        )
    take_step(made)
    return made


def take_step(core: Core) -> None:
    plan = core.schedule()
    core.apply(plan, answer(plan))


def lines_a_step(core: Core) -> float:
    return lines_of(lambda: [take_step(core) for _ in range(STEPS)]) / STEPS


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_step_costs_in_proportion_to_the_running_sequences(num_draft_tokens: int) -> None:
    few, many = (lines_a_step(decoding(n, 0, 64, num_speculative_tokens=num_draft_tokens)) for n in (16, 128))
    assert many <= 8 * few


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_costs_the_same_however_many_wait(caching: bool) -> None:
    nobody, many = (lines_a_step(decoding(8, n, 64, caching=caching)) for n in (1, 1500))
    assert many <= nobody


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_costs_the_same_however_long_the_context_is(caching: bool) -> None:
    short, long = (lines_a_step(decoding(8, 1, n, caching=caching)) for n in (64, 8192))
    assert long <= short


def test_a_head_that_does_not_fit_costs_the_same_in_every_step_however_long_it_is() -> None:
    def blocked(length: int) -> float:
        core = make_core(3000, max_num_seqs=4, budget=10**6, max_model_len=12_000)
        core.add(spec("large", (7,) * 8000))
        take_step(core)
        core.add(spec("head", (9,) * length))
        take_step(core)
        return lines_a_step(core)

    assert blocked(11_000) <= blocked(4200)


def test_a_joining_prompt_costs_in_proportion_to_its_blocks() -> None:
    def join(length: int) -> int:
        core = make_core(6000, budget=10**6, max_model_len=20_000)
        core.add(spec("a", tuple(range(3, 900)) * (length // 897 + 1), max_tokens=2))
        return lines_of(lambda: take_step(core))

    assert join(16_000) <= 8 * join(2000) * 1.05


def test_choices_of_a_prompt_cost_in_proportion_to_their_number() -> None:
    def join(count: int) -> int:
        core = make_core(200, max_num_seqs=count, budget=10**6)
        for number in range(count):
            core.add(spec(str(number), prompt_of(30), sequence_group="f"))
        return lines_of(lambda: take_step(core))

    assert join(128) <= 8 * join(16)


def test_aborting_all_that_wait_costs_in_proportion_to_their_number() -> None:
    def abort(count: int) -> int:
        core = decoding(2, count, 8)
        names = [name for name in core.sequences if int(name) >= 2]
        return lines_of(lambda: [core.abort(name) for name in reversed(names)])

    assert abort(2000) <= 4 * abort(500) * 1.1
