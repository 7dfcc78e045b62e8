"""Preempted sequences in the host's memory: what is copied, when it is worth it, and that nothing stays behind."""

import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import StepPlan
from tests.unit.engine.core.factories import answer, joined, make_core, prompt_of, shares, spec, step


def crowded(num_host_blocks: int, *, caching: bool = False) -> tuple[Core, StepPlan]:
    """Two sequences of seven tokens in four blocks, and the plan in which the second has to give way to the first."""
    core = make_core(num_blocks=4, caching=caching, num_host_blocks=num_host_blocks)
    core.add(spec("a", prompt_of(7), max_tokens=4))
    core.add(spec("b", prompt_of(7, 500), max_tokens=4))
    core.apply(plan := core.schedule(), answer(plan, 31, 41))
    core.apply(plan := core.schedule(), answer(plan, 32, 42))
    plan, _ = step(core)
    assert core.counters().preemptions == 1
    return core, plan


@pytest.mark.spec("S-SRV-044")
def test_a_preempted_sequence_is_copied_out_and_in_and_computes_nothing_twice() -> None:
    core, plan = crowded(num_host_blocks=2)
    assert plan.swap_out == ((2, 0), (3, 1))
    assert core.sequences["b"].num_host_tokens == 8
    step(core)
    plan, (outcome,) = step(core, 43)
    (new,) = plan.new
    assert plan.swap_in == ((0, new.block_ids[0]), (1, new.block_ids[1]))
    assert shares(plan) == [(new.row, 8, 1, True)]
    assert (outcome.position, outcome.token_ids) == (2, (43,))
    assert core.swap.pool.num_free == 2
    counters = core.counters()
    assert (counters.swapped_out_blocks, counters.swapped_in_blocks) == (2, 2)


@pytest.mark.spec("S-SRV-044")
@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_on_the_host_it_is_computed_again(num_host_blocks: int) -> None:
    core, plan = crowded(num_host_blocks)
    assert plan.swap_out == ()
    assert core.counters().swap_refusals == 1
    step(core)
    plan, _ = step(core, 43)
    assert plan.swap_in == ()
    assert [(start, count) for _, start, count, _ in shares(plan)] == [(0, 9)]


def test_blocks_that_are_still_cached_are_not_copied_in() -> None:
    core, plan = crowded(num_host_blocks=4, caching=True)
    assert len(plan.swap_out) == 2
    step(core)
    plan, _ = step(core, 43)
    (new,) = plan.new
    hits = core.counters().swapped_out_blocks - len(plan.swap_in)
    assert hits > 0
    assert plan.swap_in == tuple((host, new.block_ids[host]) for host in range(hits, 2))
    assert core.swap.pool.num_free == 4


def test_less_than_a_block_of_its_own_is_not_worth_a_copy() -> None:
    core = make_core(num_blocks=4, num_host_blocks=4)
    core.add(spec("a", prompt_of(8)))
    for _ in range(3):
        step(core)
    core.add(spec("b", (*prompt_of(8), 900)))
    while not core.counters().preemptions:
        plan, _ = step(core)
    assert plan.swap_out == ()
    assert core.sequences["b"].num_host_tokens == 0


def test_an_abort_frees_the_host_blocks() -> None:
    core, _ = crowded(num_host_blocks=2)
    assert core.swap.pool.num_free == 0
    core.abort("b")
    assert core.swap.pool.num_free == 2
    plan, _ = step(core)
    assert (plan.swap_out, plan.swap_in) == ((), ())


def test_a_copy_out_is_kept_until_a_plan_is_carried_out() -> None:
    core = make_core(num_blocks=4, caching=False, num_host_blocks=2)
    core.add(spec("a", prompt_of(7), max_tokens=9))
    core.add(spec("b", prompt_of(7, 500), max_tokens=9))
    step(core)
    step(core)
    in_flight = core.residency.running[0]
    in_flight.num_in_flight += 1
    core.residency.preempt(core.residency.running[1])
    in_flight.num_in_flight -= 1
    core.abort("a")
    plan = core.schedule()
    assert plan.swap_out == ((2, 0), (3, 1))
    assert joined(plan)["b"][:2] == tuple(block for _, block in plan.swap_in)
