"""Sequences that get no token because their mask is not ready: they are tried again, a few in each step, in turn."""

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.lanes.running import TRIED_MAX
from tests.unit.engine.core.factories import answer, make_core, prompt_of, shares, spec, step


def test_the_last_token_is_computed_again_until_a_token_is_sampled() -> None:
    core = make_core(num_blocks=4, block_size=4)
    core.add(spec("a", prompt_of(4)))
    plan, outcomes = step(core, ())
    assert (shares(plan), outcomes) == ([(0, 0, 4, True)], [])
    for _ in range(3):
        plan, outcomes = step(core, ())
        assert (shares(plan), outcomes) == ([(0, 3, 1, True)], [])
    plan, [outcome] = step(core, 7)
    assert (shares(plan), outcome.position, outcome.token_ids) == ([(0, 3, 1, True)], 0, (7,))
    assert shares(step(core, 8)[0]) == [(0, 4, 1, True)]


def test_draft_tokens_of_a_waiting_sequence_are_rejected() -> None:
    core = make_core(num_speculative_tokens=4)
    core.add(spec("a", (5, 6, 7, 5, 6, 7, 5, 6)))
    step(core, ())
    plan, outcomes = step(core, ())
    assert plan.scheduled[0].draft_token_ids[:2] == (7, 5)
    assert not outcomes
    plan, [outcome] = step(core, 7)
    assert (shares(plan), outcome.position, outcome.token_ids) == ([(0, 7, 1, True)], 0, (7,))
    assert core.counters().accepted_tokens == 0


def test_a_waiting_sequence_may_be_preempted_or_aborted() -> None:
    core = make_core(num_blocks=3, block_size=4)
    core.add(spec("old", prompt_of(4)))
    core.add(spec("young", prompt_of(4, first=300)))
    step(core, 7, ())
    for _ in range(5):
        step(core, 7, ())
    assert core.counters().preemptions > 0
    assert core.abort("old")
    [outcome] = step(core, 9)[1]
    assert (outcome.sequence_id, outcome.position) == ("young", 0)
    step(core, ())
    assert core.abort("young")
    assert core.pool.num_free == 3
    invariants.check(core)


def test_only_a_few_waiting_sequences_are_tried_in_a_step_those_first_that_were_left_out_longest() -> None:
    num_slow, num_fast = 3 * TRIED_MAX, 2
    core = make_core(num_blocks=200, max_num_seqs=num_slow + num_fast, budget=400)
    for number in range(num_fast):
        core.add(spec(f"f{number}", prompt_of(4, first=200)))
    for number in range(num_slow):
        core.add(spec(f"s{number}", prompt_of(4, first=300)))
    step(core, *((7,) * num_fast), ())
    tried = list[int]()
    for _ in range(6):
        plan = core.schedule()
        rows = [share.row for share in plan.scheduled]
        assert rows[:num_fast] == [0, 1]
        assert len(rows) == num_fast + TRIED_MAX
        tried += rows[num_fast:]
        core.apply(plan, answer(plan, *((7,) * num_fast), ()))
        invariants.check(core)
    assert [tried.count(row) for row in range(num_fast, num_fast + num_slow)] == [2] * num_slow
    # Those that get a token are in the next step besides others.
    step(core, 7)
    assert len(step(core, 7)[0].scheduled) == num_fast + 2 * TRIED_MAX
