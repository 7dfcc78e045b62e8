"""How long a step will take, from those that have ended. Pure. Used by `flight`.

A step that computes few tokens takes as long as reading the weights, one that computes many takes longer with each of
them; so steps are told apart by their number of tokens, to a factor of two. What else makes a difference, the context
above all, changes slowly from step to step, and the last two of its size tell most; of these the shorter one, for a
step that something held up says nothing of the next.
"""

from services.engine.core.plan import StepPlan

FEW_TOKENS = 32
"""Up to so many tokens more of them hardly take longer."""


class Pace:
    """Seconds of the last steps of each size."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float]] = {}
        """For `FEW_TOKENS` tokens: of the last step of that size and of the one before."""

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended."""
        latest = seconds / _weight(plan)
        before, _ = self._seconds.get(_size(plan), (latest, latest))
        self._seconds[_size(plan)] = latest, before

    def expected(self, plan: StepPlan) -> float:
        """Seconds; 0 where nothing is known."""
        return min(self._seconds.get(_size(plan), (0.0, 0.0))) * _weight(plan)


def _size(plan: StepPlan) -> int:
    return plan.num_tokens.bit_length()


def _weight(plan: StepPlan) -> float:
    return max(1.0, plan.num_tokens / FEW_TOKENS)
