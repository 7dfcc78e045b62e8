"""An OpenTelemetry collector, Rotel, and the server that it passes spans on to."""

import gzip
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.conftest import free_port
from tests.system.served import wait_until

HOST = "127.0.0.1"


class Store:
    """Keeps the spans that a collector sends to it with OTLP over HTTP."""

    def __init__(self) -> None:
        requests: list[ExportTraceServiceRequest] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Keeps quiet."""

        self.requests = requests
        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://{HOST}:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Collector:
    """A running collector. `url`: where it takes OTLP over HTTP."""

    def __init__(self) -> None:
        package = pytest.importorskip("rotel")  # it has no wheels for every version of Python
        self._store, port = Store(), free_port()
        self.url = f"http://{HOST}:{port}/v1/traces"
        self._process = subprocess.Popen(
            [
                Path(package.__file__).parent / "rotel-agent",
                "start",
                f"--otlp-http-endpoint={HOST}:{port}",
                f"--otlp-grpc-endpoint={HOST}:{free_port()}",
                "--exporter=otlp",
                f"--otlp-exporter-endpoint={self._store.url}",
                "--otlp-exporter-protocol=http",
                "--batch-timeout=50ms",
            ]
        )
        try:
            wait_until(lambda: self._listens(port), 60)
        except BaseException:
            self.stop()
            raise

    def _listens(self, port: int) -> bool:
        assert self._process.poll() is None, self._process.returncode
        with socket.socket() as one:
            return one.connect_ex((HOST, port)) == 0

    def trace(self, trace_id: str) -> list[tuple[str, Span]]:
        """The spans of one trace that have come through the collector, each with the name of its service."""
        resources = [resource for request in list(self._store.requests) for resource in request.resource_spans]
        return [
            (str(attributes(resource.resource)["service.name"]), span)
            for resource in resources
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        ]

    def stop(self) -> None:
        """Ends the collector and its server."""
        self._process.terminate()
        self._process.wait(60)
        self._store.stop()


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {item.key: value_of(item.value) for item in holder.attributes}


def value_of(value: Any) -> Any:
    """The value of an attribute in Python's types."""
    kind = value.WhichOneof("value")
    return [value_of(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
