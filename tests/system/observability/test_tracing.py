"""One request is one trace over four processes, as an OpenTelemetry collector passes it on."""

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from antiphon.shared.observability.telemetry import Names
from tests.system.observability.collector import Collector, attributes
from tests.system.served import Served, fetch, has_opentelemetry, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = "chat tiny"
SERVICES = {
    CHAT: "antiphon-gateway",
    Names.TOKENIZE: "antiphon-tokenizer",
    Names.QUEUE: "antiphon-engine",
    Names.PREFILL: "antiphon-engine",
    Names.DECODE: "antiphon-engine",
    Names.DETOKENIZE: "antiphon-detokenizer",
}
CLOCK_NS = 1_000_000
"""What the system's clock may be set back meanwhile."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def served(model: Path, collector: Collector) -> Iterator[Served]:
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    with until_the_end(serve_tiny(model, f"--otlp-traces-endpoint={collector.url}", environ=environ)) as started:
        yield started


@pytest.fixture(scope="module")
def answer(served: Served) -> Any:
    body = {"messages": [{"role": "user", "content": "A secret word"}], "max_tokens": 6, "temperature": 0, "seed": 5}
    asked = fetch(served, "POST", "/v1/chat/completions", body, traceparent=f"00-{TRACE_ID}-{CALLER_ID}-01")
    assert asked.status == 200
    return asked.json


@pytest.fixture(scope="module")
def spans(answer: Any, collector: Collector) -> dict[str, tuple[str, Span]]:
    """By name, with the service; each there once."""
    wait_until(lambda: len(collector.trace(TRACE_ID)) >= len(SERVICES), 60, lambda: str(collector.trace(TRACE_ID)))
    found = collector.trace(TRACE_ID)
    assert len(found) == len(SERVICES)
    return {span.name: (service, span) for service, span in found}


def test_four_services_write_one_trace_that_continues_the_callers(spans: dict[str, tuple[str, Span]]) -> None:
    assert {name: service for name, (service, _) in spans.items()} == SERVICES
    root = spans[CHAT][1]
    assert root.parent_span_id.hex() == CALLER_ID
    assert root.kind == Span.SPAN_KIND_SERVER
    assert {span.parent_span_id for name, (_, span) in spans.items() if name != CHAT} == {root.span_id}


def test_the_spans_say_what_was_asked_and_what_came_of_it(answer: Any, spans: dict[str, tuple[str, Span]]) -> None:
    told = {name: attributes(span) for name, (_, span) in spans.items()}
    usage, [choice] = answer["usage"], answer["choices"]
    prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
    expected = {
        Names.OPERATION_NAME: "chat",
        Names.PROVIDER_NAME: "antiphon",
        Names.REQUEST_MODEL: "tiny",
        Names.RESPONSE_MODEL: "tiny",
        Names.REQUEST_MAX_TOKENS: 6,
        Names.REQUEST_TEMPERATURE: 0.0,
        Names.REQUEST_SEED: 5,
        Names.REQUEST_STREAM: False,
        Names.RESPONSE_ID: answer["id"],
        Names.RESPONSE_FINISH_REASONS: [choice["finish_reason"]],
        Names.USAGE_INPUT_TOKENS: prompt,
        Names.USAGE_OUTPUT_TOKENS: output,
    }
    assert {name: told[CHAT][name] for name in expected} == expected
    assert told[Names.TOKENIZE][Names.USAGE_INPUT_TOKENS] == told[Names.PREFILL][Names.USAGE_INPUT_TOKENS] == prompt
    assert told[Names.DECODE][Names.USAGE_OUTPUT_TOKENS] == told[Names.DETOKENIZE][Names.USAGE_OUTPUT_TOKENS] == output
    assert told[Names.DECODE][Names.RESPONSE_FINISH_REASONS] == [choice["finish_reason"]]
    assert told[Names.DETOKENIZE][Names.RESPONSE_FINISH_REASONS] == [choice["finish_reason"]]
    assert "secret" not in str(spans)
    assert choice["message"]["content"] not in str(spans)


def test_the_times_tell_how_the_request_went(spans: dict[str, tuple[str, Span]]) -> None:
    times = {name: (span.start_time_unix_nano, span.end_time_unix_nano) for name, (_, span) in spans.items()}
    assert all(start <= end for start, end in times.values())
    root, tokenize, queue, prefill, decode, detokenize = (times[name] for name in SERVICES)
    steps = [root[0], tokenize[0], tokenize[1], queue[0], queue[1], prefill[0], prefill[1], decode[0], decode[1]]
    assert all(later - earlier > -CLOCK_NS for earlier, later in itertools.pairwise(steps))
    assert (queue[1], prefill[1]) == (prefill[0], decode[0])
    assert decode[1] < root[1] + CLOCK_NS
    # The message that opens the stream is sent before the engine gets the sequence; its process may read it later, even
    # after the last step of so short an answer. The stream is closed when its owner has the last of it.
    assert tokenize[1] - CLOCK_NS < detokenize[0]
    assert detokenize[1] > decode[1] - CLOCK_NS


def test_a_streamed_request_is_one_tree_whose_times_are_within_what_its_client_waited(
    served: Served, collector: Collector
) -> None:
    trace_id, body = "1af7651916cd43dd8448eb211c80319c", {"model": "tiny", "prompt": "a b c", "max_tokens": 100}
    request = urllib.request.Request(
        f"{served.url}/completions",
        json.dumps({**body, "ignore_eos": True, "stream": True}).encode(),
        {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-{CALLER_ID}-01"},
    )
    began_ns = time.time_ns()
    with urllib.request.urlopen(request, timeout=60) as streamed:
        assert streamed.read().endswith(b"data: [DONE]\n\n")
    ended_ns = time.time_ns()
    wait_until(lambda: len(collector.trace(trace_id)) == len(SERVICES), 60, lambda: str(collector.trace(trace_id)))
    found = [span for _, span in collector.trace(trace_id)]
    assert {service for service, _ in collector.trace(trace_id)} == set(SERVICES.values())
    [root] = [span for span in found if span.parent_span_id.hex() == CALLER_ID]
    assert {span.parent_span_id for span in found if span is not root} == {root.span_id}
    by_name = {span.name: span for span in found}
    assert began_ns - CLOCK_NS <= root.start_time_unix_nano
    # The root ends after the last byte was sent, and the client may have it before that.
    assert by_name[Names.DECODE].end_time_unix_nano <= ended_ns + CLOCK_NS
    # What is left is the way between the processes, and the start and the end of the connection.
    lengths = {name: span.end_time_unix_nano - span.start_time_unix_nano for name, span in by_name.items()}
    parts = sum(lengths[name] for name in (Names.TOKENIZE, Names.QUEUE, Names.PREFILL, Names.DECODE))
    assert lengths[root.name] / 2 < parts <= lengths[root.name] + CLOCK_NS


def test_only_then_do_the_services_load_opentelemetry(served: Served) -> None:
    """What the check sees when it is there; that it is not there without a collector, test_serve asks."""
    assert all(has_opentelemetry(pid) for name, pid in served.pids().items() if name != "nats-server")
