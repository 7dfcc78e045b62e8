"""Slots of recurrent states: which are read and written, where snapshots are, and which are given away."""

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import ScheduledSequence, StepPlan
from antiphon.shared.parameters.grammar import Grammar
from tests.unit.engine.core.factories import make_core, prompt_of, shares, spec, step


def run_out(core: Core) -> None:
    while core.sequences:
        step(core)


def only(plan: StepPlan) -> ScheduledSequence:
    (share,) = plan.scheduled
    return share


def test_a_decoding_sequence_keeps_its_slot_and_begins_without_one() -> None:
    core = make_core(num_states=8, interval=64)
    core.add(spec("a", prompt_of(3), max_tokens=4))
    first, *later = (only(step(core)[0]) for _ in range(4))
    assert (first.state, [count for count, _ in first.states]) == (-1, [3])
    ((_, slot),) = first.states
    assert [(share.state, share.states) for share in later] == [(slot, ((1, slot),))] * 3


def test_snapshots_are_at_regular_distances_and_at_the_end_of_the_prompt() -> None:
    core = make_core(num_states=8, interval=8)
    core.add(spec("a", prompt_of(22), max_tokens=1))
    share = only(step(core)[0])
    assert [count for count, _ in share.states] == [8, 16, 20, 22]
    assert len({slot for _, slot in share.states}) == 4


def test_a_prefix_is_reused_up_to_its_last_snapshot_and_the_next_one_finds_where_they_parted() -> None:
    core = make_core(num_states=12, interval=64, num_blocks=64)
    core.add(spec("a", prompt_of(26), max_tokens=1))
    run_out(core)
    common = prompt_of(18)
    core.add(spec("b", (*common, *prompt_of(9, 500)), max_tokens=1))
    plan, _ = step(core)
    # Blocks of 16 tokens are known, but the only snapshots are after 24 and, from now on, after 16.
    assert shares(plan)[0][:3] == (0, 0, 27)
    assert 16 in [count for count, _ in only(plan).states]
    run_out(core)
    core.add(spec("c", (*common, *prompt_of(9, 600)), max_tokens=1))
    plan, (outcome,) = step(core)
    assert (only(plan).start, outcome.num_cached_tokens) == (16, 16)
    assert only(plan).state >= 0
    assert only(plan).state not in [slot for _, slot in only(plan).states]


def test_sequences_with_the_same_prefix_read_one_slot_and_write_their_own() -> None:
    core = make_core(num_states=16, interval=8)
    core.add(spec("a", prompt_of(9), max_tokens=1))
    run_out(core)
    for name in ("b", "c", "d"):
        core.add(spec(name, (*prompt_of(8), ord(name)), max_tokens=1))
    plan, _ = step(core)
    (source,) = {share.state for share in plan.scheduled}
    written = [slot for share in plan.scheduled for _, slot in share.states]
    assert source not in written
    assert len(set(written)) == len(written) == 3


def test_a_snapshot_is_given_away_before_a_sequence_waits_and_costs_only_computing() -> None:
    core = make_core(num_states=6, interval=4, num_blocks=64)
    core.add(spec("a", prompt_of(17), max_tokens=1))
    run_out(core)
    core.add(spec("b", prompt_of(17, 500), max_tokens=1))
    run_out(core)
    core.add(spec("a again", prompt_of(17), max_tokens=2))
    plan, _ = step(core)
    assert only(plan).start in (0, 4, 8, 12, 16)
    run_out(core)


def test_a_token_that_waits_for_its_mask_is_computed_again_from_the_state_before_it() -> None:
    core = make_core(num_states=8, interval=64)
    core.add(spec("a", prompt_of(6), max_tokens=3, grammar=Grammar("json_object", "")))
    first, _ = step(core, ())
    before = dict(only(first).states)[5]
    again, _ = step(core, ())
    assert (only(again).start, only(again).state) == (5, before)
    more, _ = step(core, 7)
    assert (only(more).start, only(more).state) == (5, before)
    assert only(step(core, 8)[0]).state == only(more).states[-1][1]


def test_the_tokens_after_a_rejected_guess_go_on_from_the_last_right_one() -> None:
    core = make_core(num_states=24, interval=64, num_speculative_tokens=3)
    core.add(spec("a", (1, 2, 3, 4, 5, 6) * 3, max_tokens=20, ignore_eos=True))
    step(core, 1)
    plan, _ = step(core, (2, 9))
    share = only(plan)
    assert share.draft_token_ids[:2] == (2, 3)
    after = dict(share.states)
    assert sorted(after) == [1, 2, 3, 4]
    assert only(step(core, 10)[0]).state == after[2]


def test_a_preempted_sequence_goes_on_from_its_parked_state() -> None:
    core = make_core(num_blocks=8, num_states=12, interval=64, num_host_blocks=16, caching=False, max_num_seqs=2)
    for name in ("a", "b"):
        core.add(spec(name, prompt_of(12), max_tokens=12, ignore_eos=True))
    while not core.counters().preemptions:
        step(core)
    waiting = next(one for one in core.scheduled_sequences() if one.host_blocks)
    state, count = waiting.state, waiting.num_host_tokens
    assert state >= 0
    while waiting.host_blocks:
        plan, _ = step(core)
    share = next(each for each in plan.scheduled if each.start == count)
    assert share.state == state
    run_out(core)


def test_a_parked_state_is_given_away_when_its_slot_is_needed() -> None:
    core = make_core(num_blocks=8, num_states=4, interval=64, num_host_blocks=16, caching=False, max_num_seqs=2)
    for name in ("a", "b"):
        core.add(spec(name, prompt_of(12), max_tokens=12, ignore_eos=True))
    run_out(core)
    assert core.counters().preemptions
