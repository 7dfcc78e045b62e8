"""Traces across services. Without a configured collector there is no cost: OpenTelemetry is not even imported.

A request's trace context is passed in the bus headers (`traceparent`), or in each part of a batch message. Services
open a span while they work (`start_span`), or report it afterwards with recorded times (`record_span`). The names of
spans and attributes are in `Names`; they follow the GenAI semantic conventions (v1.41). Prompts and outputs are never
recorded.
"""

import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from antiphon.shared.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span as SdkSpan

log = logging.getLogger(__name__)
Attribute = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Attribute]
Kind = Literal["internal", "server", "client", "producer", "consumer"]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_MS = 2000
QUEUE_MAX = 8192
"""Number of finished spans that may wait for export; further spans are dropped."""


class Names:
    """Names of spans and attributes.

    A gateway's request span is named by CHAT, TEXT_COMPLETION or EMBEDDINGS and the model.
    """

    CHAT = "chat"
    EMBEDDINGS = "embeddings"
    TEXT_COMPLETION = "text_completion"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    DETOKENIZE = "detokenize"

    OPERATION_NAME = "gen_ai.operation.name"
    PROVIDER_NAME = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
    REQUEST_SEED = "gen_ai.request.seed"
    REQUEST_STREAM = "gen_ai.request.stream"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
    REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
    RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
    USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    SERVER_ADDRESS = "server.address"
    SERVER_PORT = "server.port"
    ERROR_TYPE = "error.type"
    # Further attributes of vLLM's spans, so that tools made for vLLM work.
    REQUEST_ID = "gen_ai.request.id"
    LATENCY_IN_QUEUE = "gen_ai.latency.time_in_queue"
    LATENCY_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
    LATENCY_E2E = "gen_ai.latency.e2e"

    PROVIDER = "antiphon"
    """The value of PROVIDER_NAME."""


class Span:
    """The interface of spans. This base class records nothing; callers get it while tracing is off."""

    def headers(self) -> dict[str, str]:
        """Returns the trace context for bus headers; empty when tracing is off."""
        return {}

    def set(self, name: str, value: Attribute) -> None:
        """Sets an attribute."""

    def event(self, name: str) -> None:
        """Adds an event with the current time."""

    def error(self, message: str) -> None:
        """Marks the span as failed. `message` is an error code or exception type, never text of a request."""

    def end(self, end_ns: int | None = None) -> None:
        """Ends the span, now or at the time `end_ns` in nanoseconds since the Unix epoch."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.error(kind.__name__)
        self.end()


_NO_SPAN = Span()
_tracing: "_Sdk | None" = None


def setup(service_name: str, instance_id: str, environ: Mapping[str, str] | None = None, *, endpoint: str = "") -> None:
    """Switches tracing on if `endpoint` or the environment names a collector (OTLP over HTTP), otherwise off.

    `endpoint` is the collector's base URL or its `/v1/traces` URL. Further `OTEL_…` variables (headers, sampler) are
    read by the OpenTelemetry SDK itself.
    """
    global _tracing
    shutdown()
    endpoint = endpoint or (os.environ if environ is None else environ).get(ENDPOINT, "")
    if endpoint:
        _tracing = _Sdk(service_name, instance_id, endpoint.rstrip("/").removesuffix(_TRACES) + _TRACES)


def enabled() -> bool:
    """Whether spans are recorded. To be checked before computing costly attributes."""
    return _tracing is not None


def trace_headers(traceparent: str, tracestate: str) -> dict[str, str] | None:
    """Returns a trace context from the fields of a message, for the `parent` argument of spans; None if empty."""
    if not traceparent:
        return None
    return {"traceparent": traceparent, "tracestate": tracestate} if tracestate else {"traceparent": traceparent}


def start_span(
    name: str,
    *,
    kind: Kind = "internal",
    parent: Mapping[str, str] | None = None,
    attributes: Attributes | None = None,
) -> Span:
    """Starts a span now. `parent` is the `headers()` of another span, as received over the bus or HTTP."""
    return _NO_SPAN if _tracing is None else _tracing.start(name, kind, parent, attributes, None)


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    parent: Mapping[str, str] | None = None,
    attributes: Attributes | None = None,
) -> None:
    """Reports a span that has ended. Times are nanoseconds since the Unix epoch."""
    if _tracing is not None:
        _tracing.start(name, "internal", parent, attributes, start_ns).end(end_ns)


def shutdown() -> None:
    """Exports the waiting spans, within a few seconds, and switches tracing off."""
    global _tracing
    if _tracing is not None:
        _tracing.shutdown()
        _tracing = None


class _Sdk:
    """Creates spans that OpenTelemetry's SDK records and exports from its own thread."""

    def __init__(self, service_name: str, instance_id: str, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"service.name": service_name, "service.instance.id": instance_id, "service.version": __version__}
        resource = Resource.create(about)
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_MAX))
        self._tracer = self._provider.get_tracer("antiphon", __version__)

    def start(
        self,
        name: str,
        kind: Kind,
        parent: Mapping[str, str] | None,
        attributes: Attributes | None,
        start_ns: int | None,
    ) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(parent or {}, Context())
        return _SdkSpan(
            self._tracer.start_span(name, context, SpanKind[kind.upper()], attributes=attributes, start_time=start_ns)
        )

    def shutdown(self) -> None:
        if not self._provider.force_flush(FLUSH_TIMEOUT_MS):
            log.warning("some spans could not be sent")
        self._provider.shutdown()


class _SdkSpan(Span):
    def __init__(self, span: "SdkSpan") -> None:
        self._span = span

    def headers(self) -> dict[str, str]:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, Any] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span, Context()))
        return carrier

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, value)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def error(self, message: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, message)
        self._span.set_attribute(Names.ERROR_TYPE, message)

    def end(self, end_ns: int | None = None) -> None:
        self._span.end(end_ns)
