"""Runs a request with pooling and collects its vectors. Cancels the request if it fails or its client disconnects."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive

from antiphon.services.gateway.apis.openai.request_context import Arrival
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, unless_gone
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.path.generation import Backend, Generation, GenerationRequest
from antiphon.shared.errors import ServiceError
from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Names


@dataclass(slots=True)
class Pooled:
    """The vectors of a request's prompts, in their order (`SequenceUpdate.vector`), and token counts of all prompts."""

    vectors: list[bytes]
    num_tokens: int = 0
    num_cached_tokens: int = 0


async def run(
    backend: Backend,
    metrics: GatewayMetrics,
    request: GenerationRequest,
    arrival: Arrival,
    headers: Mapping[str, str],
    receive: Receive,
) -> Pooled:
    """Returns the vectors of all prompts. Raises ServiceError. The request's body must have been read before."""
    found = Pooled([b""] * request.inputs.num_prompts)
    generation: Generation | None = None
    reason, cause = "abort", ""
    with _span(request, headers) as span:
        request.origin.trace_headers.update(span.headers())
        try:
            generation = backend.generate(request)
            await unless_gone(receive, _collect(generation, found))
            reason = "stop"
        except ClientGoneError as gone:
            cause = gone.cause
            raise
        except Exception as error:
            reason, cause = "error", error.code if isinstance(error, ServiceError) else "internal_error"
            raise
        finally:
            if generation is not None:
                await generation.cancel(reason, cause)
            metrics.success.labels(request.model, reason).inc(len(found.vectors))
        span.set(Names.USAGE_INPUT_TOKENS, found.num_tokens)
        span.set(Names.USAGE_CACHE_READ_INPUT_TOKENS, found.num_cached_tokens)
    _measure(metrics, request.model, found, arrival)
    return found


async def _collect(generation: Generation, found: Pooled) -> None:
    async for batch in generation.updates():
        for update in batch:
            found.vectors[update.index] = update.vector
            found.num_cached_tokens += update.num_cached_tokens
    if not all(found.vectors):
        raise ServiceError("internal_error", "The request ended before all vectors were computed.")
    found.num_tokens = generation.num_prompt_tokens


def _measure(metrics: GatewayMetrics, model: str, found: Pooled, arrival: Arrival) -> None:
    metrics.latency.labels(model).observe(time.perf_counter() - arrival.started_s)
    metrics.prompt_tokens.labels(model).inc(found.num_tokens)
    metrics.cached_tokens.labels(model).inc(found.num_cached_tokens)
    metrics.request_prompt_tokens.labels(model).observe(found.num_tokens)


def _span(request: GenerationRequest, headers: Mapping[str, str]) -> telemetry.Span:
    if not telemetry.enabled():
        return telemetry.Span()
    return telemetry.start_span(
        f"{Names.EMBEDDINGS} {request.model}",
        kind="server",
        parent={name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
        attributes={
            Names.OPERATION_NAME: Names.EMBEDDINGS,
            Names.PROVIDER_NAME: Names.PROVIDER,
            Names.REQUEST_MODEL: request.model,
            Names.REQUEST_ID: request.request_id,
        },
    )
