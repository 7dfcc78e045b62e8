"""P-02: whatever the bus drops, repeats or reorders, a sequence's tokens are taken in order, each exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.shared.limits import HELD_EVENTS_MAX
from antiphon.shared.messages import TokenEvent
from antiphon.shared.text.detokenization.sequencer import Sequencer

TRUTH = tuple(range(100, 140))


def event(start: int, end: int) -> TokenEvent:
    finish = "length" if end == len(TRUTH) else None
    return TokenEvent(sequence_id="r", attempt=1, position=start, token_ids=TRUTH[start:end], finish_reason=finish)


ranges = st.tuples(st.integers(0, len(TRUTH)), st.integers(0, 6)).map(lambda r: (r[0], min(len(TRUTH), sum(r))))


def taken(sequencer: Sequencer, pushed: TokenEvent) -> tuple[int, ...]:
    return tuple(i for fresh, skip in sequencer.push(pushed) for i in fresh.token_ids[skip:])


@pytest.mark.matrix("P-02")
@given(start=st.integers(0, 5), frames=st.lists(ranges, max_size=80))
@settings(max_examples=200)
def test_what_is_taken_is_a_prefix_of_the_truth_and_a_replay_completes_it(
    start: int, frames: list[tuple[int, int]]
) -> None:
    sequencer = Sequencer(TRUTH[:start])
    output = TRUTH[:start]
    for frame in frames:
        output += taken(sequencer, event(*frame))
        assert output == TRUTH[: sequencer.position] == tuple(sequencer.token_ids)
    output += taken(sequencer, event(min(sequencer.position, len(TRUTH) - 1), len(TRUTH)))
    assert output == TRUTH
    assert sequencer.divergences == 0
    assert not sequencer.has_gap


@pytest.mark.matrix("P-02")
@given(position=st.integers(1, 10**9), count=st.integers(1, 3 * HELD_EVENTS_MAX))
@settings(max_examples=50)
def test_memory_behind_a_gap_is_bounded(position: int, count: int) -> None:
    sequencer = Sequencer()
    for i in range(count):
        assert sequencer.push(TokenEvent(sequence_id="r", attempt=1, position=position + i, token_ids=(1,))) == []
    assert sequencer.has_gap
    assert sequencer.dropped == max(0, count - HELD_EVENTS_MAX)
