"""Reads OpenAI event streams, and resumes them when the connection breaks or the server's gateway dies.

    for chunk in stream("http://127.0.0.1:8000/v1/chat/completions", {"messages": [...]}):
        print(chunk["choices"][0]["delta"].get("content", ""), end="")

A server that can resume a stream gives each event an id. The request is then sent again with the id of the last event,
and the rest of the stream follows. With a server that sends no ids, a broken stream is an error, as with any other
client: the repeated request could give another answer. Uses only the HTTP client of the standard library.
"""

import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

TIMEOUT_S = 600.0
"""Longest silence of a server, seconds. In a waiting stream the server sends comments."""
GIVE_UP_S = 60.0
"""Seconds after a broken connection during which the client tries to resume the stream."""
_PAUSES_S = (0.1, 2.0)
"""Shortest and longest pause between two attempts, seconds."""
_TEMPORARY = frozenset({409, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed: another gateway may answer it."""
DONE = b"[DONE]"
Ask = Callable[[Mapping[str, str]], AbstractContextManager[http.client.HTTPResponse]]
"""Sends the request with additional headers. Raises OSError, HTTPException or RefusedError."""


class RefusedError(Exception):
    """The server has answered with an error. The text is the body of the answer."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


class BrokenStreamError(Exception):
    """A stream is incomplete and cannot be resumed."""


class _Event(NamedTuple):
    data: bytes
    id: str


def stream(
    url: str, body: Mapping[str, Any], *, api_key: str = "", headers: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the chunks of one answer. `url`: the endpoint's URL. `stream` is added to `body`.

    Raises RefusedError if the server refuses the request or ends the stream with an error, BrokenStreamError if the
    stream breaks and cannot be resumed.
    """
    place = urllib.parse.urlsplit(url)
    own = {"Content-Type": "application/json", "X-Antiphon-Resumable": "1", **(headers or {})}
    own |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = json.dumps({**body, "stream": True})

    @contextlib.contextmanager
    def ask(more: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.hostname or "", place.port, timeout=TIMEOUT_S)
        try:
            path = place.path + (f"?{place.query}" if place.query else "")
            connection.request("POST", path, data, {**own, **more})
            response = connection.getresponse()
            if response.status != 200:
                raise RefusedError(response.status, response.read().decode("utf-8", "replace"))
            yield response
        finally:
            connection.close()

    for event in events(ask):
        if event != DONE:
            chunk = json.loads(event)
            if "error" in chunk:
                raise RefusedError(200, event.decode())
            yield chunk


def events(ask: Ask, *, give_up_s: float = GIVE_UP_S) -> Iterator[bytes]:
    """Yields the data of the events of a stream, up to and with `[DONE]`, over several connections if necessary.

    Raises what `ask` raises, and BrokenStreamError.
    """
    last, pause_s = "", _PAUSES_S[0]
    broken_at: float | None = None
    started = False
    while True:
        try:
            with ask({"Last-Event-ID": last} if last else {}) as response:
                for event in _read(response):
                    last, pause_s, broken_at, started = event.id or last, _PAUSES_S[0], None, True
                    yield event.data
                    if event.data == DONE:
                        return
            problem: Exception = BrokenStreamError("the stream ended before its end")
        except RefusedError as error:
            if not last or error.status not in _TEMPORARY:
                raise
            problem = error
        except (OSError, http.client.HTTPException) as error:
            if not started:
                raise
            problem = error
        broken_at = time.monotonic() if broken_at is None else broken_at
        if not last or time.monotonic() - broken_at > give_up_s:
            raise BrokenStreamError(str(problem) or type(problem).__name__) from problem
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])


def _read(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[_Event]:
    """Yields whole events. An event cut off by the end of the connection is omitted; the server sends it again."""
    data, event_id = b"", ""
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data += value
        elif name == b"id":
            event_id = value.decode("ascii", "replace")
        elif not line.strip() and data:
            yield _Event(data, event_id)
            data, event_id = b"", ""
