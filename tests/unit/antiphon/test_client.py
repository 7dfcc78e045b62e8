"""The helpers that resume streams, in Python and in JavaScript, against a server whose connections break."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from antiphon.client import ServerError, stream

ROOT = Path(__file__).resolve().parents[3]
NODE = shutil.which("node")
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def event(text: str, event_id: str = "") -> str:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return (f"id: {event_id}\n" if event_id else "") + f"data: {json.dumps(chunk)}\n\n"


class Server:
    """Answers its n-th connection with the n-th of its answers, whatever it is asked, and closes the connection."""

    def __init__(self, *answers: str | tuple[int, str]) -> None:
        self.asked: list[str] = []
        self.lines: list[str] = []
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/chat/completions"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed before all answers were asked for
                return
            with connection, connection.makefile("rb") as lines:
                head = iter(lines.readline, b"\r\n")
                headers = b"".join(head).decode().lower()
                length = next((line for line in headers.splitlines() if line.startswith("content-length")), ":0")
                lines.read(int(length.partition(":")[2]))
                self.asked.append(headers)
                self.lines.append(headers.partition("\r\n")[0])
                status, body = (200, answer) if isinstance(answer, str) else answer
                # The announced length never arrives if the stream breaks.
                size = len(body) if body.endswith("[DONE]\n\n") or status != 200 else len(body) + 1
                start = f"HTTP/1.1 {status} X\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
                connection.sendall(start.encode() + body.encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes the thread; an error if it is not waiting
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def broken() -> Iterator[Server]:
    """Breaks behind an event, in the middle of one, and is not there for a moment."""
    server = Server(
        event("one ", "r:1.4") + ": keep-alive\n\n",
        (503, '{"error": {}}'),
        event("two ", "r:2.8") + event("three", "r:3.13")[:-9],
        event("three", "r:3.13") + "id: r:c1\ndata: [DONE]\n\n",
    )
    yield server
    server.close()


def sent_ids(server: Server) -> list[str]:
    found = [[line for line in headers.splitlines() if line.startswith("last-event-id")] for headers in server.asked]
    return [lines[0].partition(": ")[2] if lines else "" for lines in found]


def test_a_stream_goes_on_behind_its_last_whole_event(broken: Server) -> None:
    text = [chunk["choices"][0]["delta"]["content"] for chunk in stream(broken.url, BODY)]
    assert text == ["one ", "two ", "three"]
    assert sent_ids(broken) == ["", "r:1.4", "r:1.4", "r:2.8"]


def test_who_stops_reading_ends_the_stream_on_the_server() -> None:
    server = Server(event("one ", "r:1.4"), (200, "{}"))
    chunks = stream(server.url, BODY)
    next(chunks)
    assert isinstance(chunks, Generator)
    chunks.close()
    server.close()
    assert server.lines == ["post /v1/chat/completions http/1.1", "delete /v1/streams/r http/1.1"]


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_helper_for_javascript_does_the_same(broken: Server) -> None:
    program = ROOT / "examples/resumable-stream.mjs"
    environ = {**os.environ, "OPENAI_BASE_URL": broken.url.removesuffix("/chat/completions")}
    done = subprocess.run(
        [str(NODE), str(program)], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "one two three\n"), done.stderr
    assert sent_ids(broken) == ["", "r:1.4", "r:1.4", "r:2.8"]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([event("one")], "IncompleteRead|before its end"),
        ([event("one", "r:1.3"), (404, "gone")], "gone"),
        ([(503, "busy")], "busy"),
        (['data: {"error": {"message": "failed"}}\n\n'], "failed"),
    ],
)
def test_a_stream_that_cannot_go_on_is_an_error(answers: list[str | tuple[int, str]], error: str) -> None:
    server = Server(*answers)
    try:
        with pytest.raises(ServerError, match=error):
            list(stream(server.url, BODY))
    finally:
        server.close()
