"""Guessed tokens: where they come from, what a plan says of them, what happens to those that are wrong."""

from array import array

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.drafts.prompt_lookup import BLANK_STEPS_MAX, REST_STEPS_MAX, PromptLookup
from tests.unit.engine.core.factories import EOS, answer, make_core, prompt_of, shares, spec, step


def draft(tokens: list[int], most: int = 4, reach: int = 8) -> tuple[int, ...]:
    return PromptLookup(reach).draft(array("I", tokens), most)


@pytest.mark.spec("S-SRV-057")
def test_what_followed_the_last_time_is_guessed() -> None:
    assert draft([1, 2, 3, 7, 8, 9, 5, 1, 2, 3]) == (7, 8, 9, 5)
    assert draft([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], most=2) == (8, 1)
    assert draft([9, 2, 3, 7, 8, 1, 2, 3], most=1) == (7,)


def test_a_longer_ending_goes_before_a_later_one() -> None:
    assert draft([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], most=1) == (7,)


def test_a_guess_beyond_what_is_known_repeats_itself() -> None:
    assert draft([5, 6, 7, 5, 6, 7]) == (5, 6, 7, 5)
    assert draft([4, 4, 4, 4]) == (4, 4, 4, 4)


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    assert draft([1, 2, 3, 4, 5]) == ()
    assert draft([1]) == draft([]) == draft([1, 1, 1], most=0) == ()


def test_tokens_that_come_later_are_indexed_too() -> None:
    lookup, tokens = PromptLookup(8), array("I", [1, 2, 3, 4])
    assert lookup.draft(tokens, 4) == ()
    tokens.extend([1, 2, 3])
    assert lookup.draft(tokens, 1) == (4,)


def test_looks_that_find_nothing_become_rarer_up_to_a_bound() -> None:
    lookup, tokens = PromptLookup(8), array("I", range(10))
    for token in range(1000, 1400):
        tokens.append(token)
        assert lookup.draft(tokens, 4) == ()
    tokens.extend([1050, 1051, 1052])
    without = next(count for count in range(100) if lookup.draft(tokens, 4))
    assert 1 < without <= BLANK_STEPS_MAX
    assert lookup.draft(tokens, 1) == (1053,)


@pytest.mark.spec("S-SRV-058")
def test_good_guesses_reach_farther_up_to_the_flag_and_bad_ones_rest_longer_each_time() -> None:
    lookup, tokens = PromptLookup(8), array("I", [4] * 40)
    assert len(lookup.draft(tokens, 99)) == 4
    lookup.judge(4, 4)
    assert len(lookup.draft(tokens, 99)) == 8
    lookup.judge(8, 8)
    assert len(lookup.draft(tokens, 99)) == 8
    lookup.judge(8, 2)
    assert len(lookup.draft(tokens, 99)) == 3
    rests = []
    for _ in range(8):
        lookup.judge(1, 0)
        rests.append(next(count for count in range(1000) if lookup.draft(tokens, 99)))
    assert rests == [2, 4, 8, 16, 32, 64, 64, 64]
    assert max(rests) == REST_STEPS_MAX


def repeating(num_draft_tokens: int = 4, **core: int) -> Core:
    """A sequence of 5, 6, 7 over and over, with its first token sampled."""
    made = make_core(num_speculative_tokens=num_draft_tokens, **core)  # type: ignore[arg-type]
    made.add(spec("a", (5, 6, 7) * 3, max_tokens=20))
    step(made, 5)
    return made


@pytest.mark.spec("S-SRV-057")
def test_right_guesses_are_tokens_and_wrong_ones_were_never_there() -> None:
    core = repeating()
    plan = core.schedule()
    assert [share.draft_token_ids for share in plan.scheduled] == [(6, 7, 5, 6)]
    assert shares(plan) == [(0, 9, 5, True)]
    (outcome,) = core.apply(plan, answer(plan, (6, 7, 90)))
    invariants.check(core)
    assert (outcome.position, outcome.token_ids) == (1, (6, 7, 90))
    assert core.sequences["a"].num_computed_tokens == 12
    assert shares(step(core)[0]) == [(0, 12, 1, True)]
    counters = core.counters()
    assert (counters.drafted_tokens, counters.accepted_tokens, counters.generation_tokens) == (4, 2, 5)


def test_an_end_among_the_guesses_ends_the_sequence_there() -> None:
    core = make_core(num_speculative_tokens=4)
    core.add(spec("a", (5, 6, EOS, 8) * 2 + (5,), max_tokens=20))
    step(core, 6)
    plan = core.schedule()
    assert plan.scheduled[0].draft_token_ids == (EOS, 8, 5, 6)
    (outcome,) = core.apply(plan, answer(plan, (EOS, 8, 5, 6, 1)))
    assert (outcome.token_ids, outcome.finish_reason) == ((EOS,), "stop")
    assert core.pool.num_free == core.facts.num_blocks


def test_guesses_end_before_the_last_token_that_is_allowed() -> None:
    core = make_core(num_speculative_tokens=8)
    core.add(spec("a", (5, 6, 7) * 3, max_tokens=4))
    step(core, 5)
    plan = core.schedule()
    assert plan.scheduled[0].draft_token_ids == (6, 7)
    (outcome,) = core.apply(plan, answer(plan, (6, 7, 5)))
    assert (len(outcome.token_ids), outcome.finish_reason) == (3, "length")


def test_guesses_take_no_blocks_and_no_budget_from_others() -> None:
    core = make_core(num_blocks=6, budget=5, num_speculative_tokens=4)
    core.add(spec("a", (5, 6, 7), max_tokens=20))
    core.add(spec("b", (5, 6), max_tokens=20))
    for _ in range(8):
        plan, _ = step(core, *((5 + len(core.sequences[name].tokens) % 3,) for name in core.sequences))
        assert plan.num_tokens <= 5
        assert len(plan.scheduled) == 2 or plan.new
    assert core.counters().preemptions == 0


def test_guesses_are_no_part_of_what_prompts_get() -> None:
    core = repeating(step_prompt_tokens=9)
    core.add(spec("b", prompt_of(30, 500)))
    assert shares(core.schedule()) == [(0, 9, 5, True), (1, 0, 9, False)]


def test_a_plan_made_ahead_leaves_out_who_has_guesses_in_flight() -> None:
    core = repeating()
    plan = core.schedule()
    assert core.schedule().empty
    core.apply(plan, answer(plan, (6, 7, 5, 6, 7)))
    invariants.check(core)
    assert not core.schedule().empty


def test_an_abort_with_guesses_in_flight_gives_everything_back() -> None:
    core = repeating()
    plan = core.schedule()
    core.abort("a")
    assert core.apply(plan, answer(plan, (6, 90))) == []
    invariants.check(core)
    assert core.pool.num_free == core.facts.num_blocks


def test_without_the_flag_nothing_is_guessed() -> None:
    core = repeating(num_draft_tokens=0)
    assert shares(step(core)[0]) == [(0, 9, 1, True)]
    assert core.counters().drafted_tokens == 0
