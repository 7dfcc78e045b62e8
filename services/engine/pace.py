"""How long a step will take, from those that have ended. Pure. Used by `flight`.

A step that computes few tokens takes as long as reading the weights, one that computes many takes longer with each of
them; so steps are told apart by their number of tokens, to a factor of two. What else makes a difference, the context
above all, changes slowly from step to step, and the last one of its size tells most.
"""

from services.engine.core.plan import StepPlan

FEW_TOKENS = 32
"""Up to so many tokens more of them hardly take longer."""


class Pace:
    """Seconds of the last step of each size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """For `FEW_TOKENS` tokens of a step of that size."""

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended."""
        self._seconds[_size(plan)] = seconds / _weight(plan)

    def expected(self, plan: StepPlan) -> float:
        """Seconds; 0 where nothing is known."""
        return self._seconds.get(_size(plan), 0.0) * _weight(plan)


def _size(plan: StepPlan) -> int:
    return plan.num_tokens.bit_length()


def _weight(plan: StepPlan) -> float:
    return max(1.0, plan.num_tokens / FEW_TOKENS)
