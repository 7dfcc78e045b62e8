"""Counters of what comparisons of engines have found."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Counters since the start of the gateway."""

    requests: int = 0
    unavailable: int = 0
    """Requests of the sampled share that ran without, because no two engines can be compared or for their kind."""
    dropped: int = 0
    """Sequences that went on alone, because no second engine was left."""
    compared_tokens: int = 0
    differences: int = 0
    undecided: int = 0
    quarantined: int = 0
    votes: Counter[str] = field(default_factory=Counter[str])

    def count_vote(self, kind: str) -> None:
        """Counts a question: to a third engine, to both again (`repetition`), or a `self_test`."""
        self.votes[kind] += 1
