"""Exports the heartbeats of all services as metrics: whether each process is alive, its messages, its streams."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.shared.messages import GatewayStatus, Heartbeat, PoolStatus, StreamStatus, VisionStatus

_LABELS = ("service", "id")


class MemberCollector(Collector):
    """Collects the metrics of the members with a valid lease at each scrape.

    `members` returns the last heartbeats with the seconds since they arrived.
    """

    def __init__(self, members: Callable[[], Sequence[tuple[Heartbeat, float]]]) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        members = self._members()
        age = GaugeMetricFamily("antiphon:heartbeat_age_seconds", "Time since the last heartbeat", labels=_LABELS)
        ready = GaugeMetricFamily("antiphon:service_ready", "1 if the process is ready to work", labels=_LABELS)
        received = CounterMetricFamily("antiphon:bus_messages_received", "Messages from the bus", labels=_LABELS)
        sent = CounterMetricFamily("antiphon:bus_messages_sent", "Messages to the bus", labels=_LABELS)
        subscriptions = GaugeMetricFamily("antiphon:bus_subscriptions", "Subscriptions on the bus", labels=_LABELS)
        for beat, age_s in members:
            labels = [beat.service, beat.id]
            age.add_metric(labels, age_s)
            ready.add_metric(labels, float(beat.state == "ready"))
            received.add_metric(labels, beat.messages_received)
            sent.add_metric(labels, beat.messages_sent)
            subscriptions.add_metric(labels, beat.num_subscriptions)
        yield from (age, ready, received, sent, subscriptions)
        yield from _loads([beat for beat, _ in members])


def _loads(beats: Sequence[Heartbeat]) -> Iterator[Metric]:
    requests = GaugeMetricFamily("antiphon:gateway_requests", "Requests in a gateway", labels=("id",))
    waiting = GaugeMetricFamily("antiphon:gateway_waiting_sequences", "Wait in a gateway for an engine", labels=("id",))
    idle = GaugeMetricFamily("antiphon:gateway_idle_waiting_sequences", "The same in the idle lane", labels=("id",))
    streams = GaugeMetricFamily("antiphon:detokenizer_streams", "Open streams", labels=("model_name", "id"))
    resends = CounterMetricFamily(
        "antiphon:detokenizer_resends", "Gaps of tokens repaired", labels=("model_name", "id")
    )
    tokenized = CounterMetricFamily("antiphon:tokenizer_tokens", "Tokens of texts", labels=("model_name", "id"))
    vision = _VisionMetrics()
    for beat in beats:
        match beat.status:
            case GatewayStatus() as status:
                requests.add_metric([beat.id], status.num_requests)
                waiting.add_metric([beat.id], status.num_waiting - status.num_idle_waiting)
                idle.add_metric([beat.id], status.num_idle_waiting)
            case StreamStatus() as status:
                streams.add_metric([status.model, beat.id], status.num_streams)
                resends.add_metric([status.model, beat.id], status.resends)
            case PoolStatus() as status:
                tokenized.add_metric([status.model, beat.id], status.num_tokens)
            case VisionStatus() as status:
                vision.add([status.model, beat.id], status)
            case _:
                pass
    yield from (requests, waiting, idle, streams, resends, tokenized, *vision.metrics)


class _VisionMetrics:
    """The metrics of image services."""

    def __init__(self) -> None:
        labels = ("model_name", "id")
        self._requests = CounterMetricFamily("antiphon:vision_images", "Images asked for", labels=labels)
        self._hits = CounterMetricFamily("antiphon:vision_cache_hits", "Images found encoded", labels=labels)
        self._tokens = CounterMetricFamily("antiphon:vision_tokens", "Tokens of encoded images", labels=labels)
        self._bytes = GaugeMetricFamily("antiphon:vision_cached_bytes", "Embeddings that are kept", labels=labels)
        self.metrics = (self._requests, self._hits, self._tokens, self._bytes)

    def add(self, labels: list[str], status: VisionStatus) -> None:
        """Adds the counters of one replica."""
        values = (status.num_requests, status.num_hits, status.num_tokens, status.cached_bytes)
        for metric, value in zip(self.metrics, values, strict=True):
            metric.add_metric(labels, value)
