"""Drafts of the worker's layer: how many are asked for, when they are used, and what a plan says of them."""

from array import array

import pytest
from msgspec.structs import replace

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.drafts.drafter import FREE_MISSES, Drafter, PredictedTokens, make_drafter
from antiphon.services.engine.core.drafts.prompt_lookup import REST_STEPS_MAX, PromptLookup
from antiphon.services.engine.core.plan import StepPlan
from tests.unit.engine.core.factories import answer, make_core, prompt_of, spec


def test_more_is_asked_for_while_all_are_right_and_no_more_than_the_flag_says() -> None:
    predicted = PredictedTokens(3)
    wanted: list[int] = []
    for _ in range(4):
        wanted.append(predicted.num_wanted(0.0))
        predicted.judge(wanted[-1], wanted[-1])
    assert wanted == [1, 2, 3, 3]
    predicted.judge(3, 2)
    assert predicted.num_wanted(0.0) == 2
    predicted.judge(2, 1)
    assert predicted.num_wanted(0.0) == 1


def test_some_misses_are_forgiven_and_further_ones_make_longer_pauses() -> None:
    predicted = PredictedTokens(4)
    pauses: list[int] = []
    for _ in range(FREE_MISSES + 7):
        predicted.judge(1, 0)
        pauses.append(next(pause for pause in range(REST_STEPS_MAX + 1) if predicted.num_wanted(0.0)))
    assert pauses == [*[0] * FREE_MISSES, 4, 8, 16, 32, 64, 64, 64]
    predicted.judge(1, 1)
    predicted.judge(1, 0)
    assert predicted.num_wanted(0.0) == 1


def test_no_more_drafts_are_asked_for_than_save_what_they_cost() -> None:
    predicted = PredictedTokens(4)
    for _ in range(100):
        for accepted in (4, 1, 2, 1):  # 8 of 11 that were compared
            predicted.judge(min(4, accepted + 1), accepted)
    predicted.judge(4, 4)
    assert [predicted.num_wanted(cost) for cost in (0.0, 0.35, 0.5, 0.7, 2.0)] == [4, 3, 2, 1, 1]


def test_drafts_are_for_the_tokens_that_they_follow() -> None:
    predicted = PredictedTokens(4)
    predicted.take((7, 8, 9), 20)
    assert predicted.draft(20, 2) == (7, 8)
    assert predicted.draft(20, -1) == ()
    assert predicted.draft(21, 2) == ()


def test_text_is_looked_up_where_the_layer_has_nothing_and_each_is_judged_for_its_own() -> None:
    drafter = Drafter(PredictedTokens(4), PromptLookup(4))
    assert drafter.predicted is not None
    tokens = array("I", [1, 2, 3, 7, 8, 9, 5, 1, 2, 3])
    assert drafter.draft(tokens, 2) == (7, 8)
    drafter.judge(2, 0)
    assert drafter.predicted.num_wanted(0.0) == 1
    assert drafter.draft(tokens, 2) == (), "the lookup pauses after its miss"
    drafter.predicted.take((4,), len(tokens))
    assert drafter.draft(tokens, 2) == (4,)
    drafter.judge(1, 1)
    assert drafter.predicted.num_wanted(0.0) == 2


@pytest.mark.parametrize(
    ("predicts", "looks_up", "found"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_a_sequence_has_a_drafter_if_there_are_drafts(predicts: bool, looks_up: bool, found: bool) -> None:
    assert (make_drafter(4, predicts=predicts, looks_up=looks_up) is not None) == found


def core_with_layer(**others: object) -> Core:
    return make_core(num_speculative_tokens=4, use_lookahead=False, has_draft_layer=True, **others)  # type: ignore[arg-type]


def step(core: Core, token: int | tuple[int, ...], *drafts: tuple[int, ...]) -> StepPlan:
    plan = core.schedule()
    core.apply(plan, replace(answer(plan, token), draft_token_ids=drafts))
    return plan


def test_a_step_asks_for_drafts_and_the_next_one_has_them() -> None:
    core = core_with_layer()
    core.add(spec("a", prompt_of(6)))
    [share] = step(core, 50, (51,)).scheduled
    assert (share.num_tokens, share.num_drafts, share.draft_token_ids) == (6, 1, ())
    [share] = step(core, (51, 52), (53, 54)).scheduled
    assert (share.num_tokens, share.num_drafts, share.draft_token_ids) == (2, 1, (51,))
    [share] = step(core, (53, 54, 55), (56,)).scheduled
    assert (share.num_drafts, share.draft_token_ids) == (2, (53, 54))
    counters = core.counters()
    assert (counters.drafted_tokens, counters.accepted_tokens) == (3, 3)


def test_nothing_more_of_a_sequence_is_planned_while_its_drafts_are_predicted() -> None:
    core = core_with_layer()
    core.add(spec("a", prompt_of(6)))
    first = core.schedule()
    assert core.schedule().empty
    core.apply(first, replace(answer(first, 50), draft_token_ids=((51,),)))
    assert core.schedule().scheduled[0].draft_token_ids == (51,)


def test_parts_of_prompts_are_computed_by_the_layer_and_predict_nothing() -> None:
    core = core_with_layer(budget=4)
    core.add(spec("a", prompt_of(6)))
    plan = step(core, 50)
    assert (plan.scheduled[0].num_drafts, plan.drafts) == (0, True)
    plan = step(core, 50, (51,))
    assert (plan.scheduled[0].num_drafts, plan.drafts) == (1, True)


def test_the_last_tokens_of_a_sequence_ask_for_none() -> None:
    core = core_with_layer()
    core.add(spec("a", prompt_of(6), max_tokens=3))
    assert step(core, 50, (51,)).scheduled[0].num_drafts == 1
    plan = step(core, (51, 52), ())
    assert (plan.scheduled[0].num_drafts, plan.drafts) == (0, False)
    assert not core.sequences


def test_without_a_layer_a_plan_says_so() -> None:
    core = make_core(num_speculative_tokens=4)
    core.add(spec("a", prompt_of(6)))
    plan = core.schedule()
    assert (plan.scheduled[0].num_drafts, plan.drafts) == (-1, False)
