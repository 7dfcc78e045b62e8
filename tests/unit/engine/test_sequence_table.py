"""The engine's table of sequences: fencing by attempt, replay, stop strings, leases."""

import pytest

from antiphon.services.engine.sequence_table import GatewayKey, SequenceTable, split
from antiphon.shared import limits
from antiphon.shared.messages import PromptLogprobs, SequenceMark, SequenceRef, Submit, TokenEvent, TokenLogprobs
from antiphon.shared.parameters.sampling import SamplingParams


def submit(attempt: int = 1, sequence_id: str = "r-0") -> Submit:
    return Submit(
        sequence_id=sequence_id,
        attempt=attempt,
        gateway_id="g",
        gateway_instance_id="instance_id",
        reply_subject="sink",
        prompt_token_ids=b"",
        params=SamplingParams(),
    )


def running(attempt: int = 1) -> SequenceTable:
    table = SequenceTable()
    table.register(submit(attempt), 0, 0.0)
    return table


@pytest.mark.matrix("B-06")
def test_a_submit_runs_once_for_each_attempt():
    table = running(2)
    assert table.admit(submit(2)) == "duplicate"
    assert table.admit(submit(1)) == "stale_attempt"
    assert table.admit(submit(3)) == "accepted"


@pytest.mark.matrix("B-07")
def test_a_cancel_that_overtakes_its_submit_leaves_a_tombstone():
    table = SequenceTable()
    assert not table.release("r-0", 1, 0.0)
    assert table.admit(submit(1)) == "tombstoned"
    assert table.admit(submit(2)) == "accepted"


def test_tombstones_expire():
    table = SequenceTable()
    table.release("r-0", 1, 0.0)
    table.expire(limits.TOMBSTONE_S + 1, {})
    assert table.admit(submit(1)) == "accepted"


def test_tokens_can_be_replayed_from_any_position():
    table = running()
    for position in range(3):
        table.append(
            TokenEvent(
                sequence_id="r-0",
                attempt=1,
                position=position,
                token_ids=(position + 10,),
                finish_reason="length" if position == 2 else None,
            )
        )
    entry = table.get("r-0", 1)
    assert entry is not None
    [event] = table.replay(entry, 1)
    assert (event.position, event.token_ids, event.finish_reason) == (1, (11, 12), "length")
    [tail] = table.replay(entry, 3)
    assert (tail.position, tail.token_ids) == (3, ())


def test_carried_tokens_shift_positions():
    table = SequenceTable()
    table.register(submit(), 5, 0.0)
    table.append(TokenEvent(sequence_id="r-0", attempt=1, position=5, token_ids=(1,)))
    entry = table.get("r-0", 1)
    assert entry is not None
    [event] = table.replay(entry, 0)
    assert (event.position, event.token_ids, entry.last_position) == (5, (1,), 6)


def test_the_log_probabilities_of_a_prompt_are_replayed_before_the_first_token():
    table = running()
    parts = [PromptLogprobs(start=start, token_ids=bytes(4), logprobs=bytes(4)) for start in (0, 1)]
    for part in parts:
        table.append(TokenEvent(sequence_id="r-0", attempt=1, position=0, token_ids=(), prompt_logprobs=part))
    entry = table.get("r-0", 1)
    assert entry is not None
    assert table.replay(entry, 0) == []
    for position in range(2):
        table.append(TokenEvent(sequence_id="r-0", attempt=1, position=position, token_ids=(position + 10,)))
    *prompt, tokens = table.replay(entry, 0)
    assert [event.prompt_logprobs for event in prompt] == parts
    assert (tokens.position, tokens.token_ids) == (0, (10, 11))
    assert [event.token_ids for event in table.replay(entry, 1)] == [(11,)]


def test_a_stop_string_ends_a_sequence_and_keeps_its_tokens():
    table = running()
    table.append(TokenEvent(sequence_id="r-0", attempt=1, position=0, token_ids=(7,)))
    assert table.end_by_stop_string("r-0", 1)
    assert not table.end_by_stop_string("r-0", 1)
    assert table.append(TokenEvent(sequence_id="r-0", attempt=1, position=1, token_ids=(8,))) is None
    assert table.num_live == 0
    marks, _ = table.progress([SequenceRef("r-0", 1)])
    assert marks[0].finished


@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_event_that_is_too_large_is_cut_between_tokens_and_says_the_same(count: int) -> None:
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(1, count + 1))
    whole = TokenEvent(
        sequence_id="r",
        attempt=1,
        position=5,
        token_ids=tuple(range(count)),
        finish_reason="length",
        stop_token_id=None,
        logprobs=logprobs,
        num_cached_tokens=3,
        cumulative_logprob=-100.0,
    )
    halves = split((whole,))
    assert halves is not None
    (first,), (rest,) = halves
    assert first.position == 5
    assert rest.position == 5 + len(first.token_ids)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert first.logprobs + rest.logprobs == whole.logprobs
    assert (first.finish_reason, rest.finish_reason) == (None, "length")
    assert first.cumulative_logprob + sum(each.logprob for each in rest.logprobs) == rest.cumulative_logprob == -100.0
    assert first.num_cached_tokens == rest.num_cached_tokens == 3


def test_several_events_are_cut_between_events_and_a_single_token_is_not() -> None:
    events = tuple(TokenEvent(sequence_id="r", attempt=1, position=position, token_ids=(7,)) for position in range(3))
    assert split(events) == (events[:1], events[1:])
    assert split(events[:1]) is None


GATEWAY: GatewayKey = ("g", "instance_id")
REF = SequenceRef("r-0", 1)


def test_a_sequence_is_asked_about_when_its_gateway_has_not_confirmed_it_for_a_while():
    table, heard = running(), {GATEWAY: 10.0}
    assert table.unconfirmed(limits.OWNERSHIP_CHECK_S, heard) == {}
    assert table.unconfirmed(limits.OWNERSHIP_CHECK_S + 0.1, heard) == {GATEWAY: [REF]}
    assert table.unconfirmed(limits.OWNERSHIP_CHECK_S + 0.2, heard) == {}, "it was asked about just now"
    table.renew_leases(GATEWAY, [REF], 3.0)
    assert table.unconfirmed(2.9 + limits.OWNERSHIP_CHECK_S, heard) == {}
    assert table.unconfirmed(3.1 + limits.OWNERSHIP_CHECK_S, heard) == {GATEWAY: [REF]}


def test_queries_are_bounded_and_reach_every_sequence_in_turn():
    table, count = SequenceTable(), 2 * limits.LIVENESS_BATCH_MAX + 10
    for number in range(count):
        table.register(submit(sequence_id=f"r-{number}"), 0, 0.0)
    asked: list[str] = []
    for beat in range(3):
        refs = table.unconfirmed(10.0 + beat / 10, {GATEWAY: 10.0})[GATEWAY]
        assert len(refs) <= limits.LIVENESS_BATCH_MAX
        asked += [ref.sequence_id for ref in refs]
    assert asked == [f"r-{number}" for number in range(count)]


def test_only_its_own_gateway_can_disown_or_confirm_a_sequence():
    table = running()
    assert table.disowned(("g", "another"), [REF]) == []
    assert table.disowned(GATEWAY, [SequenceRef("r-0", 2)]) == []
    assert [entry.sequence_id for entry in table.disowned(GATEWAY, [REF])] == ["r-0"]
    table.renew_leases(("g", "another"), [REF], 100.0)
    assert table.unconfirmed(100.0, {GATEWAY: 100.0}) == {GATEWAY: [REF]}


def test_what_a_silent_gateway_owned_is_an_orphan():
    table, heard = running(), {GATEWAY: 1.0}
    assert table.expire(1.0 + limits.ORPHAN_S, heard) == []
    assert len(table.expire(1.5 + limits.ORPHAN_S, heard)) == 1
    assert table.unconfirmed(1.5 + limits.ORPHAN_S, heard) == {}, "nobody is there to be asked"


def test_a_gateway_that_was_never_heard_has_its_time_from_the_submit_on():
    table = running()
    assert table.expire(limits.ORPHAN_S, {}) == []
    assert len(table.expire(limits.ORPHAN_S + 0.1, {("g", "another"): 100.0})) == 1


def test_progress_names_what_is_held_and_what_is_not():
    table = running()
    table.append(TokenEvent(sequence_id="r-0", attempt=1, position=0, token_ids=(7, 8)))
    older, unknown = SequenceRef("r-0", 0), SequenceRef("r-9", 1)
    assert table.progress([REF, older, unknown]) == ((SequenceMark("r-0", 1, 2),), (older, unknown))
