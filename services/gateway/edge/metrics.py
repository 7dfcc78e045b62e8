"""The gateway's own Prometheus metrics, with vLLM's names where vLLM has such a metric.

They are updated by `edge.http.edge` and `apis.openai.request_meter`. The engines' metrics are in `ops.metrics.engines`;
no name occurs in both.
"""

import itertools
import math
import operator
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from antiphon.shared.messages import HistogramCounts
from antiphon.shared.observability import histograms

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MILLISECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
FIRST_TOKEN_BOUNDS_S = (*_MILLISECONDS, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)
_HTTP_S = (0.1, 0.5, 1)
_MODEL = ("model_name",)
_REJECTIONS = frozenset(
    {"server_is_overloaded", "rate_limit_exceeded", "draining", "no_engine", "no_tokenizer", "no_detokenizer"}
)
"""Codes of errors by which a request is refused for lack of capacity."""


def buckets(bounds: Sequence[float], found: HistogramCounts) -> list[tuple[str, float]]:
    """Returns the buckets of a `HistogramMetricFamily`."""
    totals = itertools.accumulate(found.counts or (0,) * (len(bounds) + 1))
    return [(floatToGoString(bound), total) for bound, total in zip((*bounds, math.inf), totals, strict=True)]


def _sum(found: Sequence[HistogramCounts]) -> HistogramCounts:
    """Returns the sum of histograms with equal bounds; one without counts if there are none."""
    counts = tuple(map(sum, zip(*(one.counts for one in found), strict=True)))
    return HistogramCounts(counts, sum(one.sum for one in found))


def _counts_of(histogram: Histogram) -> HistogramCounts:
    """Returns a histogram of prometheus_client, of all labels together, as counts that are not cumulative."""
    totals, total_s = defaultdict[float, float](float), 0.0
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                totals[float(sample.labels["le"])] += sample.value
            elif sample.name.endswith("_sum"):
                total_s += sample.value
    cumulative = [int(totals[bound]) for bound in sorted(totals)]
    return HistogramCounts(tuple(map(operator.sub, cumulative, [0, *cumulative])), total_s)


class ModelTokens:
    """The number of output tokens of one model, and the times between two tokens of a sequence."""

    def __init__(self) -> None:
        self.count, self.gaps_s, self.created = 0, histograms.Histogram(TOKEN_BOUNDS_S), time.time()


class TokenMetrics(Collector):
    """The metrics to which each token adds, for which prometheus_client's own take 1.7 µs in place of 0.2."""

    def __init__(self) -> None:
        self.models = defaultdict[str, ModelTokens](ModelTokens)

    def gap_counts(self) -> HistogramCounts:
        """Returns the times between two tokens, of all models together."""
        return _sum([found.gaps_s.counts() for found in self.models.values()])

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        name = "vllm:inter_token_latency_seconds"
        gaps = HistogramMetricFamily(name, "Time between tokens of a sequence", labels=_MODEL)
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated", labels=_MODEL)
        for model, found in self.models.items():
            gaps.add_metric([model], buckets(TOKEN_BOUNDS_S, counts := found.gaps_s.counts()), counts.sum)
            gaps.add_sample(f"{name}_created", {"model_name": model}, found.created)
            tokens.add_metric([model], found.count, found.created)
        yield gaps
        yield tokens


class GatewayMetrics:
    """The metrics of one application, with a registry of their own."""

    def __init__(self, *collectors: Collector) -> None:
        self.registry = CollectorRegistry()
        self.num_errors = 0
        """Number of calls of `count_error`."""
        for collector in (ProcessCollector(registry=None), *collectors):
            self.registry.register(collector)
        self._http_metrics()
        self._request_metrics()

    def render(self) -> bytes:
        """Returns the body of `GET /metrics`."""
        return generate_latest(self.registry)

    def first_token_counts(self) -> HistogramCounts:
        """Returns the times to the first token, of all models together."""
        return _counts_of(self.first_token)

    def count_error(self, code: str) -> None:
        """Counts a request that ended in an error with this code, before or after the first byte of its answer."""
        self.num_errors += 1
        self.errors.labels(code).inc()
        if code in _REJECTIONS:
            self.rejections.labels(code).inc()

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts an answered request and its duration. `handler` is the pattern of the route, never the path itself."""
        self.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self.http_duration.labels(handler, method).observe(seconds)

    def _http_metrics(self) -> None:
        self.http_requests = self._counter("http_requests", "HTTP requests", ("handler", "method", "status"))
        self.http_duration = self._histogram(
            "http_request_duration_seconds", "Time to the end of the response", _HTTP_S, ("handler", "method")
        )
        self.http_in_progress = Gauge(
            "antiphon:http_requests_in_progress", "HTTP requests being served", registry=self.registry
        )
        self.errors = self._counter("antiphon:request_errors", "Requests that ended in an error, by code", ("code",))

        self.rejections = self._counter(
            "vllm:admission_rejections", "Requests refused for lack of capacity, by reason", ("reason",)
        )

    def _request_metrics(self) -> None:
        histogram, counter = self._histogram, self._counter
        self.first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_BOUNDS_S)
        self.tokens = TokenMetrics()
        self.registry.register(self.tokens)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a request", TOKEN_BOUNDS_S
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST_S)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request", _TOKENS
        )
        self.request_n = histogram("vllm:request_params_n", "Choices asked for", _CHOICES)
        self.request_max_tokens = histogram("vllm:request_params_max_tokens", "Output tokens asked for", _TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got an answer")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        self.prompt_tokens_by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens, computed or from the prefix cache", ("model_name", "source")
        )
        self.max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of the longest choice", _TOKENS
        )
        self.prefill_tokens = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not in the prefix cache", _TOKENS
        )
        self.success = counter("vllm:request_success", "Sequences ended, by reason", ("model_name", "finished_reason"))

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = _MODEL) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = _MODEL
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)
