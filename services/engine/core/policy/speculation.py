"""Decides whether draft tokens save time, by comparing the times of steps with and without drafts.

Draft tokens cost time whether they are accepted or not; how much depends on model, machine and batch. Steps that only
decode are therefore timed, and a balance is kept in seconds:

    plus     a small share (`COST_SHARE`) of every step's time, and for each accepted draft token the time of one token
    minus    the time of a step with drafts beyond the usual time of a step without

Sequences may draft only while the balance is positive, so drafts cost at most that share of the time, whatever the
text. The number of sequences that may draft in a step starts at one, doubles after every step that saved time and
returns to one after every step that lost time, so that trials are cheap in large batches too. The caller passes the
times; a time of 0 means that there is no clock, and then drafts are not limited. Used only by `scheduler`.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

COST_SHARE = 0.01
"""Share of the total time that rejected draft tokens may cost."""
PLAIN_TIMES = 9
"""The usual time is the median of this many latest steps without drafts. A single delayed step hardly changes it."""
PLAIN_TIMES_MIN = 3
SAVED_STEPS_MAX = 4
"""Upper limit of the balance, in usual step times. It limits the loss when drafts begin to be rejected."""
OUTLIER = 3.0
"""A step with drafts is charged at most this many times the usual step time."""
WIDTH_MAX = 2**16
REFRESH_STEPS = 32
"""After this many steps with drafts, one step runs without, to keep the usual time up to date."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A step in flight."""

    now_s: float
    num_sequences: int
    num_draft_tokens: int


class SpeculationController:
    """The balance of one engine."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        """Recent times of steps without drafts, in seconds, by size class of the batch (see `_size`)."""
        self._balance_s = 0.0
        self._ended_s = 0.0
        self._width = 1
        self._since_plain = 0
        self._started: dict[int, _Started] = {}

    def num_proposers(self, num_sequences: int, now_s: float) -> int:
        """Returns how many of the running sequences may get draft tokens in the next step."""
        if not now_s:
            return num_sequences
        times = self._plain.get(_size(num_sequences), ())
        if len(times) < PLAIN_TIMES_MIN or self._since_plain >= REFRESH_STEPS or self._balance_s <= 0.0:
            return 0
        return self._width

    def planned(self, step: int, now_s: float, num_sequences: int, num_draft_tokens: int) -> None:
        """Records a planned step in which every sequence decodes one token; the step has `num_draft_tokens` in all."""
        self._started[step] = _Started(now_s, num_sequences, num_draft_tokens)

    def step_ended(self, step: int, now_s: float, num_accepted: int) -> None:
        """Records the end of a step, with `num_accepted` accepted draft tokens.

        The time of a step that was planned ahead counts from the end of the step before it.
        """
        started, before_s = self._started.pop(step, None), self._ended_s
        self._ended_s = now_s
        if started is None or not started.now_s:
            return
        spent_s = now_s - max(started.now_s, before_s)
        self._balance_s += COST_SHARE * spent_s
        times = self._plain.setdefault(_size(started.num_sequences), deque(maxlen=PLAIN_TIMES))
        if not started.num_draft_tokens:
            times.append(spent_s)
            self._since_plain = 0
            self._balance_s = min(self._balance_s, SAVED_STEPS_MAX * spent_s)
        elif len(times) >= PLAIN_TIMES_MIN:
            self._judge(spent_s, median(times), num_accepted / started.num_sequences)

    def _judge(self, spent_s: float, usual_s: float, steps_saved: float) -> None:
        gain_s = usual_s * (1.0 + steps_saved) - min(spent_s, OUTLIER * usual_s)
        self._since_plain += 1
        self._width = min(2 * self._width, WIDTH_MAX) if gain_s > 0.0 else 1
        self._balance_s = min(self._balance_s + gain_s, SAVED_STEPS_MAX * usual_s)


def _size(num_sequences: int) -> int:
    """Returns the size class of a batch. Sizes in one class differ by a factor of at most 2^(1/8), about 9 %."""
    return round(8 * math.log2(max(1, num_sequences)))
