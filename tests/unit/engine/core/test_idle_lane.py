"""The idle lane: uses what others leave, gives way within one plan, goes on from its tokens, and does not starve."""

from dataclasses import replace
from typing import Any

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.lanes.idle import PROMPT_SHARE
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.core.request import Outcome
from tests.unit.engine.core.factories import answer, joined, make_core, prompt_of, spec, step

LONG = 1e9


def add_idle(core: Core, name: str, length: int = 5, until_s: float = LONG, **others: Any) -> None:
    core.add(replace(spec(name, prompt_of(length, 100 * (1 + len(core.sequences))), **others), idle_until_s=until_s))


def add(core: Core, name: str, length: int = 5, **others: Any) -> None:
    core.add(spec(name, prompt_of(length, 100 * (1 + len(core.sequences))), **others))


def running(core: Core) -> list[str]:
    return [each.sequence_id for each in core.residency.running]


def num_scheduled(core: Core, plan: StepPlan) -> dict[str, int]:
    return {core.residency.rows[share.row].sequence_id: share.num_tokens for share in plan.scheduled}


def test_idle_sequences_fill_all_rows_and_give_one_up_in_the_plan_that_needs_it() -> None:
    core = make_core(max_num_seqs=4)
    for number in range(6):
        add_idle(core, f"i{number}")
    step(core)
    assert running(core) == ["i0", "i1", "i2", "i3"]
    add(core, "now")
    plan, _ = step(core)
    assert list(joined(plan)) == ["now"]
    assert running(core) == ["now", "i0", "i1", "i2"]
    assert (core.load().num_idle_running, core.load().num_idle_waiting) == (3, 3)
    assert core.counters().idle_preemptions == 1
    assert core.take_preempted() == ("i3",)


@pytest.mark.parametrize(("num_stages", "sizes"), [(1, [16]), (2, [8, 4]), (4, [4, 4, 4, 4])])
def test_idle_sequences_are_divided_among_the_plans_of_a_pipeline(num_stages: int, sizes: list[int]) -> None:
    core = make_core(num_blocks=256, max_num_seqs=16, budget=4096, num_stages=num_stages)
    for number in range(16):
        core.add(replace(spec(f"i{number}", prompt_of(5, 10 * (number + 1))), idle_until_s=LONG))
    plans = [core.schedule() for _ in sizes]
    assert [len(joined(plan)) for plan in plans] == sizes


def test_no_idle_sequence_joins_while_another_one_waits() -> None:
    core = make_core(num_blocks=8, max_num_seqs=2, caching=False)
    add(core, "first", 4, max_tokens=3)
    add(core, "second", 32)  # does not fit beside the first one
    add_idle(core, "idle", 4)
    plan, _ = step(core)
    assert list(joined(plan)) == ["first"]
    step(core)
    step(core)
    plan, _ = step(core)
    assert list(joined(plan)) == ["second"], "a row was free all the time, and blocks for the idle one"


def test_blocks_are_taken_from_the_youngest_idle_sequences_only_as_many_as_needed() -> None:
    core = make_core(num_blocks=10, max_num_seqs=8, caching=False)
    for number in range(3):
        add_idle(core, f"i{number}", 10)  # three blocks each
    step(core)
    add(core, "now", 14)
    plan, _ = step(core)
    assert list(joined(plan)) == ["now"]
    assert running(core) == ["now", "i0", "i1"]


def test_idle_sequences_are_left_alone_if_their_blocks_would_not_be_enough() -> None:
    core = make_core(num_blocks=10, max_num_seqs=8, caching=False)
    add(core, "old", 24)
    add_idle(core, "idle", 7)
    step(core)
    add(core, "large", 36)
    step(core)
    assert running(core) == ["old", "idle"]
    assert core.counters().preemptions == 0


def test_prompts_of_others_come_first_and_idle_ones_get_a_part_of_a_step() -> None:
    core = make_core(num_blocks=100, budget=32)
    add_idle(core, "idle", 40)
    plan, _ = step(core)
    assert num_scheduled(core, plan) == {"idle": 32}, "alone it may use the whole step"
    add(core, "now", 31)
    plan, _ = step(core)
    assert num_scheduled(core, plan) == {"now": 31, "idle": 1}
    add_idle(core, "more", 40)
    plan, _ = step(core)
    assert num_scheduled(core, plan) == {"now": 1, "idle": 32 // PROMPT_SHARE}, "and only one of them has a prompt"


@pytest.mark.parametrize("num_host_blocks", [0, 32])
def test_a_preempted_idle_sequence_goes_on_from_its_tokens(num_host_blocks: int) -> None:
    core = make_core(max_num_seqs=1, num_host_blocks=num_host_blocks)
    add_idle(core, "idle", 9, max_tokens=6)
    outcomes: list[Outcome] = []
    token = 10
    for number in range(12):
        if number == 3:
            add(core, "now", 5, max_tokens=2)
        plan = core.schedule()
        invariants.check(core)
        outcomes += core.apply(plan, answer(plan, token))
        token += 1
    of_idle = [each for each in outcomes if each.sequence_id == "idle"]
    assert [each.position for each in of_idle] == list(range(6)), "each token once"
    assert of_idle[-1].finish_reason == "length"
    assert (core.counters().idle_preemptions, core.counters().generation_tokens) == (1, 8)
    assert (core.counters().swapped_in_blocks > 0) == (num_host_blocks > 0)


def test_idle_sequences_in_flight_are_left_out_until_they_can_be_preempted() -> None:
    core = make_core(max_num_seqs=2)
    add_idle(core, "i0")
    add_idle(core, "i1")
    first = core.schedule()
    add(core, "now")
    second = core.schedule()
    assert second.empty, "both rows are in flight"
    core.apply(first, answer(first))
    third = core.schedule()
    assert list(joined(third)) == ["now"]
    assert num_scheduled(core, third) == {"now": 5, "i0": 1}
    invariants.check(core)


def test_when_its_time_is_over_an_idle_sequence_is_an_ordinary_one_wherever_it_is() -> None:
    core = make_core(max_num_seqs=2, budget=16)
    add_idle(core, "runs", until_s=10.0)
    add_idle(core, "later", until_s=20.0)
    add_idle(core, "waits", until_s=10.0)

    def at(now_s: float) -> StepPlan:
        plan = core.schedule(now_s)
        invariants.check(core)
        core.apply(plan, answer(plan))
        invariants.check(core)
        return plan

    at(1.0)
    assert running(core) == ["runs", "later"]
    at(10.0)
    assert running(core) == ["runs", "waits"], "the one that waits takes the place of the one that is still idle"
    assert [each.idle for each in core.residency.running] == [False, False]
    add(core, "now")
    at(11.0)
    assert running(core) == ["runs", "waits"], "nobody gives way any more"
    assert core.load().num_idle_waiting == 1
    core.abort("runs")
    core.abort("waits")
    at(12.0)
    assert running(core) == ["now", "later"]
    core.abort("later")
    core.abort("now")
    at(30.0)
    invariants.check_idle(core, 30.0)


def test_idle_sequences_use_the_rows_that_are_kept_for_new_clients_and_give_them_back() -> None:
    core = make_core(num_blocks=200, max_num_seqs=16)
    for number in range(20):
        core.add(replace(spec(f"i{number}", prompt_of(3, 50 * number)), client="a", idle_until_s=LONG))
    step(core)
    assert len(running(core)) == 16
    for number in range(16):
        core.add(replace(spec(f"a{number}", prompt_of(3, 50 * number)), client="a"))
    step(core)
    assert sum(name.startswith("a") for name in running(core)) == 15, "one row is for a client that has none"
    core.add(replace(spec("b", prompt_of(3)), client="b"))
    step(core)
    assert "b" in running(core)
    assert core.load().num_idle_running == 0


def test_without_chunked_prefill_a_prompt_longer_than_a_step_runs_when_nothing_else_does() -> None:
    core = make_core(budget=8, chunked=False, num_blocks=64)
    add_idle(core, "long", 20, max_tokens=2)
    add(core, "now", 8, max_tokens=2)
    plan, _ = step(core)
    assert list(joined(plan)) == ["now"]
    step(core)
    plan, _ = step(core)
    assert list(joined(plan)) == ["long"]
