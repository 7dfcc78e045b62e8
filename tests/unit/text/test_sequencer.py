import pytest

from antiphon.shared.messages import FinishReason, TokenEvent
from antiphon.shared.text.detokenization.sequencer import Fresh, Sequencer


def event(position: int, ids: tuple[int, ...], finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(sequence_id="r", attempt=1, position=position, token_ids=ids, finish_reason=finish)


def test_tokens_in_order_are_taken_as_they_come() -> None:
    sequencer = Sequencer((7,))
    first, second = event(1, (8, 9)), event(3, (10,))
    assert sequencer.push(first) == [Fresh(first, 0)]
    assert sequencer.push(second) == [Fresh(second, 0)]
    assert list(sequencer.token_ids) == [7, 8, 9, 10]


def test_a_duplicate_is_dropped_and_counted() -> None:
    sequencer = Sequencer()
    sequencer.push(event(0, (1, 2)))
    assert sequencer.push(event(0, (1, 2))) == []
    assert (sequencer.duplicates, sequencer.divergences) == (1, 0)


def test_an_overlap_gives_only_its_new_tokens() -> None:
    sequencer = Sequencer((1, 2))
    overlap = event(1, (2, 3, 4))
    assert sequencer.push(overlap) == [Fresh(overlap, 1)]
    assert list(sequencer.token_ids) == [1, 2, 3, 4]


def test_what_was_taken_stays_the_truth_against_a_contradiction() -> None:
    sequencer = Sequencer((1, 2))
    sequencer.push(event(0, (1, 99, 3)))
    assert list(sequencer.token_ids) == [1, 2, 3]
    assert sequencer.divergences == 1


def test_events_behind_a_gap_wait_for_what_is_missing() -> None:
    sequencer = Sequencer()
    late, last, missing = event(1, (2,)), event(2, (3,), "stop"), event(0, (1,))
    assert sequencer.push(last) == []
    assert sequencer.push(late) == []
    assert sequencer.has_gap
    assert sequencer.push(missing) == [Fresh(missing, 0), Fresh(late, 0), Fresh(last, 0)]
    assert not sequencer.has_gap


def test_of_two_events_at_one_place_behind_a_gap_the_one_that_tells_more_is_kept() -> None:
    sequencer = Sequencer()
    sequencer.push(event(1, (2,)))
    longer = event(1, (2, 3), "length")
    sequencer.push(longer)
    sequencer.push(event(1, (2,)))
    missing = event(0, (1,))
    assert sequencer.push(missing) == [Fresh(missing, 0), Fresh(longer, 0)]


def test_the_end_is_taken_even_when_its_tokens_are_known() -> None:
    sequencer = Sequencer((1, 2))
    end = event(1, (2,), "stop")
    assert sequencer.push(end) == [Fresh(end, 1)]


@pytest.mark.parametrize(("finish", "taken"), [("stop", False), ("length", False), ("error", True), ("abort", True)])
def test_an_end_that_lies_behind_counts_only_when_the_engine_gave_up(finish: FinishReason, taken: bool) -> None:
    assert bool(Sequencer((1, 2, 3)).push(event(0, (1,), finish))) is taken


def test_a_position_below_zero_is_dropped() -> None:
    sequencer = Sequencer()
    assert sequencer.push(event(-3, (1, 2))) == []
    assert sequencer.dropped == 1


def test_a_token_id_that_is_no_u32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        Sequencer().push(event(0, (-1,)))
