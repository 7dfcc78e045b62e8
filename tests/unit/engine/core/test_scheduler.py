"""Which sequences compute what: budget, rows, blocks, preemption. Exact plans, exact blocks."""

import dataclasses
from typing import Any

import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import ScheduledSequence, StepPlan
from tests.unit.engine.core.factories import answer, joined, make_core, prompt_of, shares, spec, step


def add(core: Core, *lengths: int, **options: Any) -> None:
    """Adds 'a', 'b', … with prompts of these lengths that have nothing in common."""
    for number, length in enumerate(lengths):
        core.add(spec("abcdefgh"[number], prompt_of(length, 100 + 100 * number), arrival=number, **options))


# --- budget -----------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_an_empty_plan_that_takes_no_step_number() -> None:
    core = make_core()
    assert core.schedule() == StepPlan(step=1)
    add(core, 3)
    assert core.schedule().step == 1
    assert core.counters().step == 1


def test_a_plan_names_everything_of_a_sequence_that_joins_and_then_only_what_is_new() -> None:
    core = make_core()
    add(core, 6)
    plan, _ = step(core)
    (new,) = plan.new
    assert (new.row, new.sequence_id, new.token_ids, new.num_prompt_tokens) == (0, "a", prompt_of(6), 6)
    assert new.block_ids == (0, 1)
    assert plan.scheduled == (ScheduledSequence(row=0, start=0, num_tokens=6, samples=True),)
    followers = [step(core)[0].scheduled[0] for _ in range(4)]
    assert followers == [
        ScheduledSequence(row=0, start=6, num_tokens=1, samples=True),
        ScheduledSequence(row=0, start=7, num_tokens=1, samples=True),
        ScheduledSequence(row=0, start=8, num_tokens=1, samples=True, new_block_ids=(2,)),
        ScheduledSequence(row=0, start=9, num_tokens=1, samples=True),
    ]


@pytest.mark.spec("S-SRV-041")
@pytest.mark.parametrize(("block_size", "blocks"), [(1, 9), (4, 3), (8, 2), (64, 1)])
def test_a_block_holds_block_size_tokens(block_size: int, blocks: int) -> None:
    core = make_core(num_blocks=64, block_size=block_size)
    add(core, 9)
    assert joined(core.schedule())["a"] == tuple(range(blocks))


@pytest.mark.spec("S-SRV-051", "S-SRV-052")
def test_the_budget_is_split_between_running_sequences_first_and_pieces_of_prompts_after() -> None:
    core = make_core(budget=8)
    add(core, 3, 12, 4)
    assert shares(step(core)[0]) == [(0, 0, 3, True), (1, 0, 5, False)]
    assert shares(step(core)[0]) == [(0, 3, 1, True), (1, 5, 7, True)]
    assert shares(step(core)[0]) == [(0, 4, 1, True), (1, 12, 1, True), (2, 0, 4, True)]


@pytest.mark.spec("S-SRV-051")
def test_prompts_get_a_share_of_the_budget_beside_a_token_of_each_running_sequence() -> None:
    core = make_core(budget=64, step_prompt_tokens=4)
    add(core, 3, 6)
    assert shares(step(core)[0]) == [(0, 0, 3, True), (1, 0, 1, False)]
    assert shares(step(core)[0]) == [(0, 3, 1, True), (1, 1, 5, True)]
    assert shares(step(core)[0]) == [(0, 4, 1, True), (1, 6, 1, True)]
    core = make_core(budget=5, step_prompt_tokens=9)
    add(core, 12)
    assert shares(step(core)[0]) == [(0, 0, 5, False)]


@pytest.mark.spec("S-SRV-052")
def test_a_prompt_in_pieces_gets_blocks_piece_by_piece_and_samples_at_its_end_only() -> None:
    core = make_core(budget=5)
    add(core, 12)
    plans = [step(core) for _ in range(3)]
    assert [shares(plan) for plan, _ in plans] == [[(0, 0, 5, False)], [(0, 5, 5, False)], [(0, 10, 2, True)]]
    assert [plan.scheduled[0].new_block_ids for plan, _ in plans] == [(), (2,), ()]
    assert [len(outcomes) for _, outcomes in plans] == [0, 0, 1]


@pytest.mark.spec("S-SRV-052")
def test_without_chunked_prefill_a_prompt_waits_until_the_whole_of_it_fits() -> None:
    core = make_core(budget=8, chunked=False)
    add(core, 5, 4, 2)
    assert shares(step(core)[0]) == [(0, 0, 5, True)]
    assert shares(step(core)[0]) == [(0, 5, 1, True), (1, 0, 4, True), (2, 0, 2, True)]


@pytest.mark.spec("S-SRV-052")
def test_without_chunked_prefill_a_prompt_longer_than_the_budget_runs_alone_in_one_step() -> None:
    core = make_core(budget=8, chunked=False)
    add(core, 3, 20, 2)
    assert shares(step(core)[0]) == [(0, 0, 3, True)]
    assert shares(step(core)[0]) == [(1, 0, 20, True)]
    assert shares(step(core)[0]) == [(0, 3, 1, True), (1, 20, 1, True), (2, 0, 2, True)]


def test_without_chunked_prefill_running_sequences_get_every_other_step_of_a_row_of_long_prompts() -> None:
    core = make_core(budget=8, chunked=False)
    add(core, 3, 20, 20)
    plans = [shares(step(core)[0]) for _ in range(5)]
    assert plans[1] == [(1, 0, 20, True)]
    assert plans[2] == [(0, 3, 1, True), (1, 20, 1, True)]
    assert plans[3] == [(2, 0, 20, True)]
    assert plans[4] == [(0, 4, 1, True), (1, 21, 1, True), (2, 20, 1, True)]


def test_without_chunked_prefill_a_prompt_that_the_running_ones_leave_no_room_for_goes_first_once() -> None:
    core = make_core(budget=8, chunked=False)
    add(core, 3, 3, 7)
    step(core)
    assert shares(step(core)[0]) == [(2, 0, 7, True), (0, 3, 1, True)]
    assert shares(step(core)[0]) == [(0, 4, 1, True), (1, 3, 1, True), (2, 7, 1, True)]


def test_without_chunked_prefill_a_long_prompt_does_not_preempt_running_sequences() -> None:
    core = make_core(num_blocks=6, budget=8, chunked=False)
    add(core, 4, 20, max_tokens=5)
    step(core)
    for _ in range(4):
        assert [share[0] for share in shares(step(core)[0])] == [0]
    assert shares(step(core)[0]) == [(0, 0, 20, True)]
    assert core.counters().preemptions == 0


def test_without_chunked_prefill_a_cached_prefix_does_not_count_against_the_budget() -> None:
    core = make_core(budget=8, chunked=False)
    core.add(spec("a", prompt_of(16), max_tokens=1))
    step(core)
    core.add(spec("b", prompt_of(20)))
    core.add(spec("c", prompt_of(4, 500)))
    assert shares(step(core)[0]) == [(0, 16, 4, True), (1, 0, 4, True)]


# --- rows and order ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-SRV-050")
def test_no_more_sequences_run_at_once_than_there_are_rows() -> None:
    core = make_core(max_num_seqs=2)
    add(core, 3, 3, 3, max_tokens=2)
    assert [len(step(core)[0].scheduled) for _ in range(4)] == [2, 2, 1, 1]
    assert core.load().num_waiting == core.load().num_running == 0


def test_a_row_is_freed_and_filled_again_in_one_plan() -> None:
    core = make_core(max_num_seqs=2)
    add(core, 3, 3, 3, 3)
    step(core)
    core.abort("b")
    plan, _ = step(core)
    assert plan.freed_rows == (1,)
    assert [(new.row, new.sequence_id) for new in plan.new] == [(1, "c")]
    assert shares(plan) == [(0, 3, 1, True), (1, 0, 3, True)]
    assert step(core)[0].freed_rows == ()


def test_rows_freed_when_there_is_nothing_to_compute_are_announced_with_the_next_step() -> None:
    core = make_core()
    add(core, 3, 3, max_tokens=1)
    step(core)
    assert core.schedule() == StepPlan(step=2)
    assert core.schedule() == StepPlan(step=2)
    core.add(spec("z", prompt_of(3, 900)))
    plan = core.schedule()
    assert plan.freed_rows == (0, 1)
    assert plan.new[0].row == 0


def test_priority_goes_before_arrival_and_neither_lets_anyone_overtake_a_head_without_blocks() -> None:
    core = make_core(num_blocks=4, max_num_seqs=4)
    core.add(spec("late", prompt_of(2, 100), arrival=1))
    core.add(spec("first", prompt_of(2, 200), arrival=0))
    core.add(spec("big", prompt_of(12, 300), priority=-1, arrival=2, max_tokens=1))
    core.add(spec("urgent", prompt_of(5, 400), priority=-1, arrival=1, max_tokens=1))
    assert list(joined(step(core)[0])) == ["urgent"]
    assert list(joined(step(core)[0])) == ["big", "first"]
    assert list(joined(step(core)[0])) == ["late"]


def test_a_part_of_a_prompt_is_not_started_before_all_of_it_finds_blocks() -> None:
    core = make_core(num_blocks=6, budget=8)
    add(core, 8, 15, max_tokens=2)
    assert shares(step(core)[0]) == [(0, 0, 8, True)]
    assert shares(step(core)[0]) == [(0, 8, 1, True)]
    assert shares(step(core)[0]) == [(0, 0, 8, False)]


def test_a_head_without_blocks_is_looked_up_again_only_when_it_could_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_blocks=8)
    add(core, 12, 24, max_tokens=20)
    looked_up: list[str] = []
    lookup = core.prefix_cache.lookup
    monkeypatch.setattr(core.prefix_cache, "lookup", lambda each: (looked_up.append(each.sequence_id), lookup(each))[1])
    for _ in range(10):
        step(core)
    assert looked_up == ["a", "b"]
    core.abort("a")
    step(core)
    assert looked_up == ["a", "b", "b"]


def test_a_head_without_blocks_is_looked_up_again_when_its_prefix_has_been_computed() -> None:
    core = make_core(num_blocks=8, budget=8)
    core.add(spec("a", prompt_of(18)))
    core.add(spec("b", prompt_of(20)))
    for _ in range(2):
        assert list(joined(step(core)[0])) in (["a"], [])
    assert joined(step(core)[0])["b"] == (0, 1, 2, 3, 5)


# --- preemption -------------------------------------------------------------------------------------------------------


def test_the_youngest_running_sequence_gives_its_blocks_to_an_older_one() -> None:
    core = make_core(num_blocks=5)
    add(core, 7, 6, 3)
    step(core)
    step(core)
    plan, _ = step(core)
    assert shares(plan) == [(0, 8, 1, True), (1, 7, 1, True)]
    assert plan.scheduled[0].new_block_ids == (4,)
    assert plan.freed_rows == (2,)
    assert core.counters().preemptions == 1
    assert core.load().num_waiting == 1


def test_the_lowest_priority_is_preempted_whenever_it_came() -> None:
    core = make_core(num_blocks=4)
    core.add(spec("low", prompt_of(7, 100), priority=1, arrival=0))
    core.add(spec("high", prompt_of(7, 200), priority=0, arrival=1))
    step(core)
    step(core)
    plan, _ = step(core)
    assert [core.residency.rows[share.row].sequence_id for share in plan.scheduled] == ["high"]
    assert [each.sequence_id for each in core.residency.waiting] == ["low"]


def test_the_youngest_preempts_itself_when_it_is_the_one_without_a_block() -> None:
    core = make_core(num_blocks=4)
    add(core, 5, 7)
    step(core)
    step(core)
    plan, _ = step(core)
    assert shares(plan) == [(0, 6, 1, True)]
    assert plan.freed_rows == (1,)


def test_several_are_preempted_if_one_is_not_enough() -> None:
    core = make_core(num_blocks=6, max_num_seqs=4)
    core.add(spec("a", prompt_of(8), arrival=0))
    core.add(spec("b", prompt_of(4, 500), arrival=1))
    core.add(spec("c", prompt_of(4, 600), arrival=2))
    core.apply(plan := core.schedule(), answer(plan, (7,) * 9, 7, 7))
    plan, _ = step(core)
    assert plan.scheduled == (ScheduledSequence(row=0, start=8, num_tokens=9, samples=True, new_block_ids=(4, 5, 3)),)
    assert plan.freed_rows == (2, 1)


def test_nobody_joins_in_the_step_of_a_preemption() -> None:
    core = make_core(num_blocks=4, max_num_seqs=3)
    add(core, 7, 7)
    step(core)
    step(core)
    core.add(spec("urgent", prompt_of(1, 900), priority=-1))
    plan, _ = step(core)
    assert shares(plan) == [(0, 8, 1, True)]
    assert plan.new == ()
    assert list(joined(step(core)[0])) == ["urgent"]


def test_a_preempted_sequence_comes_back_before_older_ones_that_never_ran_and_goes_on_where_it_was() -> None:
    core = make_core(num_blocks=4, max_num_seqs=2)
    core.add(spec("a", prompt_of(7), max_tokens=4, arrival=5))
    core.add(spec("b", prompt_of(7, 500), max_tokens=4, arrival=6))
    core.apply(plan := core.schedule(), answer(plan, 31, 41))
    core.apply(plan := core.schedule(), answer(plan, 32, 42))
    core.add(spec("c", prompt_of(7, 700), arrival=0))
    outcomes = {each.sequence_id: each for _ in range(2) for each in step(core)[1]}
    assert outcomes["a"].finish_reason == "length"
    plan = core.schedule()
    (new,) = plan.new
    assert (new.sequence_id, new.token_ids) == ("b", (*prompt_of(7, 500), 41, 42))
    (outcome,) = core.apply(plan, answer(plan, 43))
    assert (outcome.position, outcome.token_ids, outcome.first_scheduled_step) == (2, (43,), 1)


def test_the_oldest_sequence_advances_in_every_step_under_the_tightest_pool() -> None:
    core = make_core(num_blocks=8, max_num_seqs=4, caching=False)
    add(core, 6, 6, 6, 6, max_tokens=20)
    order: list[str] = []
    for _ in range(200):
        if not core.sequences:
            break
        oldest = min(core.sequences.values(), key=lambda each: each.age)
        _, outcomes = step(core)
        assert oldest.sequence_id in {each.sequence_id for each in outcomes}
        order += [each.sequence_id for each in outcomes if each.finish_reason]
    assert order == ["a", "b", "c", "d"]
    assert core.counters().preemptions > 0
    assert core.pool.num_free == 8


@pytest.mark.parametrize(("rows", "kept"), [(8, 0), (16, 1), (64, 2)])
def test_the_last_rows_are_kept_for_clients_that_have_nothing_running(rows: int, kept: int) -> None:
    core = make_core(num_blocks=1000, max_num_seqs=rows, budget=4 * rows, caching=False)

    def add_of(client: str, count: int) -> None:
        for number in range(count):
            core.add(dataclasses.replace(spec(f"{client}{number}", prompt_of(4, number)), client=client))

    add_of("a", rows + 1)
    step(core)
    assert core.load().num_running == rows - kept
    add_of("b", 3)
    plan, _ = step(core)
    assert [new.sequence_id for new in plan.new] == ["b0"] * min(kept, 1)
    add_of("", 3)
    plan, _ = step(core)
    assert len(plan.new) == max(0, kept - 1), "sequences without a client may have every row"
