"""Exports the lockstep counters as metrics."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.services.gateway.guests.lockstep.counts import Counts
from antiphon.services.gateway.guests.lockstep.trust import Trust
from antiphon.shared.messages import Heartbeat

_COUNTERS = (
    ("requests", "Requests that ran on two engines at once"),
    ("unavailable", "Requests of the sampled share that ran on one engine, as no two could be compared"),
    ("dropped", "Sequences that went on alone, as no second engine was left"),
    ("compared_tokens", "Tokens on which two engines agreed"),
    ("differences", "Tokens on which two engines differed"),
    ("undecided", "Differences after which it was not known which engine is right"),
    ("quarantined", "Engines that got no more work, as they were found wrong"),
)


class LockstepCollector(Collector):
    """Collects the counters at each scrape. `engines` returns the last heartbeat of each running engine."""

    def __init__(self, counts: Counts, trust: Trust, engines: Callable[[], Sequence[Heartbeat]]) -> None:
        self._counts, self._trust, self._engines = counts, trust, engines

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        counts, engines = self._counts, self._engines()
        for name, text in _COUNTERS:
            yield CounterMetricFamily(f"antiphon:lockstep_{name}", text, getattr(counts, name))
        votes = CounterMetricFamily("antiphon:lockstep_votes", "Questions to decide a difference", labels=("kind",))
        for kind in ("third", "repetition", "self_test"):
            votes.add_metric([kind], counts.votes[kind])
        yield votes
        found, quarantined = self._trust.opinions(engines), self._trust.quarantined
        for name, text, those in (
            (
                "outvoted",
                "1 while the engine gets no work, as most of its peers have another golden value",
                found.outvoted,
            ),
            ("doubted", "1 while a peer has another golden value, and no majority tells which is right", found.doubted),
            ("quarantined", "1 while the engine lives and gets no work, as it lost a comparison", quarantined),
        ):
            gauge = GaugeMetricFamily(f"antiphon:engine_{name}", text, labels=("engine",))
            for beat in engines:
                gauge.add_metric([beat.id], float((beat.id, beat.instance_id) in those))
            yield gauge
