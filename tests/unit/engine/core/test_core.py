"""The façade: refusals, results, aborts at any moment, resumption, planning ahead, counters."""

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.plan import SampledLogprobs, StepResult
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineLoad
from tests.unit.engine.core.factories import EOS, VOCAB_SIZE, answer, joined, make_core, prompt_of, shares, spec, step

# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "code", "words"),
    [
        (spec("a", ()), "invalid_value", "no tokens"),
        (spec("a", (5, VOCAB_SIZE)), "invalid_value", "between 0 and 999"),
        (spec("a", (5, -1)), "invalid_value", "between 0 and 999"),
        (spec("a", (5,), output=(VOCAB_SIZE,)), "invalid_value", "between 0 and 999"),
        (spec("a", prompt_of(40)), "context_length_exceeded", "at most 40 tokens"),
        (spec("a", prompt_of(30), output=(7,) * 10), "context_length_exceeded", "has 40"),
        (spec("a", prompt_of(3), output=(7,) * 5, max_tokens=5), "invalid_value", "generated already"),
        (spec("a", prompt_of(3), hashes=(b"short",)), "invalid_value", "16 bytes"),
    ],
)
def test_a_sequence_that_could_never_run_is_refused_and_leaves_nothing(refused: object, code: str, words: str) -> None:
    core = make_core(max_model_len=40)
    with pytest.raises(ServiceError, match=words) as caught:
        core.add(refused)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert "a" not in core
    assert core.schedule().empty
    invariants.check(core)


def test_a_prompt_that_the_whole_pool_cannot_hold_is_refused() -> None:
    core = make_core(num_blocks=3)
    core.add(spec("fits", prompt_of(12), max_tokens=1))
    with pytest.raises(ServiceError, match="This engine's cache takes at most 13") as caught:
        core.add(spec("a", prompt_of(13)))
    assert caught.value.code == "context_length_exceeded"
    _, outcomes = step(core)
    assert outcomes[0].finish_reason == "length"


def test_a_sequence_ends_with_length_when_the_whole_pool_is_full_of_it() -> None:
    core = make_core(num_blocks=3)
    core.add(spec("a", prompt_of(10), max_tokens=50))
    reasons = [step(core)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, "length"]
    assert core.pool.num_free == 3


def test_an_id_in_use_is_a_broken_invariant() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3)))
    with pytest.raises(AssertionError, match="added twice"):
        core.add(spec("a", prompt_of(3)))


# --- results ----------------------------------------------------------------------------------------------------------


def test_an_outcome_tells_position_tokens_and_the_end() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3), max_tokens=3))
    told = [
        (each.position, each.token_ids, each.finish_reason) for token in (11, 12, 13) for each in step(core, token)[1]
    ]
    assert told == [(0, (11,), None), (1, (12,), None), (2, (13,), "length")]
    assert "a" not in core
    assert core.pool.num_free == 32


def test_end_tokens_and_stop_tokens_end_with_stop_and_only_the_latter_is_named() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3, 100)))
    core.add(spec("b", prompt_of(3, 200), stop_token_ids=(9,)))
    core.add(spec("c", prompt_of(3, 300), ignore_eos=True))
    core.add(spec("d", prompt_of(3, 400), min_tokens=1))
    _, outcomes = step(core, EOS, 9, EOS, EOS)
    told = [(each.sequence_id, each.token_ids, each.finish_reason, each.stop_token_id) for each in outcomes]
    assert told == [
        ("a", (EOS,), "stop", None),
        ("b", (9,), "stop", 9),
        ("c", (EOS,), None, None),
        ("d", (EOS,), None, None),
    ]
    _, outcomes = step(core, EOS)
    assert [(each.sequence_id, each.finish_reason) for each in outcomes] == [("c", None), ("d", "stop")]


def test_several_tokens_of_one_step_are_judged_one_by_one_and_the_rest_is_dropped() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3, 100), logprobs=0))
    core.add(spec("b", prompt_of(3, 200), max_tokens=2, logprobs=0))
    core.add(spec("c", prompt_of(3, 300)))
    _, outcomes = step(core, (5, EOS, 6), (5, 6, EOS), (5, 6, 8))
    told = [(each.token_ids, each.finish_reason, len(each.logprobs), each.cumulative_logprob) for each in outcomes]
    assert told == [((5, EOS), "stop", 2, -1.0), ((5, 6), "length", 2, -1.0), ((5, 6, 8), None, 0, -1.5)]
    plan, outcomes = step(core, 4)
    assert shares(plan) == [(2, 3, 3, True)]
    assert outcomes[0].position == 3


def test_log_probabilities_are_told_where_asked_and_summed_everywhere() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3, 100), logprobs=2))
    core.add(spec("b", prompt_of(3, 200)))
    best = SampledLogprobs(-1.0, (7, 8), (-1.0, -2.0))
    for total in (-1.0, -2.0):
        plan = core.schedule()
        asked, silent = core.apply(
            plan, StepResult(step=plan.step, token_ids=((7,), (7,)), logprobs=((best,), (SampledLogprobs(-1.0),)))
        )
        assert asked.logprobs == (best,)
        assert silent.logprobs == ()
        assert asked.cumulative_logprob == silent.cumulative_logprob == total


def test_a_result_of_another_plan_is_a_broken_invariant() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3)))
    plan = core.schedule()
    with pytest.raises(AssertionError):
        core.apply(plan, StepResult(step=plan.step + 1, token_ids=((7,),), logprobs=((SampledLogprobs(0.0),),)))
    with pytest.raises(AssertionError):
        core.apply(plan, StepResult(step=plan.step))


# --- output generated elsewhere ---------------------------------------------------------------------------------------


def test_output_from_elsewhere_counts_for_position_length_and_min_tokens() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(5), output=(31, 32), max_tokens=5, min_tokens=4))
    plan, outcomes = step(core, EOS)
    assert plan.new[0].token_ids == (*prompt_of(5), 31, 32)
    assert plan.new[0].num_prompt_tokens == 5
    assert shares(plan) == [(0, 0, 7, True)]
    assert [(each.position, each.finish_reason) for each in outcomes] == [(2, None)]
    assert [(each.position, each.finish_reason) for each in step(core, EOS)[1]] == [(3, None)]
    assert [(each.position, each.finish_reason) for each in step(core, 7)[1]] == [(4, "length")]
    assert core.counters().generation_tokens == 3
    assert core.counters().prompt_tokens == 5


def test_cached_tokens_of_a_resumed_sequence_are_prompt_tokens_only() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(6), max_tokens=8))
    while "a" in core:
        step(core)
    core.add(spec("b", prompt_of(6), output=(7, 7, 7, 7, 7), max_tokens=8))
    plan, outcomes = step(core)
    assert shares(plan) == [(0, 8, 3, True)]
    assert outcomes[0].num_cached_tokens == 6


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_aborting_what_is_not_there_says_so() -> None:
    core = make_core()
    assert not core.abort("a")
    core.add(spec("a", prompt_of(3)))
    assert core.abort("a")
    assert not core.abort("a")


def test_a_waiting_sequence_is_aborted_without_a_trace() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3)))
    core.add(spec("b", prompt_of(3, 500)))
    core.abort("a")
    invariants.check(core)
    assert list(joined(core.schedule())) == ["b"]


def test_a_running_sequence_between_steps_gives_row_and_blocks_back_at_once() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(9)))
    step(core)
    core.abort("a")
    invariants.check(core)
    assert core.pool.num_free == 32
    assert core.schedule().empty


def test_a_sequence_in_flight_keeps_its_blocks_until_its_step_is_applied_and_its_result_is_ignored() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(9)))
    core.add(spec("b", prompt_of(3, 500)))
    plan = core.schedule()
    core.abort("a")
    invariants.check(core)
    assert "a" not in core
    assert core.pool.num_free == 32 - 4
    assert core.load().num_running == 1
    outcomes = core.apply(plan, answer(plan))
    invariants.check(core)
    assert [each.sequence_id for each in outcomes] == ["b"]
    assert core.pool.num_free == 32 - 1
    plan, _ = step(core)
    assert plan.freed_rows == (0,)


def test_the_id_of_a_sequence_aborted_in_flight_is_free_at_once() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3)))
    plan = core.schedule()
    core.abort("a")
    core.add(spec("a", prompt_of(5, 500)))
    assert core.apply(plan, answer(plan)) == []
    plan, outcomes = step(core)
    assert plan.new[0].token_ids == prompt_of(5, 500)
    assert outcomes[0].position == 0


def test_a_preempted_sequence_can_be_aborted() -> None:
    core = make_core(num_blocks=4)
    core.add(spec("a", prompt_of(7)))
    core.add(spec("b", prompt_of(7, 500), arrival=1))
    for _ in range(3):
        step(core)
    assert core.load().num_waiting == 1
    core.abort("b")
    invariants.check(core)
    assert core.load().num_waiting == core.load().num_waiting_tokens == 0


# --- planning ahead ---------------------------------------------------------------------------------------------------


def test_the_next_step_can_be_planned_while_one_runs() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3), max_tokens=3))
    first, second = core.schedule(), core.schedule()
    invariants.check(core)
    assert shares(first) == [(0, 0, 3, True)]
    assert shares(second) == [(0, 3, 1, True)]
    assert [each.position for each in core.apply(first, answer(first))] == [0]
    third = core.schedule()
    assert shares(third) == [(0, 4, 1, True)]
    assert core.schedule().empty, "the third token is the last one: no step beyond it"
    core.apply(second, answer(second))
    assert [each.finish_reason for each in core.apply(third, answer(third))] == ["length"]
    invariants.check(core)
    assert core.pool.num_free == 32


def test_a_sequence_that_ends_while_planned_ahead_is_freed_when_the_later_step_is_applied() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3)))
    first, second = core.schedule(), core.schedule()
    assert core.apply(first, answer(first, EOS))[0].finish_reason == "stop"
    invariants.check(core)
    assert core.pool.num_free == 31
    assert core.schedule().empty
    assert core.apply(second, answer(second)) == []
    invariants.check(core)
    assert core.pool.num_free == 32


def test_planning_pauses_rather_than_preempting_a_sequence_in_flight() -> None:
    core = make_core(num_blocks=4)
    core.add(spec("a", prompt_of(8, 100)))
    core.add(spec("b", prompt_of(7, 200), arrival=1))
    first = core.schedule()
    assert core.schedule().empty, "'a' needs a block and only 'b', in flight, has one to give"
    core.apply(first, answer(first))
    plan = core.schedule()
    assert shares(plan) == [(0, 8, 1, True)]
    assert core.counters().preemptions == 1


def test_several_tokens_for_a_sequence_planned_ahead_are_a_broken_invariant() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(3)))
    first, _ = core.schedule(), core.schedule()
    with pytest.raises(AssertionError, match="planned ahead"):
        core.apply(first, answer(first, (7, 8)))


# --- counters ---------------------------------------------------------------------------------------------------------


def test_counters_tell_load_and_work_done() -> None:
    core = make_core(num_blocks=8, max_num_seqs=2)
    core.add(spec("a", prompt_of(5, 100), max_tokens=1))
    core.add(spec("b", prompt_of(6, 200)))
    core.add(spec("c", prompt_of(7, 300)))
    step(core)
    assert core.load() == EngineLoad(num_free_blocks=6, num_running=1, num_waiting=1, num_waiting_tokens=7)
    counters = core.counters()
    assert (counters.step, counters.preemptions) == (1, 0)
    assert (counters.prompt_tokens, counters.generation_tokens) == (11, 2)
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (11, 0)
