"""Beam groups in the core: who shares a search, rows and blocks, late members, aborts, refusals."""

import dataclasses

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import BeamParams
from tests.unit.engine.core.factories import make_core, prompt_of, spec, step

PROMPT = prompt_of(10)


def member(rank: int, *, width: int = 3, attempt: int = 1, max_tokens: int = 4, **others: object) -> SequenceSpec:
    params = {"temperature": 0.0, "beam": BeamParams(width, rank), "sequence_group": "request", **others}
    return spec(f"m{rank}#{attempt}", PROMPT, max_tokens=max_tokens, **params)  # type: ignore[arg-type]


def result(plan: StepPlan) -> StepResult:
    """Every row has the same candidates. They do not end."""
    num_samples = sum(share.samples for share in plan.scheduled)
    best = SampledLogprobs(-1.0, (50, 51, 52, 53), (-1.0, -2.0, -4.0, -8.0))
    return StepResult(step=plan.step, token_ids=((50,),) * num_samples, logprobs=((best,),) * num_samples)


def beam_step(core: Core) -> tuple[StepPlan, list[Outcome]]:
    plan = core.schedule()
    invariants.check(core)
    outcomes = core.apply(plan, result(plan))
    invariants.check(core)
    return plan, outcomes


def finish(core: Core) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    while core.sequences:
        found |= {outcome.sequence_id: outcome for outcome in beam_step(core)[1]}
    return found


BEST = {"m0#1": (50, 50, 50, 50), "m1#1": (50, 50, 50, 51), "m2#1": (50, 50, 51, 50)}


def test_the_members_of_a_group_get_the_results_of_one_search_by_rank_at_its_end() -> None:
    core = make_core()
    for rank in range(3):
        core.add(member(rank))
    plans = [beam_step(core) for _ in range(4)]
    assert [len(plan.scheduled) for plan, _ in plans] == [1, 3, 3, 3]
    assert [len(outcomes) for _, outcomes in plans] == [0, 0, 0, 3]
    assert {each.sequence_id: each.token_ids for each in plans[-1][1]} == BEST
    assert {each.finish_reason for each in plans[-1][1]} == {"length"}
    assert [core.joined(plan) for plan, _ in plans[:3]] == [(), (), ()]
    assert core.pool.num_free == 32
    invariants.check_idle(core, 0.0)


def test_beams_share_the_prompts_full_blocks_and_copy_the_block_in_which_they_part() -> None:
    core = make_core(caching=False)
    core.add(member(0))
    plan = core.schedule()
    assert core.joined(plan) == ("m0#1",)
    core.apply(plan, result(plan))
    plan, _ = beam_step(core)
    assert core.joined(plan) == ()
    assert plan.freed_rows == (0,)
    assert [new.token_ids[-1] for new in plan.new] == [50, 51, 52]
    tables = [new.block_ids for new in plan.new]
    assert [table[:2] for table in tables] == [(0, 1)] * 3
    assert plan.copies == tuple((2, table[2]) for table in tables[1:])


def test_nothing_of_a_search_in_flight_is_planned_ahead() -> None:
    core = make_core()
    core.add(member(0))
    core.add(spec("other", prompt_of(5, 300)))
    beam_step(core)
    beam_step(core)
    core.schedule()
    ahead = core.schedule()
    assert len(ahead.scheduled) == 1


def test_a_late_member_joins_the_search_and_one_that_is_too_late_searches_again() -> None:
    core = make_core()
    core.add(member(0))
    beam_step(core)
    beam_step(core)
    core.add(member(1))
    found = finish(core)
    assert core.counters().step == 4
    core.add(member(2))
    found |= finish(core)
    assert {name: outcome.token_ids for name, outcome in found.items()} == BEST


def test_a_search_ends_with_its_last_member() -> None:
    core = make_core()
    for rank in range(2):
        core.add(member(rank))
    beam_step(core)
    beam_step(core)
    plan = core.schedule()
    assert core.abort("m0#1")
    assert core.abort("m1#1")
    invariants.check(core)
    assert core.apply(plan, result(plan)) == []
    invariants.check(core)
    assert core.pool.num_free == 32
    assert core.load().num_running == 0


def test_another_attempt_joins_the_search_of_its_siblings() -> None:
    core = make_core()
    core.add(member(0))
    core.add(member(1))
    beam_step(core)
    core.abort("m0#1")
    core.add(member(0, attempt=2))
    assert finish(core)["m0#2"].token_ids == BEST["m0#1"]
    assert core.counters().step == 4


def test_other_parameters_or_another_tenant_get_a_search_of_their_own() -> None:
    core = make_core(num_blocks=64, max_num_seqs=12)
    core.add(member(0))
    core.add(member(1, max_tokens=3))
    core.add(member(2, salt=b"tenant"))
    assert len(list(core.beam_groups)) == 3
    assert len(finish(core)["m1#1"].token_ids) == 3


def test_tokens_of_an_earlier_search_are_not_reported_again_and_must_be_the_same() -> None:
    core = make_core()
    core.add(member(1, output=(50, 50)))
    core.add(member(2, output=(50, 99)))
    found = finish(core)
    assert (found["m1#1"].position, found["m1#1"].token_ids) == (2, (50, 51))
    assert found["m1#1"].cumulative_logprob == pytest.approx(-3.0)
    assert (found["m2#1"].finish_reason, found["m2#1"].token_ids) == ("error", ())


def test_a_search_waits_until_all_its_rows_are_free() -> None:
    core = make_core(max_num_seqs=4)
    for number in range(2):
        core.add(spec(f"other{number}", prompt_of(4, 300 + 100 * number)))
    step(core)
    core.add(member(0))
    plan, _ = step(core)
    assert len(plan.scheduled) == 2
    core.abort("other0")
    core.add(spec("later", prompt_of(4, 600)))
    plan, _ = beam_step(core)
    # The rows of the beams to come are reserved: the later sequence cannot have them.
    assert len(plan.scheduled) == 2
    assert core.residency.rows.num_free == 0
    assert core.residency.rows.num_reserved == 0


def test_all_beams_of_a_search_count_as_running_sequences_of_its_client() -> None:
    core = make_core(max_num_seqs=4)
    core.add(dataclasses.replace(member(0), client="a"))
    for _ in range(2):
        beam_step(core)
    assert {beam.client for beam in core.residency.running} == {"a"}
    assert core.residency.waiting.num_running_clients == 1
    core.add(dataclasses.replace(spec("other", prompt_of(4, 300)), client="b"))
    beam_step(core)
    assert core.residency.waiting.num_running_clients == 2
    core.abort("m0#1")
    assert core.residency.waiting.num_running_clients == 1


def test_a_preempted_search_begins_anew_and_finds_the_same() -> None:
    core = make_core(num_blocks=9, caching=False)
    core.add(spec("older", prompt_of(8, 300), max_tokens=12, priority=-1))
    core.add(member(0))
    core.add(member(1))
    found = finish(core)
    assert core.counters().preemptions > 0
    assert {name: found[name].token_ids for name in ("m0#1", "m1#1")} == {name: BEST[name] for name in ("m0#1", "m1#1")}


@pytest.mark.parametrize(
    ("core", "param"), [(make_core(max_num_seqs=2), "best_of"), (make_core(num_blocks=5), "max_tokens")]
)
def test_a_search_that_could_never_run_is_refused(core: Core, param: str) -> None:
    with pytest.raises(ServiceError) as raised:
        core.add(member(0))
    assert raised.value.param == param
    assert not core.sequences


def test_more_beams_than_the_vocabulary_has_tokens_are_refused() -> None:
    core = make_core(max_num_seqs=16)
    with pytest.raises(ServiceError, match="beams"):
        core.add(member(0, width=16, stop_token_ids=tuple(range(100, 1000, 1))))
