"""The root span of a request, from its acceptance to the end of its answer. Prompts and outputs are not recorded."""

import time
from collections.abc import Mapping
from typing import Any

from services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from services.gateway.apis.openai.request_context import RequestContext
from shared.observability import telemetry
from shared.observability.telemetry import Attribute, Names

_OPERATION = {"completion": Names.TEXT_COMPLETION, "chat": Names.CHAT}


class RequestTrace:
    """The span of one request. The request's `trace_headers` get its context, for the spans of other services."""

    def __init__(self, context: RequestContext, headers: Mapping[str, str]) -> None:
        """`headers`: HTTP headers of the request. A `traceparent` makes this span part of the client's trace."""
        self._context = context
        self._span = telemetry.Span()
        if telemetry.enabled():
            self._span = _start(context, headers)
            context.request.origin.trace_headers.update(self._span.headers())

    def failed(self, code: str) -> None:
        """Records an error code, or that the client has disconnected."""
        self._span.error(code)

    def end(self, accumulator: ChoiceAccumulator, num_prompt_tokens: int, time_to_first_token_s: float) -> None:
        """Records the result of the request and ends the span."""
        if telemetry.enabled():
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
