"""The turns of a step's masks, with grammars of known cost and clocks that are set by hand."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.services.engine.parallel.shard import Shard
from antiphon.services.engine.sampling.grammar import GrammarProcessor
from antiphon.services.engine.sampling.mask_time import MaskAccount
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.services.engine.worker.batch.mask_turns import TOO_SLOW, MaskTurns, SequenceMasks
from antiphon.shared import limits

FAST_S, SLOW_S = 0.00005, 0.02


class Time:
    """The processor time of this thread, which is also the time that passes."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def now(self) -> float:
        return self.now_s


class Known(GrammarProcessor):
    """A grammar each of whose masks, and each of whose tokens passed on, takes `cost_s`."""

    def __init__(self, time: Time, cost_s: float, num_pending: int = 0, error: str = "") -> None:
        self.account = MaskAccount()
        self.num_masks = 0
        self._time, self._cost_s, self._left, self._failure = time, cost_s, num_pending, error

    @property
    def num_pending(self) -> int:
        return self._left

    def catch_up(self, has_time: Callable[[], bool]) -> bool:
        while self._left:
            self._time.now_s += self._cost_s
            self._left -= 1
            if self._left and not has_time():
                return False
        return True

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        self._time.now_s += self._cost_s
        self.num_masks += 1
        adjustment.mask, adjustment.error = np.array([1], dtype=np.uint32), self._failure


def step(turns: MaskTurns, processors: list[Known], num_drafts: int = 0) -> dict[int, Adjustment]:
    """The adjustments of a step, each sequence with its masks one after another."""
    sequences, adjustments = list[SequenceMasks](), dict[int, Adjustment]()
    for one in processors:
        first = len(adjustments)
        sequences.append(SequenceMasks(one, [(first + n, n, [7] * n) for n in range(num_drafts + 1)]))
        adjustments |= {first + n: Adjustment() for n in range(num_drafts + 1)}
    turns.compute(sequences, adjustments)
    return adjustments


def known_fast(time: Time, turns: MaskTurns) -> Known:
    """A fast grammar that has been measured. It may wait once for a slow one that has not."""
    fast = Known(time, FAST_S)
    for _ in range(20):
        step(turns, [fast])
    return fast


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def turns(time: Time) -> MaskTurns:
    return MaskTurns(clock=time.now, now=time.now)


def test_masks_beyond_the_time_wait_and_each_comes_in_its_turn(time: Time, turns: MaskTurns) -> None:
    slow = [Known(time, limits.MASK_COST_S) for _ in range(6)]
    waits = [[one.waits for one in step(turns, slow).values()] for _ in range(12)]
    # Two masks exceed the time of 5 ms.
    assert all(sum(not each for each in found) == 2 for found in waits)
    assert {one.num_masks for one in slow} == {4}
    assert not any(one.account.is_exceeded for one in slow)


def test_a_step_takes_no_longer_than_its_time_and_one_mask(time: Time, turns: MaskTurns) -> None:
    slow = [Known(time, SLOW_S) for _ in range(128)]
    for _ in range(30):
        began_s = time.now_s
        step(turns, slow)
        assert time.now_s - began_s <= limits.MASKS_STEP_LEAST_S + SLOW_S


@pytest.mark.parametrize(
    ("rest_s", "time_s"),
    [(0.0, limits.MASKS_STEP_LEAST_S), (0.012, 0.012), (9.0, limits.MASKS_STEP_MOST_S)],
)
def test_masks_take_as_long_as_the_rest_of_a_step(time: Time, turns: MaskTurns, rest_s: float, time_s: float) -> None:
    time.now_s += rest_s
    began_s = time.now_s
    step(turns, [Known(time, 0.001) for _ in range(100)])
    assert time.now_s - began_s == pytest.approx(time_s, abs=0.001)


def test_a_grammar_that_is_too_slow_ends_its_sequence_alone(time: Time, turns: MaskTurns) -> None:
    slow, fast = Known(time, SLOW_S), known_fast(time, turns)
    count = 0
    while not (found := step(turns, [slow, fast]))[0].error:
        assert not found[1].waits or not count
        count += 1
    assert 3 <= count <= 20
    assert found[0] == Adjustment(error=TOO_SLOW)
    assert not found[1].error
    assert not fast.account.excess_s


def test_draft_tokens_without_a_mask_are_cut_off(time: Time, turns: MaskTurns) -> None:
    found = step(turns, [Known(time, 0.004)], num_drafts=3)
    assert [found[place].waits for place in range(4)] == [False, False, True, True]


def test_tokens_of_a_sequence_that_moved_here_are_passed_on_in_several_steps(time: Time, turns: MaskTurns) -> None:
    moved, fast = Known(time, 0.004, num_pending=20), known_fast(time, turns)
    count = 0
    while (found := step(turns, [moved, fast]))[0].waits:
        assert not found[1].waits or not count
        count += 1
    assert 4 <= count <= 20
    assert not found[0].error


def test_without_a_limit_all_masks_are_computed(time: Time) -> None:
    turns = MaskTurns(is_limited=False, clock=time.now, now=time.now)
    found = step(turns, [Known(time, SLOW_S) for _ in range(20)], num_drafts=1)
    assert not any(one.waits for one in found.values())


class Other(Communicator):
    """The other one of two ranks: what it has of each mask is given."""

    shard = Shard(0, 2)

    def __init__(self, states: list[int]) -> None:
        self.states = states

    def smallest_of_each(self, numbers: NDArray[np.int8]) -> NDArray[np.int8]:
        return np.minimum(numbers, np.array(self.states, dtype=np.int8))


def test_what_one_rank_lacks_all_ranks_lack(time: Time) -> None:
    turns = MaskTurns(Other([2, 1, 0, 2]), clock=time.now, now=time.now)
    ours = [Known(time, FAST_S), Known(time, FAST_S), Known(time, FAST_S), Known(time, FAST_S, error="wrong")]
    found = step(turns, ours)
    assert found[0].mask is not None
    assert found[1] == Adjustment(waits=True)
    assert found[2] == Adjustment(error=TOO_SLOW)
    assert found[3] == Adjustment(error="wrong")
    assert [one.account.num_waited for one in ours] == [0, 1, 0, 0]
