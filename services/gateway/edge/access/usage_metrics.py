"""Exports the counts of usage records as Prometheus metrics, with the receiver (`bus`, `sink`) as a label."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from antiphon.services.gateway.edge.access.usage import UsageLedger


class UsageCollector(Collector):
    """Collects the counts at each scrape."""

    def __init__(self, ledger: UsageLedger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        delivered = CounterMetricFamily(
            "antiphon:usage_records_delivered", "Usage records that a receiver took", labels=("receiver",)
        )
        dropped = CounterMetricFamily(
            "antiphon:usage_records_dropped", "Usage records lost: the receiver was down too long", labels=("receiver",)
        )
        for name, count in self._ledger.counts().items():
            delivered.add_metric([name], count.num_delivered)
            dropped.add_metric([name], count.num_dropped)
        yield delivered
        yield dropped
