"""Measures one generation for `/metrics`: times since the arrival of the request, tokens, and finish reasons.

All times are differences of one monotonic clock.
"""

import time
from collections.abc import Iterator

from services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from services.gateway.apis.openai.request_context import RequestContext
from services.gateway.edge.metrics import GatewayMetrics
from services.gateway.path.generation import SequenceUpdate


class RequestMeter:
    """Measures one generation."""

    def __init__(self, metrics: GatewayMetrics, context: RequestContext) -> None:
        self._metrics = metrics
        self._model = context.card.name
        self._started_s = context.arrival.started_s
        self._first_s = self._latest_s = 0.0
        self._last_s = [0.0] * context.num_sequences
        self._inter_token = metrics.inter_token.labels(self._model)
        self._generation_tokens = metrics.generation_tokens.labels(self._model)
        metrics.request_n.labels(self._model).observe(context.request.n)
        if context.request.params.max_tokens:
            metrics.request_max_tokens.labels(self._model).observe(context.request.params.max_tokens)

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from the arrival of the request to its first token; 0 before the first token."""
        return self._first_s - self._started_s if self._first_s else 0.0

    @property
    def time_to_last_token_s(self) -> float:
        """Seconds from the arrival of the request to its latest token; 0 before the first token."""
        return self._latest_s - self._started_s if self._first_s else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the arrival of the request."""
        return time.perf_counter() - self._started_s

    def saw(self, update: SequenceUpdate) -> None:
        """Records that an update of a sequence has arrived. An update without tokens is ignored."""
        if not update.token_ids:
            return
        now = time.perf_counter()
        last, self._last_s[update.index] = self._last_s[update.index], now
        self._latest_s = now
        self._generation_tokens.inc(len(update.token_ids))
        if last:
            self._inter_token.observe(now - last)
        elif not self._first_s:
            self._first_s = now
            self._metrics.first_token.labels(self._model).observe(now - self._started_s)

    def completed(self, accumulator: ChoiceAccumulator, num_prompt_tokens: int) -> None:
        """Records a complete answer. Not called for a request that fails."""
        metrics, model = self._metrics, self._model
        metrics.latency.labels(model).observe(self.elapsed_s)
        metrics.prompt_tokens.labels(model).inc(num_prompt_tokens)
        metrics.cached_tokens.labels(model).inc(accumulator.num_cached_tokens)
        metrics.request_prompt_tokens.labels(model).observe(num_prompt_tokens)
        metrics.request_generation_tokens.labels(model).observe(sum(one.num_tokens for one in accumulator.choices))
        computed = max(0, num_prompt_tokens - accumulator.num_cached_tokens)
        metrics.prompt_tokens_by_source.labels(model, "local_compute").inc(computed)
        metrics.prompt_tokens_by_source.labels(model, "local_cache_hit").inc(num_prompt_tokens - computed)
        metrics.prefill_tokens.labels(model).observe(computed)
        metrics.max_generation_tokens.labels(model).observe(max(one.num_tokens for one in accumulator.choices))
        for seconds in self._mean_times(accumulator):
            metrics.per_token.labels(model).observe(seconds)

    def ended(self, accumulator: ChoiceAccumulator, reason_of_the_rest: str) -> None:
        """Counts each sequence by its finish reason, or by `reason_of_the_rest` if the sequence has none."""
        for choice in accumulator.choices:
            self._metrics.success.labels(self._model, choice.finish_reason or reason_of_the_rest).inc()

    def _mean_times(self, accumulator: ChoiceAccumulator) -> Iterator[float]:
        for choice, last in zip(accumulator.choices, self._last_s, strict=True):
            if choice.num_tokens > 1:
                yield (last - self._first_s) / (choice.num_tokens - 1)
