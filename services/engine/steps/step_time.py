"""Estimates the duration of a step from the durations of earlier steps. No I/O and no clock. Used by `in_flight`.

The time of a step with few tokens is the time to read the weights; with many tokens it grows with their number. Steps
are therefore put into size classes by number of tokens, each spanning a factor of two. Other influences, above all the
context length, change slowly, so the estimate uses the last two steps of the class. It takes the faster of the two,
because an accidental delay of one step does not predict the next one.
"""

from typing import NamedTuple

from antiphon.services.engine.core.plan import ScheduledSequence, StepPlan

FEW_TOKENS = 32
"""Up to this number of tokens a step's time hardly depends on the number."""


class Timing(NamedTuple):
    """A step that has ended: what it computed, and its seconds, scaled down to `FEW_TOKENS` tokens if it had more."""

    seconds: float
    scheduled: tuple[ScheduledSequence, ...]


class StepTimeEstimator:
    """Durations of the last two steps of each size class."""

    def __init__(self) -> None:
        self._latest: dict[int, Timing] = {}
        """Maps a size class to its last step."""
        self._faster: dict[int, Timing] = {}
        """Maps a size class to the faster of its last two steps."""

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Records the duration of a step that has ended."""
        latest, size = Timing(seconds / _weight(plan), plan.scheduled), _size(plan)
        before = self._latest.get(size, latest)
        self._latest[size] = latest
        self._faster[size] = latest if latest.seconds <= before.seconds else before

    def basis(self, plan: StepPlan) -> Timing | None:
        """Returns the earlier step from which the plan's duration is estimated; None if its size class has none."""
        return self._faster.get(_size(plan))

    def expected(self, plan: StepPlan) -> float:
        """Returns the plan's expected duration in seconds; 0 if unknown."""
        basis = self.basis(plan)
        return 0.0 if basis is None else basis.seconds * _weight(plan)


def attention_work(scheduled: tuple[ScheduledSequence, ...]) -> int:
    """Returns an upper bound of the (computed token, context token) pairs. Attention time is proportional to it."""
    return sum(share.num_tokens * (share.start + share.num_tokens) for share in scheduled)


def _size(plan: StepPlan) -> int:
    return plan.num_tokens.bit_length()


def _weight(plan: StepPlan) -> float:
    return max(1.0, plan.num_tokens / FEW_TOKENS)
