"""The owner's rules: what it takes, what it refuses, what it calls a gap, and when it calls for help."""

from services.gateway.owner import Address, Phase, SequenceOwner, Verdict
from shared import limits
from shared.messages import SequenceMark, TextEvent

ENGINE = Address("e1", "aaaa0000")
OTHER = Address("e2", "bbbb0000")
DETOKENIZER = Address("d1", "cccc0000")


def owner() -> SequenceOwner:
    sequence = SequenceOwner("r-0")
    sequence.start_placement(ENGINE, DETOKENIZER, 0.0)
    sequence.accepted(0.0)
    return sequence


def event(position: int, token_ids: tuple[int, ...], offset: int, text: str, epoch: int = 1, finish=None) -> TextEvent:
    return TextEvent("r-0", epoch, position, token_ids, offset, text, finish)


def take(sequence: SequenceOwner, *args, engine: Address = ENGINE, now: float = 1.0, **kwargs):
    return sequence.take(event(*args, **kwargs), engine, now)


def test_events_in_order_append_tokens_and_text():
    sequence = owner()
    assert take(sequence, 0, (5,), 0, "he")[0] is Verdict.TAKEN
    verdict, gain = take(sequence, 1, (6,), 2, "llo", finish="stop")
    assert verdict is Verdict.TAKEN
    assert gain is not None
    assert (gain.text, gain.token_ids, gain.text_offset) == ("llo", (6,), 2)
    assert (sequence.token_ids, sequence.text_length, sequence.phase) == ([5, 6], 5, Phase.DONE)


def test_an_overlapping_replay_adds_only_what_is_new():
    sequence = owner()
    take(sequence, 0, (5, 6), 0, "hello")
    verdict, gain = take(sequence, 0, (5, 6, 7), 0, "hello you")
    assert verdict is Verdict.TAKEN
    assert gain is not None
    assert (gain.text, gain.token_ids) == (" you", (7,))


def test_a_duplicate_is_stale():
    sequence = owner()
    take(sequence, 0, (5,), 0, "a")
    assert take(sequence, 0, (5,), 0, "a") == (Verdict.STALE, None)
    assert sequence.counters["stale"] == 1


def test_a_missing_token_is_a_gap():
    assert take(owner(), 1, (5,), 0, "a")[0] is Verdict.GAP


def test_missing_text_is_a_gap_even_when_tokens_are_complete():
    sequence = owner()
    take(sequence, 0, (5,), 0, "a")
    assert take(sequence, 1, (6,), 2, "c")[0] is Verdict.GAP


def test_an_older_epoch_or_a_foreign_engine_is_stale():
    sequence = owner()
    assert take(sequence, 0, (5,), 0, "a", engine=OTHER)[0] is Verdict.STALE
    sequence.lost()
    sequence.start_placement(OTHER, DETOKENIZER, 2.0)
    assert take(sequence, 0, (5,), 0, "a", epoch=1)[0] is Verdict.STALE
    assert take(sequence, 0, (5,), 0, "a", epoch=2, engine=OTHER)[0] is Verdict.TAKEN


def test_a_contradiction_diverges_and_what_was_shown_stays():
    sequence = owner()
    take(sequence, 0, (5,), 0, "a")
    assert take(sequence, 0, (9, 6), 0, "xb")[0] is Verdict.DIVERGED
    assert sequence.token_ids == [5]


def test_nothing_is_taken_after_the_end():
    sequence = owner()
    take(sequence, 0, (5,), 0, "a", finish="length")
    assert take(sequence, 1, (6,), 1, "b")[0] is Verdict.STALE


def test_a_first_token_may_come_before_the_engines_answer():
    sequence = SequenceOwner("r-0")
    sequence.start_placement(ENGINE, DETOKENIZER, 0.0)
    assert take(sequence, 0, (5,), 0, "a", finish="stop")[0] is Verdict.TAKEN
    sequence.accepted(1.0)
    assert sequence.phase is Phase.DONE


def test_a_high_water_mark_above_what_came_is_a_stall_after_a_while():
    sequence = owner()
    take(sequence, 0, (5,), 0, "a", now=1.0)
    sequence.mark(SequenceMark("r-0", 1, 2), 1.1)
    assert not sequence.stalled(1.0 + limits.STALL_S)
    assert sequence.stalled(1.2 + limits.STALL_S)
    take(sequence, 1, (6,), 1, "b", now=1.6)
    assert not sequence.stalled(5.0)


def test_a_finished_mark_without_the_end_is_a_stall():
    sequence = owner()
    take(sequence, 0, (5,), 0, "a", now=1.0)
    sequence.mark(SequenceMark("r-0", 1, 1, finished=True), 1.1)
    assert sequence.stalled(1.2 + limits.STALL_S)


def test_a_sequence_that_its_engine_no_longer_lists_is_forgotten():
    sequence = owner()
    assert not sequence.forgotten(2 * limits.LEASE_S)
    assert sequence.forgotten(2 * limits.LEASE_S + 0.1)
    sequence.touch(2 * limits.LEASE_S)
    assert not sequence.forgotten(2 * limits.LEASE_S + 0.1)


def test_the_cumulative_logprob_carries_over_placements():
    sequence = owner()
    sequence.take(TextEvent("r-0", 1, 0, (5,), 0, "a", cumulative_logprob=-1.5), ENGINE, 1.0)
    sequence.lost()
    sequence.start_placement(OTHER, DETOKENIZER, 2.0)
    sequence.take(TextEvent("r-0", 2, 1, (6,), 1, "b", cumulative_logprob=-0.5), OTHER, 3.0)
    assert sequence.cumulative_logprob == -2.0


def lose(sequence: SequenceOwner, engine: Address) -> None:
    sequence.start_placement(engine, DETOKENIZER, 0.0)
    sequence.accepted(0.0)
    sequence.lost()


def test_engines_that_died_one_after_the_other_under_a_sequence_are_enough():
    sequence = SequenceOwner("r-0")
    for number in range(limits.DEATHS_MAX):
        assert not sequence.hopeless(set())
        lose(sequence, Address("e1", f"boot{number}"))
    assert sequence.hopeless(set())
    assert sequence.hopeless({OTHER})


def test_an_engine_that_was_only_silent_did_not_die():
    sequence = SequenceOwner("r-0")
    for _ in range(limits.DEATHS_MAX):
        lose(sequence, ENGINE)
    assert not sequence.hopeless({ENGINE})
    assert not sequence.hopeless(set())


def test_a_sequence_that_is_lost_again_and_again_ends():
    sequence = SequenceOwner("r-0")
    for _ in range(limits.LOSSES_MAX):
        assert not sequence.hopeless({ENGINE})
        lose(sequence, ENGINE)
    assert sequence.hopeless({ENGINE})
