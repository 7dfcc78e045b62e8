"""Histograms that engines count and gateways export: the shared bounds, and the counting."""

from bisect import bisect_left
from collections.abc import Sequence

from antiphon.shared.messages import HistogramCounts

REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Upper bounds for times of requests, as in vLLM."""
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds for tokens of a step, as in vLLM."""

PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20, 50, 100)
"""Upper bounds for how often a request was preempted."""


class Histogram:
    """Counts values by upper bounds; the last count is that of the values above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> HistogramCounts:
        """Returns the counts so far."""
        return HistogramCounts(tuple(self._counts), self._sum)
