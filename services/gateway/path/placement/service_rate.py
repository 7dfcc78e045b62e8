"""Measures the rate of ended sequences, from which `Retry-After` of refused clients is computed. Pure."""

import math

WINDOW_S = 10.0
"""Time over which the rate is averaged: an end counts for 1/e after this time."""
WAIT_S = (1.0, 60.0)
"""Minimum and maximum of `Retry-After`, seconds."""
KNOWN_S = 600.0
"""Time after the last end for which the rate is valid. Later, and before the first end, `Retry-After` is its
minimum."""


class ServiceRate:
    """The rate of one gateway. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._ends = 0.0
        """Number of ended sequences, weighted by age."""
        self._first: float | None = None
        self._last = self._decayed_at = 0.0

    def ended(self, now: float) -> None:
        """Records that a sequence has ended."""
        self._decay(now)
        self._ends += 1.0
        self._last = now
        if self._first is None:
            self._first = now

    def per_second(self, now: float) -> float:
        """Returns the rate; 0 before the first sequence has ended."""
        if self._first is None:
            return 0.0
        self._decay(now)
        # Shortly after the first end the window is not full yet.
        seen_s = WINDOW_S * -math.expm1(-max(now - self._first, 1.0) / WINDOW_S)
        return self._ends / seen_s

    def wait_s(self, num_waiting: int, now: float) -> float:
        """Returns the time until `num_waiting` sequences and one more have ended, within WAIT_S."""
        least, most = WAIT_S
        if self._first is None or now - self._last > KNOWN_S:
            return least
        return min(most, max(least, (num_waiting + 1) / self.per_second(now)))

    def _decay(self, now: float) -> None:
        self._ends *= math.exp(-(now - self._decayed_at) / WINDOW_S)
        self._decayed_at = now
