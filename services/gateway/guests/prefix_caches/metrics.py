"""Exports what a gateway knows of prefix caches as metrics."""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.services.gateway.guests.prefix_caches.follower import Follower
from antiphon.services.gateway.path.sequence_state import Address


class PrefixCacheCollector(Collector):
    """Collects at each scrape. `followers`: the followed engines."""

    def __init__(self, followers: Mapping[Address, Follower]) -> None:
        self._followers = followers

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        labels = ("engine",)
        blocks = GaugeMetricFamily(
            "antiphon:prefix_cache_known_blocks", "Blocks that this gateway knows an engine to have", labels=labels
        )
        positions = GaugeMetricFamily(
            "antiphon:prefix_cache_position", "Events of an engine's prefix cache that were applied", labels=labels
        )
        gaps = CounterMetricFamily("antiphon:prefix_cache_gaps", "Times that events were missing", labels=labels)
        snapshots = CounterMetricFamily("antiphon:prefix_cache_snapshots", "Snapshots that were taken", labels=labels)
        for engine, follower in self._followers.items():
            if follower.is_synced:
                blocks.add_metric([engine.id], len(follower.known.present))
                positions.add_metric([engine.id], follower.position)
            gaps.add_metric([engine.id], follower.num_gaps)
            snapshots.add_metric([engine.id], follower.num_snapshots)
        yield from (blocks, positions, gaps, snapshots)
