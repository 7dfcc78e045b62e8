"""How long a step will take, from those that have ended. Pure. Used by `flight`.

A step that computes few tokens takes as long as reading the weights, one that computes many takes longer with each of
them; so steps are told apart by their number of tokens, to a factor of two. What else makes a difference, the context
above all, changes slowly from step to step, and the last two of its size tell most; of these the shorter one, for a
step that something held up says nothing of the next.
"""

from typing import NamedTuple

from services.engine.core.plan import ScheduledSequence, StepPlan

FEW_TOKENS = 32
"""Up to so many tokens more of them hardly take longer."""


class Timing(NamedTuple):
    """A step that has ended: its seconds for `FEW_TOKENS` tokens, and what it computed."""

    seconds: float
    scheduled: tuple[ScheduledSequence, ...]


class Pace:
    """Durations of the last steps of each size."""

    def __init__(self) -> None:
        self._timings: dict[int, tuple[Timing, Timing]] = {}
        """Of the last step of that size and of the one before."""

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended."""
        latest = Timing(seconds / _weight(plan), plan.scheduled)
        before, _ = self._timings.get(_size(plan), (latest, latest))
        self._timings[_size(plan)] = latest, before

    def basis(self, plan: StepPlan) -> Timing | None:
        """The step from which the duration of this one is expected; None where no step of its size has ended."""
        timings = self._timings.get(_size(plan))
        return None if timings is None else min(timings, key=_seconds)

    def expected(self, plan: StepPlan) -> float:
        """Seconds; 0 where nothing is known."""
        basis = self.basis(plan)
        return 0.0 if basis is None else basis.seconds * _weight(plan)


def attention_work(scheduled: tuple[ScheduledSequence, ...]) -> int:
    """Pairs of a computed token and a token of its context, at most: attention takes time in proportion to it."""
    return sum(share.num_tokens * (share.start + share.num_tokens) for share in scheduled)


def _seconds(timing: Timing) -> float:
    return timing.seconds


def _size(plan: StepPlan) -> int:
    return plan.num_tokens.bit_length()


def _weight(plan: StepPlan) -> float:
    return max(1.0, plan.num_tokens / FEW_TOKENS)
