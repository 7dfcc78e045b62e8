"""Choices of one prompt that arrive together: the prompt is computed once, whatever else is on or off."""

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from tests.unit.engine.core.factories import answer, make_core, prompt_of, shares, spec, step


def with_choices(count: int, length: int, **core: object) -> Core:
    made = make_core(max_num_seqs=8, **core)  # type: ignore[arg-type]
    for number in range(count):
        made.add(spec(f"c{number}", prompt_of(length), sequence_group="r-0", max_tokens=3))
    return made


def computed_until_all_run(core: Core, count: int) -> int:
    tokens = 0
    while len(core.residency.running) < count:
        tokens += step(core)[0].num_tokens
    return tokens


@pytest.mark.parametrize("caching", [True, False])
def test_choices_join_in_the_step_that_computes_their_prompt(caching: bool) -> None:
    core = with_choices(4, 42, caching=caching)
    plan, outcomes = step(core, 50, 51, 52, 53)
    assert shares(plan) == [(0, 0, 42, True), (1, 40, 2, True), (2, 40, 2, True), (3, 40, 2, True)]
    assert plan.copies == ()
    tables = [new.block_ids for new in plan.new]
    assert all(table[:10] == tables[0][:10] for table in tables)
    assert len({table[10] for table in tables}) == 4
    assert [each.num_cached_tokens for each in outcomes] == [0, 40, 40, 40]
    assert core.counters().cached_tokens == 120


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_longer_than_a_step_is_computed_once_too(caching: bool, chunked: bool) -> None:
    core = with_choices(3, 100, caching=caching, chunked=chunked, budget=16, num_blocks=64)
    decoded = 2 * 3
    assert 100 <= computed_until_all_run(core, 3) <= 100 + 2 * 4 + decoded


@pytest.mark.parametrize("caching", [True, False])
def test_a_choice_that_comes_later_computes_one_token(caching: bool) -> None:
    core = with_choices(1, 42, caching=caching)
    step(core)
    core.add(spec("late", prompt_of(42), sequence_group="r-0"))
    plan, _ = step(core)
    assert shares(plan)[1] == (1, 41, 1, True)
    assert len(plan.copies) == 1


def test_a_choice_that_has_output_already_shares_the_prompt() -> None:
    core = make_core(caching=False)
    core.add(spec("c0", prompt_of(9), output=(50, 51), sequence_group="r-0"))
    core.add(spec("c1", prompt_of(9), output=(60, 61), sequence_group="r-0"))
    plan, _ = step(core)
    assert shares(plan) == [(0, 0, 11, True), (1, 8, 3, True)]


def test_whoever_is_aborted_while_the_prompt_is_computed_the_others_have_it() -> None:
    core = with_choices(3, 42, caching=False)
    plan = core.schedule()
    core.abort("c0")
    invariants.check(core)
    core.apply(plan, answer(plan))
    invariants.check(core)
    assert [core.pool.ref_count(block) for block in plan.new[0].block_ids[:10]] == [2] * 10
    while core.sequences:
        step(core)
    assert core.pool.num_free == core.facts.num_blocks


def test_another_group_or_another_salt_shares_nothing() -> None:
    core = make_core(caching=False)
    core.add(spec("a", prompt_of(9), sequence_group="r-0"))
    core.add(spec("b", prompt_of(9), sequence_group="r-1"))
    core.add(spec("c", prompt_of(9), sequence_group="r-0", salt=b"tenant"))
    assert [count for _, _, count, _ in shares(step(core)[0])] == [9, 9, 9]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [40, 100])
def test_with_large_blocks_the_others_wait_a_step_and_compute_one_token(caching: bool, length: int) -> None:
    core = with_choices(4, length, caching=caching, block_size=64, budget=256)
    assert shares(step(core, 50)[0]) == [(0, 0, length, True)]
    plan, _ = step(core, 51, 60, 70, 80)
    assert shares(plan) == [(0, length, 1, True), *((row, length - 1, 1, True) for row in (1, 2, 3))]
    assert [source for source, _ in plan.copies] == [plan.copies[0][0]] * 3


def test_nobody_waits_for_a_sibling_that_is_gone() -> None:
    core = with_choices(2, 40, caching=False, block_size=64)
    plan = core.schedule()
    assert len(plan.new) == 1
    core.abort("c0")
    later = core.schedule()
    assert shares(later) == [(1, 0, 40, True)]
    core.apply(plan, answer(plan))
    core.apply(later, answer(later))
    invariants.check(core)


def test_a_copy_is_not_taken_from_the_target_of_another_copy() -> None:
    core = make_core(caching=False, max_num_seqs=4, budget=64)
    core.add(spec("c0", prompt_of(10), sequence_group="f", priority=2))
    core.add(spec("c1", prompt_of(10), sequence_group="f", priority=1))
    for number in range(3):
        core.add(spec(f"other {number}", prompt_of(5, 500), max_tokens=1))
    core.add(spec("c2", prompt_of(10), sequence_group="f", priority=-1))
    step(core)
    plan, _ = step(core)
    assert [new.sequence_id for new in plan.new] == ["c1", "c0"]
    targets = {target for _, target in plan.copies}
    assert not targets & {source for source, _ in plan.copies}
