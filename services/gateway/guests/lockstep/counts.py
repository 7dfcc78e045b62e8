"""Counters of lockstep comparisons and their results."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counters since the start of the gateway."""

    requests: int = 0
    unavailable: int = 0
    """Sampled requests that ran without lockstep, because no two engines could be compared, or because the kind of the
    request does not allow lockstep.
    """
    dropped: int = 0
    """Sequences that continued without a copy, because no second engine was left."""
    compared_tokens: int = 0
    differences: int = 0
    undecided: int = 0
    quarantined: int = 0
    votes: Counter[str] = field(default_factory=Counter[str])

    def count_vote(self, kind: str) -> None:
        """Counts an attempt to decide a difference: by a third engine, by `repetition` on both, or by `self_test`."""
        self.votes[kind] += 1
