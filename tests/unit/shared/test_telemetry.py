"""Tracing: nothing at all while it is off; one linked trace at a collector when it is on."""

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Names
from antiphon.shared.version import __version__

SECOND_NS = 10**9


class Collector:
    """An OTLP/HTTP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        collector = self
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.append(self.path)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Keeps quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def spans(self) -> dict:
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    telemetry.shutdown()
    collector.stop()


def attributes(span) -> dict:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_while_tracing_is_off_opentelemetry_is_not_imported():
    code = """
import sys
from antiphon.shared.observability import telemetry
telemetry.setup("antiphon-engine", "e1", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
with telemetry.start_span("x", kind="server", attributes={"a": 1}) as span:
    span.set("b", 2); span.event("c"); span.error("d")
    assert span.headers() == {}
telemetry.record_span("y", 1, 2, parent={})
telemetry.shutdown()
assert not telemetry.enabled()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "."})


def test_spans_of_several_services_are_one_trace_linked_by_the_headers(collector):
    telemetry.setup("antiphon-gateway", "g1", {telemetry.ENDPOINT: collector.url + "/"})
    assert telemetry.enabled()
    with telemetry.start_span("chat demo", kind="server", attributes={Names.REQUEST_MODEL: "demo"}) as request:
        headers = request.headers()
        with telemetry.start_span(Names.TOKENIZE, kind="client", parent=headers) as tokenize:
            tokenize.event("retry")
        now = time.time_ns()
        telemetry.record_span(Names.QUEUE, now - SECOND_NS, now, parent=headers, attributes={"a": 1.5})
        request.set(Names.USAGE_INPUT_TOKENS, 12)
        request.set(Names.RESPONSE_FINISH_REASONS, ("stop", "length"))
    telemetry.shutdown()

    spans = collector.spans()
    root, inner, queue = spans["chat demo"], spans[Names.TOKENIZE], spans[Names.QUEUE]
    assert set(headers) == {"traceparent"}
    assert headers["traceparent"].split("-")[1] == root.trace_id.hex()
    assert root.parent_span_id == b""
    assert inner.trace_id == queue.trace_id == root.trace_id
    assert inner.parent_span_id == queue.parent_span_id == root.span_id
    assert (root.kind, inner.kind, queue.kind) == (
        root.SPAN_KIND_SERVER,
        root.SPAN_KIND_CLIENT,
        root.SPAN_KIND_INTERNAL,
    )
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == SECOND_NS
    assert [event.name for event in inner.events] == ["retry"]
    assert attributes(root)[Names.REQUEST_MODEL] == "demo"
    assert attributes(root)[Names.USAGE_INPUT_TOKENS] == 12
    assert attributes(queue) == {"a": 1.5}
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resource()["service.name"] == "antiphon-gateway"
    assert collector.resource()["service.instance.id"] == "g1"
    assert collector.resource()["service.version"] == __version__


def test_a_collector_that_a_setting_names_goes_before_the_environments(collector):
    for url in (collector.url, f"{collector.url}/v1/traces", f"{collector.url}/v1/traces/"):
        telemetry.setup("antiphon-gateway", "g1", {telemetry.ENDPOINT: "http://127.0.0.1:1"}, endpoint=url)
        telemetry.start_span("chat demo").end()
        telemetry.shutdown()
    assert collector.paths == ["/v1/traces"] * 3


def test_a_client_s_own_trace_is_continued(collector):
    telemetry.setup("antiphon-gateway", "g1", {telemetry.ENDPOINT: collector.url})
    theirs = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    with telemetry.start_span("chat demo", parent=theirs) as span:
        assert span.headers()["tracestate"] == "vendor=1"
    telemetry.shutdown()
    assert collector.spans()["chat demo"].trace_id.hex() == "a" * 32
    assert collector.spans()["chat demo"].parent_span_id.hex() == "b" * 16


@pytest.mark.parametrize("parent", [None, {}, {"traceparent": "rubbish"}, {"traceparent": "00-0-0-01"}])
def test_without_a_readable_parent_a_new_trace_begins(collector, parent):
    telemetry.setup("antiphon-gateway", "g1", {telemetry.ENDPOINT: collector.url})
    telemetry.start_span("alone", parent=parent).end()
    telemetry.shutdown()
    assert collector.spans()["alone"].parent_span_id == b""


def test_an_exception_marks_the_span_with_its_type_and_not_its_text(collector):
    telemetry.setup("antiphon-gateway", "g1", {telemetry.ENDPOINT: collector.url})
    with pytest.raises(KeyError), telemetry.start_span("fails"):
        raise KeyError("the user's secret prompt")
    telemetry.shutdown()
    span = collector.spans()["fails"]
    assert attributes(span) == {Names.ERROR_TYPE: "KeyError"}
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert b"secret" not in span.SerializeToString()


def test_shutting_down_does_not_wait_long_for_a_collector_that_is_gone(unused_port):
    telemetry.setup("antiphon-gateway", "g1", {telemetry.ENDPOINT: f"http://127.0.0.1:{unused_port}"})
    telemetry.start_span("unheard").end()
    start = time.perf_counter()
    telemetry.shutdown()
    assert time.perf_counter() - start < 8
    assert not telemetry.enabled()


def test_off_costs_next_to_nothing():
    assert telemetry.start_span("a") is telemetry.start_span("b")
