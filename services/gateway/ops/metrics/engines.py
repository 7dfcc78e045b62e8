"""Exports the engines' heartbeats as Prometheus metrics with vLLM's names and the labels `model_name` and `engine`.

Every gateway exports every engine, so a query over several gateways must take the maximum over them, not the sum.
Counters count from the start of the engine, so a restart is an ordinary counter reset for Prometheus.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import get_type_hints

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from antiphon.services.gateway.edge.metrics import buckets
from antiphon.shared.messages import (
    EngineCounters,
    EngineHistograms,
    EngineLoad,
    EngineStatus,
    Heartbeat,
    HistogramCounts,
)
from antiphon.shared.messages import Metric as Declared
from antiphon.shared.observability.histograms import PREEMPTIONS, REQUEST_SECONDS, STEP_TOKENS

_LABELS = ("model_name", "engine")
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float], Callable[[EngineHistograms], HistogramCounts]], ...] = (
    ("vllm:iteration_tokens_total", "Tokens of a step", STEP_TOKENS, lambda found: found.step_tokens),
    ("vllm:request_queue_time_seconds", "Wait for a place in the batch", REQUEST_SECONDS, lambda found: found.queue_s),
    (
        "vllm:request_inference_time_seconds",
        "From a place in the batch to the end",
        REQUEST_SECONDS,
        lambda found: found.inference_s,
    ),
    (
        "vllm:request_prefill_time_seconds",
        "From a place in the batch to the first token",
        REQUEST_SECONDS,
        lambda found: found.prefill_s,
    ),
    (
        "vllm:request_decode_time_seconds",
        "From the first token to the end",
        REQUEST_SECONDS,
        lambda found: found.decode_s,
    ),
    ("vllm:request_num_preemptions", "Preemptions of a sequence", PREEMPTIONS, lambda found: found.preemptions),
)


def engine_families(heartbeats: Sequence[Heartbeat]) -> Iterator[Metric]:
    """Yields the metrics of the engines among the heartbeats, of which there is at most one for each engine."""
    engines = [(beat.id, beat.status) for beat in heartbeats if isinstance(beat.status, EngineStatus)]
    yield _stalled(heartbeats)
    loads = [((status.model, engine), status.load) for engine, status in engines]
    yield from _exported(EngineLoad, GaugeMetricFamily, loads)
    counters = [((status.model, engine), status.counters) for engine, status in engines]
    yield from _exported(EngineCounters, CounterMetricFamily, counters)
    for name, text, bounds, read in _HISTOGRAMS:
        yield _histogram(name, text, bounds, [(engine, status, read(status.histograms)) for engine, status in engines])
    yield from _derived(engines)
    yield from _finished_and_config(engines)
    yield from _self_tests(engines)


def _exported(
    kind: type[msgspec.Struct],
    family: type[GaugeMetricFamily | CounterMetricFamily],
    found: Sequence[tuple[tuple[str, str], msgspec.Struct]],
) -> Iterator[Metric]:
    """Yields a metric for each field of a struct that declares one. `found`: labels and struct of each engine."""
    for name, declared in _declared(kind):
        metric = family(declared.name, declared.text, labels=(*_LABELS, declared.label) if declared.label else _LABELS)
        for labels, struct in found:
            value = getattr(struct, name)
            if declared.label:
                for index, one in enumerate(value):
                    metric.add_metric((*labels, declared.values[index] if declared.values else str(index)), one)
            else:
                metric.add_metric(labels, value)
        yield metric


@cache
def _declared(kind: type[msgspec.Struct]) -> list[tuple[str, Declared]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, metric) for name, hint in hints.items() for metric in getattr(hint, "__metadata__", ())]


def _histogram(
    name: str, text: str, bounds: Sequence[float], found: Sequence[tuple[str, EngineStatus, HistogramCounts]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    for engine, status, histogram in found:
        family.add_metric([status.model, engine], buckets(bounds, histogram), histogram.sum)
    return family


def _derived(engines: Sequence[tuple[str, EngineStatus]]) -> Iterator[Metric]:
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", labels=_LABELS)
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Sequences waiting, by reason", labels=(*_LABELS, "reason")
    )
    for engine, status in engines:
        in_use = 1.0 - status.load.num_free_blocks / status.num_blocks if status.num_blocks else 0.0
        usage.add_metric([status.model, engine], in_use)
        waiting.add_metric([status.model, engine, "capacity"], status.load.num_waiting)
    yield usage
    yield waiting


def _self_tests(engines: Sequence[tuple[str, EngineStatus]]) -> Iterator[Metric]:
    runs = CounterMetricFamily(
        "antiphon:engine_canary_runs", "Runs of the hidden sequence by which the engine tests itself", labels=_LABELS
    )
    for engine, status in engines:
        runs.add_metric([status.model, engine], status.canary_runs)
    yield runs


def _stalled(heartbeats: Sequence[Heartbeat]) -> Metric:
    gauge = GaugeMetricFamily("antiphon:engine_stalled", "1 while the engine's computing stands still", labels=_LABELS)
    for beat in heartbeats:
        if isinstance(beat.status, EngineStatus):
            gauge.add_metric([beat.status.model, beat.id], float(beat.state == "stalled"))
    return gauge


def _finished_and_config(engines: Sequence[tuple[str, EngineStatus]]) -> Iterator[Metric]:
    finished = CounterMetricFamily(
        "antiphon:engine_sequences_finished", "Sequences ended, by reason", labels=(*_LABELS, "finished_reason")
    )
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "Size of the KV cache", labels=(*_LABELS, "block_size", "num_gpu_blocks")
    )
    for engine, status in engines:
        config.add_metric([status.model, engine, str(status.block_size), str(status.num_blocks)], 1)
        for reason, count in status.finished:
            finished.add_metric([status.model, engine, reason], count)
    yield finished
    yield config


class EngineCollector(Collector):
    """Collects the metrics from the current heartbeats at each scrape."""

    def __init__(self, heartbeats: Callable[[], Sequence[Heartbeat]]) -> None:
        self._heartbeats = heartbeats

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        return engine_families(self._heartbeats())
