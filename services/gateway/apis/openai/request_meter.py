"""Measures one generation: for `/metrics`, and as the root span of its request, if spans are collected.

The metrics are times since the arrival of the request, tokens, and finish reasons; all times are differences of one
monotonic clock. The span lasts from the acceptance of the request to the end of its answer. Neither has prompts or
outputs.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Attribute, Names

_OPERATION = {"completion": Names.TEXT_COMPLETION, "chat": Names.CHAT}


class RequestMeter:
    """Measures one generation."""

    def __init__(self, metrics: GatewayMetrics, context: RequestContext) -> None:
        self._metrics = metrics
        self._model = context.card.name
        self._started_s = context.arrival.started_s
        self._first_s = 0.0
        self._last_s = [0.0] * context.num_sequences
        self._tokens = metrics.tokens.models[self._model]
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
        return max(self._last_s) - self._started_s if self._first_s else 0.0

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
        self._tokens.count += len(update.token_ids)
        if last:
            self._tokens.gaps_s.observe(now - last)
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


class RequestTrace:
    """The span of one request, made only if spans are collected.

    The request's `trace_headers` get its context, for the spans of other services.
    """

    def __init__(self, context: RequestContext, headers: Mapping[str, str]) -> None:
        """`headers`: HTTP headers of the request. A `traceparent` makes this span part of the client's trace."""
        self._context = context
        self._span = _start(context, headers)
        context.request.origin.trace_headers.update(self._span.headers())

    def end(
        self, accumulator: ChoiceAccumulator, num_prompt_tokens: int, time_to_first_token_s: float, failure: str = ""
    ) -> None:
        """Records the result of the request and ends the span. `failure`: an error's code; empty: there is none."""
        if failure:
            self._span.error(failure)
        for name, value in self._outcome(accumulator, num_prompt_tokens, time_to_first_token_s).items():
            self._span.set(name, value)
        self._span.end()

    def _outcome(
        self, accumulator: ChoiceAccumulator, num_prompt_tokens: int, first_token_s: float
    ) -> dict[str, Attribute]:
        return {
            Names.RESPONSE_ID: self._context.id,
            Names.RESPONSE_MODEL: self._context.card.name,
            Names.RESPONSE_FINISH_REASONS: tuple(choice.finish_reason or "error" for choice in accumulator.choices),
            Names.RESPONSE_TIME_TO_FIRST_CHUNK: first_token_s,
            Names.USAGE_INPUT_TOKENS: num_prompt_tokens,
            Names.USAGE_OUTPUT_TOKENS: sum(choice.num_tokens for choice in accumulator.choices),
            Names.USAGE_CACHE_READ_INPUT_TOKENS: accumulator.num_cached_tokens,
            Names.LATENCY_TO_FIRST_TOKEN: first_token_s,
            Names.LATENCY_E2E: time.perf_counter() - self._context.arrival.started_s,
        }


def _start(context: RequestContext, headers: Mapping[str, str]) -> telemetry.Span:
    operation = _OPERATION[context.kind]
    parent = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return telemetry.start_span(
        f"{operation} {context.card.name}", kind="server", parent=parent, attributes=_asked(context, operation)
    )


def _asked(context: RequestContext, operation: str) -> dict[str, Any]:
    request, params = context.request, context.request.params
    attributes: dict[str, Any] = {
        Names.OPERATION_NAME: operation,
        Names.PROVIDER_NAME: Names.PROVIDER,
        Names.REQUEST_MODEL: request.model,
        Names.REQUEST_ID: request.request_id,
        Names.REQUEST_STREAM: context.stream,
        Names.REQUEST_SEED: params.seed,
        Names.REQUEST_TEMPERATURE: params.temperature,
        Names.REQUEST_TOP_P: params.top_p,
        Names.REQUEST_TOP_K: params.top_k,
        Names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
        Names.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
    }
    if params.max_tokens:
        attributes[Names.REQUEST_MAX_TOKENS] = params.max_tokens
    if request.n != 1:
        attributes[Names.REQUEST_CHOICE_COUNT] = request.n
    return attributes
