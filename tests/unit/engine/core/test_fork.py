"""Sequences that begin like another: shared full blocks, a copy of the block in which they part, no shared write."""

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.shared.errors import ServiceError
from tests.unit.engine.core.factories import make_core, prompt_of, shares, spec, step

PROMPT = prompt_of(10)


def running_source(*, caching: bool = False, num_blocks: int = 32) -> Core:
    core = make_core(num_blocks=num_blocks, caching=caching)
    core.add(spec("source", PROMPT))
    step(core, 50)
    return core


@pytest.mark.parametrize("caching", [True, False])
def test_a_choice_shares_full_blocks_gets_a_copy_of_the_last_and_computes_one_token(caching: bool) -> None:
    core = running_source(caching=caching)
    core.fork("source", spec("choice", PROMPT))
    plan, outcomes = step(core, 51, 60)
    (new,) = plan.new
    assert new.block_ids == (0, 1, 3)
    assert plan.copies == ((2, 3),)
    assert shares(plan) == [(0, 10, 1, True), (1, 9, 1, True)]
    assert [core.pool.ref_count(block) for block in range(4)] == [2, 2, 1, 1]
    assert [(each.position, each.token_ids) for each in outcomes] == [(1, (51,)), (0, (60,))]
    assert outcomes[1].num_cached_tokens == 9


def test_several_choices_each_get_a_copy_of_their_own() -> None:
    core = running_source()
    for name in "abc":
        core.fork("source", spec(name, PROMPT))
    plan, _ = step(core)
    assert plan.copies == ((2, 3), (2, 4), (2, 5))
    assert core.pool.ref_count(0) == 4


def test_a_beam_goes_on_from_the_output_it_shares() -> None:
    core = running_source()
    step(core, 51)
    step(core, 52)
    core.fork("source", spec("beam", PROMPT, output=(50, 51, 99)))
    plan, outcomes = step(core, 53, 70)
    assert shares(plan)[1] == (1, 12, 1, True)
    assert plan.copies == ()
    assert plan.new[0].block_ids[:3] == (0, 1, 2)
    assert (outcomes[1].position, outcomes[1].token_ids) == (3, (70,))


def test_tokens_that_differ_are_not_shared() -> None:
    core = running_source()
    core.fork("source", spec("other", (*PROMPT[:5], 900, 901)))
    plan, _ = step(core)
    assert plan.new[0].block_ids == (0, 3)
    assert plan.copies == ((1, 3),)
    assert shares(plan)[1] == (1, 5, 2, True)


def test_whoever_ends_first_the_shared_blocks_stay_with_the_other() -> None:
    core = running_source()
    core.fork("source", spec("choice", PROMPT, max_tokens=3))
    step(core)
    core.abort("source")
    invariants.check(core)
    assert [core.pool.ref_count(block) for block in range(4)] == [1, 1, 0, 1]
    step(core)
    step(core)
    assert core.pool.num_free == core.facts.num_blocks


def test_a_source_that_is_gone_leaves_a_sequence_like_any_other() -> None:
    core = running_source()
    core.fork("source", spec("choice", PROMPT))
    core.abort("source")
    plan, _ = step(core)
    assert (shares(plan), plan.copies) == ([(0, 0, 10, True)], ())


def test_a_fork_that_could_never_run_is_refused_and_leaves_no_trace() -> None:
    core = running_source()
    with pytest.raises(ServiceError, match="prompt"):
        core.fork("source", spec("choice", prompt_of(300)))
    assert list(core.sequences) == ["source"]
