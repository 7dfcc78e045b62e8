"""An expected output is checked in few steps: all of it is drafted, and nothing else ever is."""

from array import array
from dataclasses import replace

import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.drafts.expected import ExpectedTokens
from antiphon.services.engine.core.plan import SampledLogprobs, StepPlan, StepResult
from tests.unit.engine.core.factories import make_core, prompt_of, spec

PROMPT, OUTPUT = prompt_of(9), tuple(range(500, 540))


def test_what_comes_next_is_drafted_as_far_as_there_is_room() -> None:
    expected = ExpectedTokens(OUTPUT, len(PROMPT), 16)
    tokens = array("I", [*PROMPT, *OUTPUT[:1]])
    assert expected.draft(tokens, 100) == OUTPUT[1:17]
    assert expected.draft(tokens, 5) == OUTPUT[1:6]
    assert expected.draft(tokens, -1) == ()
    tokens.extend(OUTPUT[1:39])
    assert expected.draft(tokens, 100) == OUTPUT[39:]
    tokens.append(OUTPUT[39])
    assert expected.draft(tokens, 100) == ()


def test_nothing_is_drafted_after_another_token() -> None:
    expected = ExpectedTokens(OUTPUT, len(PROMPT), 16)
    tokens = array("I", [*PROMPT, *OUTPUT[:3], 7])
    assert expected.draft(tokens, 100) == ()
    tokens.extend(OUTPUT[4:6])
    assert expected.draft(tokens, 100) == ()


def result_of(plan: StepPlan, output: tuple[int, ...]) -> StepResult:
    """The result of a worker whose model says `output` after PROMPT, whatever is drafted."""
    given: list[tuple[int, ...]] = []
    for share in plan.scheduled:
        if not share.samples:
            continue
        num_drafts = len(share.draft_token_ids)
        first = share.start + share.num_tokens - num_drafts - len(PROMPT)
        own = output[first : first + num_drafts + 1]
        end = next((i for i in range(num_drafts) if share.draft_token_ids[i] != own[i]), num_drafts)
        given.append(own[: end + 1])
    logprobs = tuple(tuple(SampledLogprobs(0.0) for _ in one) for one in given)
    return StepResult(step=plan.step, token_ids=tuple(given), logprobs=logprobs)


def run(core: Core, output: tuple[int, ...]) -> tuple[list[int], int]:
    """What comes out, and in how many steps."""
    found: list[int] = []
    steps = 0
    while not (plan := core.schedule()).empty:
        steps += 1
        for outcome in core.apply(plan, result_of(plan, output)):
            found += outcome.token_ids
    return found, steps


@pytest.mark.parametrize(("wrong_at", "most_steps"), [(None, 5), (25, 18)])
def test_the_output_is_that_of_the_model_and_comes_in_few_steps_as_long_as_it_is_the_expected_one(
    wrong_at: int | None, most_steps: int
) -> None:
    told = OUTPUT if wrong_at is None else (*OUTPUT[:wrong_at], 7, *OUTPUT[wrong_at + 1 :])
    core = make_core(num_speculative_tokens=15, use_lookahead=True)
    core.add(replace(spec("a", PROMPT, max_tokens=len(OUTPUT)), expected_token_ids=told))
    found, steps = run(core, OUTPUT)
    assert found == list(OUTPUT)
    assert steps <= most_steps
    assert core.counters().accepted_tokens >= (wrong_at or 36) - 3


def test_a_step_that_is_planned_ahead_waits_for_the_tokens_to_draft() -> None:
    core = make_core(num_speculative_tokens=15, use_lookahead=True)
    core.add(replace(spec("a", PROMPT, max_tokens=len(OUTPUT)), expected_token_ids=OUTPUT))
    first = core.schedule()
    assert core.schedule().empty
    core.apply(first, result_of(first, OUTPUT))
    assert core.schedule().scheduled[0].draft_token_ids == OUTPUT[1:16]


def test_carried_tokens_are_part_of_the_expected_output() -> None:
    core = make_core(num_speculative_tokens=15, use_lookahead=True)
    one = spec("a", PROMPT, max_tokens=len(OUTPUT), output=OUTPUT[:10])
    core.add(replace(one, expected_token_ids=OUTPUT))
    found, steps = run(core, OUTPUT)
    assert found == list(OUTPUT[10:])
    assert steps <= 4
