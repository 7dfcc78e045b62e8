"""Times of recent steps in which every sequence decodes one token, and how they grow with the number of sequences.

Steps are told when they are planned and when they end. A time of 0 means that there is no clock, and then nothing is
known. Used by `speculation` and `decode_turns`.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import mean, median

PLAIN_TIMES = 9
"""The usual time is the median of this many latest steps without drafts. A single delayed step hardly changes it."""
PLAIN_TIMES_MIN = 3
LINE_RANGE_MIN = 1.5
"""Sizes that differ less than by this factor say too little about the time of one more sequence."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that has ended. `spent_s`: its time, in seconds, without its waiting for the step before it."""

    spent_s: float
    num_sequences: int
    num_draft_tokens: int
    decodes: bool = True
    """Whether every sequence decoded one token."""


class StepTimes:
    """The times of one engine's decoding steps, by size class (see `_size`)."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._started: dict[int, tuple[float, int, int, bool]] = {}
        """Steps in flight: when they were planned, their sequences, their draft tokens, `TimedStep.decodes`."""
        self._plain: dict[int, deque[tuple[float, int]]] = {}
        """Times of recent steps without drafts, in seconds, with the number of sequences."""
        self._usual: dict[int, tuple[float, float]] = {}
        """The mean number of sequences and the usual time of the classes with enough steps."""

    def planned(
        self, step: int, now_s: float, num_sequences: int, num_draft_tokens: int, *, decodes: bool = True
    ) -> None:
        """Records a planned step, which has `num_draft_tokens` in all. `decodes`: see `TimedStep`."""
        self._started[step] = now_s, num_sequences, num_draft_tokens, decodes

    def ended(self, step: int, now_s: float, draft_s: float = 0.0) -> TimedStep | None:
        """Records the end of a step. Returns its time if it was `planned`, and there is a clock.

        The time of a step that was planned ahead counts from the end of the step before it. `draft_s`: seconds in which
        it predicted draft tokens, which do not count.
        """
        started, before_s = self._started.pop(step, None), self._ended_s
        self._ended_s = now_s
        if started is None or not started[0]:
            return None
        planned_s, num_sequences, num_draft_tokens, decodes = started
        spent_s = max(0.0, now_s - max(planned_s, before_s) - draft_s)
        ended = TimedStep(spent_s, num_sequences, num_draft_tokens, decodes)
        if decodes and not num_draft_tokens and spent_s:
            self._note(ended)
        return ended

    def usual_s(self, num_sequences: int) -> float | None:
        """Returns the usual time of a step with about so many sequences, in seconds, above 0.

        None if too few were timed. A step that took less than the clock can tell is not counted.
        """
        known = self._usual.get(_size(num_sequences))
        return known[1] if known is not None else None

    def fixed_rows(self) -> float | None:
        """Returns how many sequences cost as much as the part of a step's time that does not depend on their number.

        None if that is not known. Infinite if further sequences cost nothing.
        """
        sizes = [size for size, _ in self._usual.values()]
        if not sizes or max(sizes) < LINE_RANGE_MIN * min(sizes):
            return None
        size_mean, time_mean = mean(sizes), mean(usual for _, usual in self._usual.values())
        spread = sum((size - size_mean) ** 2 for size in sizes)
        row_s = sum((size - size_mean) * (usual - time_mean) for size, usual in self._usual.values()) / spread
        return max(0.0, time_mean / row_s - size_mean) if row_s > 0.0 else math.inf

    def _note(self, ended: TimedStep) -> None:
        size = _size(ended.num_sequences)
        times = self._plain.setdefault(size, deque(maxlen=PLAIN_TIMES))
        times.append((ended.spent_s, ended.num_sequences))
        if len(times) >= PLAIN_TIMES_MIN:
            self._usual[size] = mean(count for _, count in times), median(spent_s for spent_s, _ in times)


def _size(num_sequences: int) -> int:
    """Returns the size class of a batch. Sizes in one class differ by a factor of at most 2^(1/8), about 9 %."""
    return round(8 * math.log2(max(1, num_sequences)))
