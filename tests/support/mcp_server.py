"""A real MCP server over HTTP for tests, as a thread or as a process: logs the key of each call that it gets.

`python -m tests.support.mcp_server LOG [SECONDS]` prints its port; LOG gets a line of JSON for each call that it
carries out, before its answer, which takes so many seconds, that of `add` ten times as many. A call of `look_up` whose
key it knows is not carried out again: it gets the first result.
Its tools: `add` (not idempotent) and `look_up` (idempotent). How it misbehaves is set by `Behaviour`.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NUMBER: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "add", "description": "Adds to a sum.", "inputSchema": NUMBER},
    {"name": "look_up", "inputSchema": NUMBER, "annotations": {"readOnlyHint": True}},
]


@dataclass
class Behaviour:
    """What the server does wrong, and the calls that it has got."""

    tools: Any = field(default_factory=lambda: TOOLS)
    streams: bool = False
    """Whether it answers with events."""
    raw: bytes | None = None
    """The bytes of the answer to a call in place of JSON."""
    breaks: int = 0
    """The connections that it ends in place of an answer."""
    delay_s: float = 0.0
    redirects_to: str = ""
    status: int = 200
    is_error: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    log: Path | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    @property
    def keys(self) -> list[str]:
        return [call["key"] for call in self.calls]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour
    lock = threading.Lock()

    def do_POST(self) -> None:
        given = self.behaviour
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given.headers.append(dict(self.headers.items()))
        if given.redirects_to:
            self._send(307, b"", Location=given.redirects_to)
        elif "id" not in message:
            self._send(202, b"")
        elif message["method"] == "initialize":
            result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            self._answer(message, result, **{"Mcp-Session-Id": "session-1"})
        elif message["method"] == "tools/list":
            self._answer(message, {"tools": given.tools})
        else:
            self._call(message)

    def _call(self, message: Any) -> None:
        given, params = self.behaviour, message["params"]
        assert self.headers["Mcp-Session-Id"] == "session-1"
        call = {"name": params["name"], "arguments": params["arguments"], "key": self.headers["Idempotency-Key"]}
        assert params["_meta"]["antiphon-idempotency-key"] == call["key"]
        with self.lock:
            is_known = call["name"] == "look_up" and given.log is not None and call["key"] in given.keys
            given.calls.append(call)
            if given.log is not None and not is_known:
                with given.log.open("a") as file:
                    file.write(json.dumps(call) + "\n")
        given.begun.set()
        time.sleep(given.delay_s * (10 if given.log is not None and call["name"] == "add" else 1))
        if given.breaks:
            given.breaks -= 1
            self.close_connection = True
            return
        if given.raw is not None:
            self.wfile.write(given.raw.replace(b"%d", str(message["id"]).encode()))
            self.close_connection = True
            return
        text = json.dumps({"sum": params["arguments"].get("n")})
        self._answer(message, {"content": [{"type": "text", "text": text}], "isError": given.is_error})

    def _answer(self, message: Any, result: Any, **headers: str) -> None:
        data = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        if not self.behaviour.streams:
            self._send(self.behaviour.status, data, **{"Content-Type": "application/json", **headers})
            return
        progress = b'event: message\ndata: {"jsonrpc":"2.0","method":"notifications/progress"}\n\n'
        event = b": hello\n\n" + progress + b"event: message\ndata: " + data + b"\n\n"
        self._send(self.behaviour.status, event, **{"Content-Type": "text/event-stream; charset=utf-8", **headers})

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up in these tests."""


def server_of(behaviour: Behaviour) -> Server:
    return Server(("127.0.0.1", 0), type("Bound", (Handler,), {"behaviour": behaviour}))


@contextlib.contextmanager
def running(behaviour: Behaviour) -> Iterator[str]:
    """Runs a server on a thread; gives its URL."""
    server = server_of(behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mcp"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    behaviour = Behaviour(log=Path(sys.argv[1]), delay_s=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    server = server_of(behaviour)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
