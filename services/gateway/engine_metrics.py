"""Exports the engines' heartbeats as Prometheus metrics with vLLM's names and the labels `model_name` and `engine`.

Every gateway exports every engine, so a query over several gateways must take the maximum over them, not the sum.
Counters count from the start of the engine, so a restart is an ordinary counter reset for Prometheus.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shared.messages import EngineHistograms, EngineStatus, Heartbeat, HistogramCounts
from shared.observability.histograms import REQUEST_SECONDS, STEP_TOKENS

_LABELS = ("model_name", "engine")
_Value = Callable[[EngineStatus], float]


def _kv_cache_usage(status: EngineStatus) -> float:
    return 1.0 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0.0


_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch", lambda status: status.num_running),
    ("vllm:num_requests_waiting", "Sequences waiting for a place", lambda status: status.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _kv_cache_usage),
    ("antiphon:engine_idle_running", "Sequences of the idle lane in the batch", lambda status: status.num_idle_running),
    ("antiphon:engine_idle_waiting", "Sequences of the idle lane waiting", lambda status: status.num_idle_waiting),
    ("antiphon:engine_waiting_tokens", "Prompt tokens waiting", lambda status: status.num_waiting_tokens),
)
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
)
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", lambda status: status.prefix_cache_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", lambda status: status.prefix_cache_hits),
    ("vllm:num_preemptions", "Sequences put back into the queue", lambda status: status.preemptions),
    (
        "antiphon:engine_idle_preemptions",
        "Sequences of the idle lane that gave way",
        lambda status: status.idle_preemptions,
    ),
    ("vllm:spec_decode_num_drafts", "Drafts computed", lambda status: status.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens guessed", lambda status: status.drafted_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Guesses that were right", lambda status: status.accepted_tokens),
    (
        "antiphon:engine_cached_tokens",
        "Prompt tokens that were not computed again",
        lambda status: status.cached_tokens,
    ),
    ("antiphon:engine_swapped_out_blocks", "KV blocks to host memory", lambda status: status.swapped_out_blocks),
    ("antiphon:engine_swapped_in_blocks", "KV blocks from host memory", lambda status: status.swapped_in_blocks),
    ("antiphon:engine_steps", "Steps run", lambda status: status.step),
    ("antiphon:engine_prompt_tokens", "Prompt tokens computed", lambda status: status.prompt_tokens),
    (
        "antiphon:engine_kv_saved_tokens",
        "Tokens whose KV was computed for others",
        lambda status: status.kv_saved_tokens,
    ),
    ("antiphon:engine_kv_loaded_tokens", "Tokens whose KV came from others", lambda status: status.kv_loaded_tokens),
    ("antiphon:engine_kv_loads", "Transfers of KV that were waited for", lambda status: status.kv_loads),
    ("antiphon:engine_kv_failed_loads", "Transfers that brought too little", lambda status: status.kv_failed_loads),
    ("antiphon:engine_generation_tokens", "Tokens generated", lambda status: status.generation_tokens),
)


def engine_families(heartbeats: Sequence[Heartbeat]) -> Iterator[Metric]:
    """Yields the metrics of the engines among the heartbeats, of which there is at most one for each engine."""
    engines = [(beat.id, beat.status) for beat in heartbeats if isinstance(beat.status, EngineStatus)]
    yield _stalled(heartbeats)
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        for engine, status in engines:
            gauge.add_metric([status.model, engine], value(status))
        yield gauge
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        for engine, status in engines:
            counter.add_metric([status.model, engine], value(status))
        yield counter
    for name, text, bounds, read in _HISTOGRAMS:
        yield _histogram(name, text, bounds, [(engine, status, read(status.histograms)) for engine, status in engines])
    yield from _waiting_and_accepted(engines)
    yield from _finished_and_config(engines)
    yield from _self_tests(engines)


def _histogram(
    name: str, text: str, bounds: Sequence[float], found: Sequence[tuple[str, EngineStatus, HistogramCounts]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    for engine, status, histogram in found:
        totals = list(itertools.accumulate(histogram.counts or (0,) * (len(bounds) + 1)))
        buckets = [(floatToGoString(bound), total) for bound, total in zip((*bounds, math.inf), totals, strict=True)]
        family.add_metric([status.model, engine], buckets, histogram.sum)
    return family


def _waiting_and_accepted(engines: Sequence[tuple[str, EngineStatus]]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Sequences waiting, by reason", labels=(*_LABELS, "reason")
    )
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Right guesses by position", labels=(*_LABELS, "position")
    )
    for engine, status in engines:
        waiting.add_metric([status.model, engine, "capacity"], status.num_waiting)
        for position, count in enumerate(status.accepted_by_position):
            accepted.add_metric([status.model, engine, str(position)], count)
    yield waiting
    yield accepted


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
