"""A sequence's state: which events are applied, what counts as a gap, and when its stream has to be rebuilt."""

import pytest

from antiphon.services.gateway.path.sequence_state import Address, ApplyResult, Phase, SequenceState
from antiphon.shared import limits
from antiphon.shared.messages import PositionLogprobs, SequenceMark, TextEvent, TokenEvent, TokenText

ENGINE = Address("e1", "aaaa0000")
OTHER = Address("e2", "bbbb0000")
DETOKENIZER = Address("d1", "cccc0000")


def running() -> SequenceState:
    sequence = SequenceState(sequence_id="r-0")
    sequence.start_placement(ENGINE, DETOKENIZER, 0.0)
    sequence.accepted(0.0)
    return sequence


def event(
    position: int, token_ids: tuple[int, ...], offset: int, text: str, attempt: int = 1, finish=None
) -> TextEvent:
    return TextEvent(
        sequence_id="r-0",
        attempt=attempt,
        position=position,
        token_ids=token_ids,
        text_offset=offset,
        text=text,
        finish_reason=finish,
    )


def take(sequence: SequenceState, *args, engine: Address = ENGINE, now: float = 1.0, **kwargs):
    return sequence.apply_event(event(*args, **kwargs), engine, now)


def test_events_in_order_append_tokens_and_text():
    sequence = running()
    assert take(sequence, 0, (5,), 0, "he")[0] is ApplyResult.APPLIED
    result, delta = take(sequence, 1, (6,), 2, "llo", finish="stop")
    assert result is ApplyResult.APPLIED
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.text_offset) == ("llo", (6,), 2)
    assert (sequence.token_ids, sequence.text_length, sequence.phase) == ([5, 6], 5, Phase.DONE)


def test_an_overlapping_replay_adds_only_what_is_new():
    sequence = running()
    take(sequence, 0, (5, 6), 0, "hello")
    result, delta = take(sequence, 0, (5, 6, 7), 0, "hello you")
    assert result is ApplyResult.APPLIED
    assert delta is not None
    assert (delta.text, delta.token_ids) == (" you", (7,))


def test_a_duplicate_is_stale():
    sequence = running()
    take(sequence, 0, (5,), 0, "a")
    assert take(sequence, 0, (5,), 0, "a") == (ApplyResult.STALE, None)


def test_a_missing_token_is_a_gap():
    assert take(running(), 1, (5,), 0, "a")[0] is ApplyResult.GAP


def test_missing_text_is_a_gap_even_when_tokens_are_complete():
    sequence = running()
    take(sequence, 0, (5,), 0, "a")
    assert take(sequence, 1, (6,), 2, "c")[0] is ApplyResult.GAP


@pytest.mark.matrix("S-03")
def test_an_older_attempt_or_a_foreign_engine_is_stale():
    sequence = running()
    assert take(sequence, 0, (5,), 0, "a", engine=OTHER)[0] is ApplyResult.STALE
    sequence.lost()
    sequence.start_placement(OTHER, DETOKENIZER, 2.0)
    assert take(sequence, 0, (5,), 0, "a", attempt=1)[0] is ApplyResult.STALE
    assert take(sequence, 0, (5,), 0, "a", attempt=2, engine=OTHER)[0] is ApplyResult.APPLIED


@pytest.mark.matrix("S-03")
def test_a_contradiction_diverges_and_what_was_shown_stays():
    sequence = running()
    take(sequence, 0, (5,), 0, "a")
    assert take(sequence, 0, (9, 6), 0, "xb")[0] is ApplyResult.DIVERGED
    assert sequence.token_ids == [5]


def test_nothing_is_taken_after_the_end():
    sequence = running()
    take(sequence, 0, (5,), 0, "a", finish="length")
    assert take(sequence, 1, (6,), 1, "b")[0] is ApplyResult.STALE


def test_a_first_token_may_come_before_the_engines_answer():
    sequence = SequenceState(sequence_id="r-0")
    sequence.start_placement(ENGINE, DETOKENIZER, 0.0)
    assert take(sequence, 0, (5,), 0, "a", finish="stop")[0] is ApplyResult.APPLIED
    sequence.accepted(1.0)
    assert sequence.phase is Phase.DONE


def test_a_high_water_mark_above_what_came_is_a_stall_after_a_while():
    sequence = running()
    take(sequence, 0, (5,), 0, "a", now=1.0)
    sequence.report_progress(SequenceMark("r-0", 1, 2), 1.1)
    assert not sequence.stalled(1.0 + limits.STALL_S)
    assert sequence.stalled(1.2 + limits.STALL_S)
    take(sequence, 1, (6,), 1, "b", now=1.6)
    assert not sequence.stalled(5.0)


def test_a_finished_mark_without_the_end_is_a_stall():
    sequence = running()
    take(sequence, 0, (5,), 0, "a", now=1.0)
    sequence.report_progress(SequenceMark("r-0", 1, 1, finished=True), 1.1)
    assert sequence.stalled(1.2 + limits.STALL_S)


def test_a_sequence_that_is_queued_in_its_engine_is_not_behind():
    sequence = running()
    assert not sequence.report_progress(SequenceMark("r-0", 1, 0), 1.0)
    assert not sequence.stalled(600.0)


def test_a_mark_of_another_attempt_says_nothing():
    sequence = running()
    assert not sequence.report_progress(SequenceMark("r-0", 2, 9), 1.0)
    assert not sequence.stalled(600.0)


def test_a_sequence_without_a_place_takes_nothing():
    sequence = running()
    sequence.lost()
    assert (sequence.phase, sequence.engine, sequence.detokenizer) == (Phase.WAITING, None, None)
    assert take(sequence, 0, (5,), 0, "a")[0] is ApplyResult.STALE
    sequence.start_placement(ENGINE, DETOKENIZER, 2.0)
    sequence.unplaced()
    assert sequence.phase is Phase.WAITING
    assert sequence.start_placement(OTHER, DETOKENIZER, 3.0) == 3


def test_the_cumulative_logprob_carries_over_placements():
    sequence = running()
    sequence.apply_event(
        TextEvent(
            sequence_id="r-0", attempt=1, position=0, token_ids=(5,), text_offset=0, text="a", cumulative_logprob=-1.5
        ),
        ENGINE,
        1.0,
    )
    sequence.lost()
    sequence.start_placement(OTHER, DETOKENIZER, 2.0)
    sequence.apply_event(
        TextEvent(
            sequence_id="r-0", attempt=2, position=1, token_ids=(6,), text_offset=1, text="b", cumulative_logprob=-0.5
        ),
        OTHER,
        3.0,
    )
    assert sequence.cumulative_logprob == -2.0


def lose(sequence: SequenceState, engine: Address) -> None:
    sequence.start_placement(engine, DETOKENIZER, 0.0)
    sequence.accepted(0.0)
    sequence.lost()


@pytest.mark.matrix("R-07")
def test_engines_that_died_one_after_the_other_under_a_sequence_are_enough():
    sequence = SequenceState(sequence_id="r-0")
    for number in range(limits.DEATHS_MAX):
        assert not sequence.retry_limit_reached(set())
        lose(sequence, Address("e1", f"instance_id{number}"))
    assert sequence.retry_limit_reached(set())
    assert sequence.retry_limit_reached({OTHER})


@pytest.mark.matrix("R-07")
def test_engines_that_died_at_other_tokens_did_not_die_of_the_sequence():
    sequence = SequenceState(sequence_id="r-0")
    for number in range(limits.LOSSES_MAX):
        assert not sequence.retry_limit_reached(set())
        lose(sequence, Address("e1", f"instance_id{number}"))
        sequence.token_ids += [7] * limits.DEATH_TOKENS
    assert sequence.retry_limit_reached(set())


@pytest.mark.matrix("R-07")
def test_a_few_tokens_that_were_lost_with_an_engine_do_not_acquit_a_sequence():
    sequence = SequenceState(sequence_id="r-0")
    for number in range(limits.DEATHS_MAX):
        sequence.token_ids += [7] * (limits.DEATH_TOKENS - 1)
        lose(sequence, Address("e1", f"instance_id{number}"))
    assert sequence.retry_limit_reached(set())


def test_an_engine_that_was_only_silent_did_not_die():
    sequence = SequenceState(sequence_id="r-0")
    for _ in range(limits.DEATHS_MAX):
        lose(sequence, ENGINE)
    assert not sequence.retry_limit_reached({ENGINE})
    assert not sequence.retry_limit_reached(set())


def test_a_sequence_that_is_lost_again_and_again_ends():
    sequence = SequenceState(sequence_id="r-0")
    for _ in range(limits.LOSSES_MAX):
        assert not sequence.retry_limit_reached({ENGINE})
        lose(sequence, ENGINE)
    assert sequence.retry_limit_reached({ENGINE})


def of_prompt(start: int, count: int) -> TextEvent:
    entries = tuple(PositionLogprobs(TokenText(start + index, "x", b"x", -1.0)) for index in range(count))
    return TextEvent(
        sequence_id="r-0",
        attempt=1,
        position=0,
        token_ids=(),
        text_offset=0,
        text="",
        prompt_start=start,
        prompt_logprobs=entries,
    )


def test_the_log_probabilities_of_a_prompt_come_in_order_and_before_the_output():
    sequence = running()
    sequence.num_prompt_logprobs = 5
    assert take(sequence, 0, (5,), 0, "a")[0] is ApplyResult.GAP
    assert sequence.apply_event(of_prompt(1, 2), ENGINE, 1.0)[0] is ApplyResult.GAP
    result, delta = sequence.apply_event(of_prompt(0, 3), ENGINE, 1.0)
    assert result is ApplyResult.APPLIED
    assert delta is not None
    assert [one.chosen.token_id for one in delta.prompt_logprobs] == [0, 1, 2]
    assert sequence.apply_event(of_prompt(0, 3), ENGINE, 1.0) == (ApplyResult.STALE, None)
    assert take(sequence, 0, (5,), 0, "a")[0] is ApplyResult.GAP
    _, delta = sequence.apply_event(of_prompt(1, 4), ENGINE, 1.0)
    assert delta is not None
    assert [one.chosen.token_id for one in delta.prompt_logprobs] == [3, 4]
    assert not sequence.needs_prompt_logprobs
    assert take(sequence, 0, (5,), 0, "a")[0] is ApplyResult.APPLIED


def test_an_error_needs_no_log_probabilities_before_it():
    sequence = running()
    sequence.num_prompt_logprobs = 5
    assert take(sequence, 0, (), 0, "", finish="error")[0] is ApplyResult.APPLIED


def test_a_vector_ends_its_sequence_once_and_its_prompt_counts_as_computed():
    sequence = SequenceState(sequence_id="r-0")
    sequence.start_placement(ENGINE, None, 0.0)
    sequence.accepted(0.0)
    vector = TokenEvent(
        sequence_id="r-0",
        attempt=1,
        position=0,
        token_ids=(),
        finish_reason="stop",
        num_cached_tokens=16,
        vector=b"1234",
    )
    assert not sequence.apply_vector(vector, OTHER, 1.0)
    assert sequence.apply_vector(vector, ENGINE, 1.0)
    assert not sequence.apply_vector(vector, ENGINE, 2.0)
    assert sequence.phase is Phase.DONE
    assert sequence.num_prefilled_tokens(20) == 4
