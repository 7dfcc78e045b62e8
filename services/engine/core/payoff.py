"""Whether guessing pays: the time of steps with guesses against that of steps without. Pure; times are the caller's.

A guess costs time whether it is right or not, how much depends on model, machine and batch. So steps that only decode
are timed, and an account is kept in seconds:

    in     a small share of every step's time, and for each right guess the time of one token
    out    what a step with guesses took beyond the usual time of one without

Only while there is something in it may anybody guess: guessing costs at most that share, whatever the text. How many
sequences may guess in a step begins with one, doubles with every step that gained and begins anew with every step that
lost, so that trying is cheap in large batches too. A time of 0 means that there is no clock: then nothing is held back.
Used by `scheduler` alone.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

COST_SHARE = 0.01
"""Part of the time that wrong guesses may take."""
PLAIN_TIMES = 9
"""Steps whose median is the usual time: one that something else held up does not count."""
PLAIN_TIMES_MIN = 3
SAVED_STEPS_MAX = 4
"""What luck may save up, in steps, to be lost when the text changes."""
OUTLIER = 3.0
"""A step that took this many times the usual is not held against its guesses beyond that."""
WIDTH_MAX = 2**16
REFRESH_STEPS = 32
"""Every so many steps with guesses there is one without, so that the usual time stays true."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A step in flight."""

    now_s: float
    num_sequences: int
    num_guesses: int


class Payoff:
    """The account of one engine."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        """Recent times of steps without guesses, for each size of batch."""
        self._balance_s = 0.0
        self._landed_s = 0.0
        self._width = 1
        self._since_plain = 0
        self._started: dict[int, _Started] = {}

    def num_guessers(self, num_sequences: int, now_s: float) -> int:
        """How many of the running sequences may guess in the next step."""
        if not now_s:
            return num_sequences
        times = self._plain.get(_size(num_sequences), ())
        if len(times) < PLAIN_TIMES_MIN or self._since_plain >= REFRESH_STEPS or self._balance_s <= 0.0:
            return 0
        return self._width

    def planned(self, step: int, now_s: float, num_sequences: int, num_guesses: int) -> None:
        """A step was planned in which all sequences decode one token and check `num_guesses` besides."""
        self._started[step] = _Started(now_s, num_sequences, num_guesses)

    def landed(self, step: int, now_s: float, num_right: int) -> None:
        """A step's result is in. Of a step planned ahead the time from the result before it counts."""
        started, before_s = self._started.pop(step, None), self._landed_s
        self._landed_s = now_s
        if started is None or not started.now_s:
            return
        spent_s = now_s - max(started.now_s, before_s)
        self._balance_s += COST_SHARE * spent_s
        times = self._plain.setdefault(_size(started.num_sequences), deque(maxlen=PLAIN_TIMES))
        if not started.num_guesses:
            times.append(spent_s)
            self._since_plain = 0
            self._balance_s = min(self._balance_s, SAVED_STEPS_MAX * spent_s)
        elif len(times) >= PLAIN_TIMES_MIN:
            self._judge(spent_s, median(times), num_right / started.num_sequences)

    def _judge(self, spent_s: float, usual_s: float, steps_saved: float) -> None:
        gain_s = usual_s * (1.0 + steps_saved) - min(spent_s, OUTLIER * usual_s)
        self._since_plain += 1
        self._width = min(2 * self._width, WIDTH_MAX) if gain_s > 0.0 else 1
        self._balance_s = min(self._balance_s + gain_s, SAVED_STEPS_MAX * usual_s)


def _size(num_sequences: int) -> int:
    """Batches within an eighth of each other count as one size."""
    return round(8 * math.log2(max(1, num_sequences)))
