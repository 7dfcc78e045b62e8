"""Rates of counters that begin again when a process does, and means and quantiles of histograms. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from antiphon.shared.messages import HistogramCounts


class Seen(NamedTuple):
    """The counters of one process at a time, in monotonic seconds."""

    instance_id: str
    at_s: float
    values: Mapping[str, float]


class Rates:
    """Rates of the counters of some processes, between two calls of `of`."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def of(self, now: Mapping[str, Seen]) -> dict[str, dict[str, float]]:
        """Returns the rates of each process by its id: units a second.

        A process that is seen for the first time has none: when its counters began is not known. A new instance of a
        known id began with 0. A process that has not been heard since the last call has none either.
        """
        rates: dict[str, dict[str, float]] = {}
        for member_id, seen in now.items():
            before = self._seen.get(member_id)
            if before is None or (elapsed_s := seen.at_s - before.at_s) <= 0:
                continue
            began = before.values if before.instance_id == seen.instance_id else {}
            rates[member_id] = {
                name: max(0.0, value - began.get(name, 0.0)) / elapsed_s for name, value in seen.values.items()
            }
        self._seen = {**now}
        return rates


class Distribution:
    """Mean and quantiles of what a histogram has counted since the last call of `add`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._before = HistogramCounts((0,) * (len(bounds) + 1), 0.0)
        self._counts: tuple[int, ...] = self._before.counts
        self._sum = 0.0

    def add(self, total: HistogramCounts) -> None:
        """Notes the counts so far. Counts of buckets, not cumulative; the last is above all bounds."""
        counts = total.counts or (0,) * (len(self._bounds) + 1)
        self._counts = tuple(new - old for new, old in zip(counts, self._before.counts, strict=True))
        self._sum, self._before = total.sum - self._before.sum, HistogramCounts(counts, total.sum)

    def mean(self) -> float | None:
        """Returns None if nothing was counted."""
        count = sum(self._counts)
        return self._sum / count if count else None

    def quantile(self, share: float) -> float | None:
        """Returns the quantile, interpolated within its bucket as by Prometheus; None if nothing was counted.

        Above all bounds it is the last bound.
        """
        rank, below = share * sum(self._counts), 0
        if not rank:
            return None
        for index, upper in enumerate(self._bounds):
            count = self._counts[index]
            if below + count >= rank:
                lower = self._bounds[index - 1] if index else 0.0
                return lower + (upper - lower) * (rank - below) / count
            below += count
        return self._bounds[-1]
