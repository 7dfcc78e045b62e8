"""A relay between a client and the server. Keeps each request and its whole answer, and changes no byte of a body."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "cookie"})
HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})
TIMEOUT_S = 300.0
PIECE_BYTES = 65536


@dataclass
class Exchange:
    """One request of a client and what it was answered. `answer` is complete when `ended` is true."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict[str, str])
    answer: bytes = b""
    ended: bool = False
    broken: str = ""
    """Why no whole answer could be passed on: the server or the client broke the connection."""

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


class Recorder:
    """Relays to `port` of this machine. Several clients may use it at once."""

    def __init__(self, port: int) -> None:
        self.exchanges: list[Exchange] = []
        self.target = port
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                recorder.relay(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = relay

            def log_message(self, *_: object) -> None:
                """The exchanges are the log."""

        return Handler

    def relay(self, handler: BaseHTTPRequestHandler) -> None:
        """Sends one request on and its answer back, piece by piece. A connection serves one request."""
        sent = {name.lower(): value for name, value in handler.headers.items()}
        shown = {name: value for name, value in sent.items() if name not in SECRET_HEADERS | HOP_HEADERS}
        body = _body(handler, sent)
        exchange = Exchange(handler.command, handler.path, shown, body)
        self.exchanges.append(exchange)
        upstream = http.client.HTTPConnection("127.0.0.1", self.target, timeout=TIMEOUT_S)
        handler.close_connection = True
        try:
            passed = {name: value for name, value in sent.items() if name not in HOP_HEADERS | {"content-length"}}
            upstream.request(handler.command, handler.path, body or None, passed)
            response = upstream.getresponse()
            exchange.status = response.status
            exchange.answer_headers = {name.lower(): value for name, value in response.getheaders()}
            handler.send_response_only(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP_HEADERS:
                    handler.send_header(name, value)
            handler.send_header("connection", "close")
            handler.end_headers()
            while piece := response.read1(PIECE_BYTES):
                exchange.answer += piece
                handler.wfile.write(piece)
                handler.wfile.flush()
            exchange.ended = True
        except (OSError, http.client.HTTPException) as error:
            exchange.broken = repr(error)  # the client's connection is closed, as it would have been without a relay
        finally:
            upstream.close()

    @contextmanager
    def running(self) -> Iterator["Recorder"]:
        """Relays until the end of the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def _body(handler: BaseHTTPRequestHandler, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return handler.rfile.read(int(headers.get("content-length", "0")))
    pieces: list[bytes] = []
    while size := int(handler.rfile.readline().partition(b";")[0], 16):
        pieces.append(handler.rfile.read(size))
        handler.rfile.readline()
    while handler.rfile.readline().strip():
        """Trailers are dropped."""
    return b"".join(pieces)
