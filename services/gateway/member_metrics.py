"""Exports the heartbeats of all services as metrics: whether each process lives, its messages, its streams."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shared.messages import GatewayStatus, Heartbeat, PoolStatus, StreamStatus

_LABELS = ("service", "id")


class MemberCollector(Collector):
    """Collects the metrics from the living members at each scrape.

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
        for beat, age_s in members:
            labels = [beat.service, beat.id]
            age.add_metric(labels, age_s)
            ready.add_metric(labels, float(beat.state == "ready"))
            received.add_metric(labels, beat.messages_received)
            sent.add_metric(labels, beat.messages_sent)
        yield from (age, ready, received, sent)
        yield from _loads([beat for beat, _ in members])


def _loads(beats: Sequence[Heartbeat]) -> Iterator[Metric]:
    requests = GaugeMetricFamily("antiphon:gateway_requests", "Requests in a gateway", labels=("id",))
    waiting = GaugeMetricFamily("antiphon:gateway_waiting_sequences", "Wait in a gateway for an engine", labels=("id",))
    streams = GaugeMetricFamily("antiphon:detokenizer_streams", "Open streams", labels=("model_name", "id"))
    resends = CounterMetricFamily(
        "antiphon:detokenizer_resends", "Gaps of tokens repaired", labels=("model_name", "id")
    )
    tokenized = CounterMetricFamily("antiphon:tokenizer_tokens", "Tokens of texts", labels=("model_name", "id"))
    for beat in beats:
        match beat.status:
            case GatewayStatus() as status:
                requests.add_metric([beat.id], status.num_requests)
                waiting.add_metric([beat.id], status.num_waiting)
            case StreamStatus() as status:
                streams.add_metric([status.model, beat.id], status.num_streams)
                resends.add_metric([status.model, beat.id], status.resends)
            case PoolStatus() as status:
                tokenized.add_metric([status.model, beat.id], status.num_tokens)
            case _:
                pass
    yield from (requests, waiting, streams, resends, tokenized)
