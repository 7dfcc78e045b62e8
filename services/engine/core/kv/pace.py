"""Whether reading KV takes less time than computing it, by what both have taken lately. Pure.

A disk may be slower than a GPU, and is slower while others use it. Until both were measured, reading counts as faster.
"""

from collections import deque

SHARE = 0.2
"""Weight of the latest measurement in the average."""
STEP_TOKENS_MIN = 64
"""Tokens of a step from which on its time is that of computing tokens. A smaller step mostly reads weights."""
FORGOTTEN = 0.98
"""What is left of the measured time of reading after each prompt that was not read for it, so that reading is tried
again after some dozens of prompts."""


class Pace:
    """Seconds for each token, computed and read. Times are those of one clock; without one all are 0."""

    def __init__(self) -> None:
        self.compute_s = self.read_s = 0.0
        """Averages; 0: unknown."""
        self._planned: deque[float] = deque()
        self._applied_s = 0.0

    def planned(self, now_s: float) -> None:
        """A step has been planned."""
        self._planned.append(now_s)

    def applied(self, num_tokens: int, now_s: float) -> None:
        """The oldest planned step has ended. It began when it was planned, or when the step before it ended."""
        took_s = now_s - max(self._planned.popleft(), self._applied_s)
        self._applied_s = now_s
        if num_tokens >= STEP_TOKENS_MIN and took_s > 0.0:
            self.compute_s = _mean(self.compute_s, took_s / num_tokens)

    def has_read(self, num_tokens: int, took_s: float) -> None:
        """Tokens were read, also if some of them could not be."""
        if took_s > 0.0 and num_tokens:
            self.read_s = _mean(self.read_s, took_s / num_tokens)

    def reading_is_faster(self) -> bool:
        """Whether to read a prompt now."""
        if not self.compute_s or self.read_s <= self.compute_s:
            return True
        self.read_s *= FORGOTTEN
        return False


def _mean(before: float, latest: float) -> float:
    return latest if not before else before + SHARE * (latest - before)
