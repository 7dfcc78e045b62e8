from typing import Any

import pytest

from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.request_meter import RequestTrace
from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Names
from tests.unit.gateway.request_contexts import ID, context, update

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class RecordingSpan(telemetry.Span):
    def __init__(self, name: str, attributes: Any) -> None:
        self.name, self.attributes, self.errors, self.ended = name, dict(attributes), [], 0

    def headers(self) -> dict[str, str]:
        return {"traceparent": "child"}

    def set(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def error(self, message: str) -> None:
        self.errors.append(message)

    def end(self, end_ns: int | None = None) -> None:
        self.ended += 1


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Spans as they are started, with the parent each was given."""
    started: list[Any] = []

    def start_span(name: str, *, kind: str, parent: Any, attributes: Any) -> RecordingSpan:
        assert kind == "server"
        started.append((RecordingSpan(name, attributes), parent))
        return started[-1][0]

    monkeypatch.setattr(telemetry, "enabled", lambda: True)
    monkeypatch.setattr(telemetry, "start_span", start_span)
    return started


def test_the_root_span_says_what_was_asked_and_what_came_of_it(spans: list[Any]):
    one, accumulator = context(n=2), ChoiceAccumulator(1, 2)
    trace = RequestTrace(one, {"traceparent": PARENT, "authorization": "Bearer secret"})
    assert one.request.origin.trace_headers == {"traceparent": "child"}
    accumulator.choices[0].add(update("hello", 0, finish_reason="stop", num_cached_tokens=3))
    trace.end(accumulator, 7, 0.25, "timeout")
    span, parent = spans[0]
    assert parent == {"traceparent": PARENT}
    assert span.name == "chat toy"
    assert span.attributes[Names.OPERATION_NAME] == "chat"
    assert span.attributes[Names.REQUEST_CHOICE_COUNT] == 2
    assert span.attributes[Names.RESPONSE_ID] == f"chatcmpl-{ID}"
    assert span.attributes[Names.RESPONSE_FINISH_REASONS] == ("stop", "error")
    assert span.attributes[Names.USAGE_INPUT_TOKENS] == 7
    assert span.attributes[Names.USAGE_OUTPUT_TOKENS] == 1
    assert span.attributes[Names.USAGE_CACHE_READ_INPUT_TOKENS] == 3
    assert span.attributes[Names.RESPONSE_TIME_TO_FIRST_CHUNK] == 0.25
    assert (span.errors, span.ended) == (["timeout"], 1)
    assert "hello" not in str(span.attributes)
    assert "secret" not in str(span.attributes)


def test_without_a_collector_nothing_is_recorded():
    one = context("completion")
    RequestTrace(one, {"traceparent": PARENT}).end(ChoiceAccumulator(1, 1), 0, 0.0)
    assert one.request.origin.trace_headers == {}
