"""The HTTP client of all commands, and of programs that read OpenAI event streams.

    for chunk in stream("http://127.0.0.1:8000/v1/chat/completions", {"messages": [...]}):
        print(chunk["choices"][0]["delta"].get("content", ""), end="")

If the connection breaks or the server's gateway dies, a stream is resumed. A server that can resume a stream gives each
event an id: the request is sent again with the id of the last event, and the rest of the stream follows. With a server
that sends no ids, a broken stream is an error, as with any other client: the repeated request could give another
answer. Uses only the HTTP client of the standard library; `antiphon.async_client` is the client for many requests at
once.
"""

import contextlib
import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import CommandError, Exit

TIMEOUT_S = 600.0
"""Longest silence of a server, seconds. In a waiting stream the server sends comments."""
GIVE_UP_S = 60.0
"""Seconds after a broken connection during which the client tries to resume the stream."""
_PAUSES_S = (0.1, 2.0)
"""Shortest and longest pause between two attempts, seconds."""
_TEMPORARY = frozenset({409, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed: another gateway may answer it."""
_DONE = b"[DONE]"
_PIECE_BYTES = 2**20


class ServerError(CommandError):
    """The server could not be reached, has answered with an error, or has broken off a stream.

    The text is the server's sentence. `status` is the HTTP status of a refusal, else 0. `details` has the fields of the
    server's error.
    """

    def __init__(self, message: str, status: int = 0, details: dict[str, Any] | None = None) -> None:
        super().__init__(message, details)
        self.status = status
        if status == http.client.NOT_FOUND:
            self.exit_code = Exit.NOT_FOUND


class NoConnectionError(ServerError):
    """Nothing answers at the address."""

    exit_code = Exit.UNREACHABLE


class _Event(NamedTuple):
    data: bytes
    id: str


class Client:
    """A client of one server, which is given as `http://HOST:PORT`, with or without `/v1`. Has no open connections.

    `token` is sent as API key, `headers` with every request. Raises SettingsError, which begins with `flag`, for an
    invalid URL.
    """

    def __init__(
        self,
        server: str,
        token: str | None = None,
        *,
        flag: str = "--server",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._url = server_url(server, flag)
        self._prefix = self._url.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s

    @contextlib.contextmanager
    def exchange(
        self, method: str, path: str, data: bytes | BinaryIO | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and gives the response, whatever its status. Raises OSError or HTTPException."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout_s)
        try:
            connection.request(method, self._prefix + path, data, {**self._headers, **(headers or {})})
            yield connection.getresponse()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """Returns the decoded answer to a GET request. Raises ServerError."""
        with self._failures(), self._accepted("GET", path) as response:
            return json.loads(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the decoded answer to a POST request. Raises ServerError."""
        with self._failures(), self._accepted("POST", path, json.dumps(body).encode()) as response:
            return json.loads(response.read())

    def delete(self, path: str) -> Any:
        """Returns the decoded answer to a DELETE request. Raises ServerError."""
        with self._failures(), self._accepted("DELETE", path) as response:
            return json.loads(response.read())

    def download(self, path: str, headers: Mapping[str, str]) -> Iterator[bytes]:
        """Yields the answer to a GET request, piece by piece. Raises ServerError, also if it is broken off."""
        with self._failures(), self._accepted("GET", path, headers=headers) as response:
            while piece := response.read(_PIECE_BYTES):
                yield piece

    def upload(self, path: str, file: BinaryIO, headers: Mapping[str, str]) -> Any:
        """Sends a file as the body of a POST request. Returns the decoded answer. Raises ServerError."""
        size = os.fstat(file.fileno()).st_size
        with self._failures(), self._accepted("POST", path, file, {**headers, "Content-Length": str(size)}) as response:
            return json.loads(response.read())

    def first_model(self) -> str:
        """Returns the name of the server's first model (`/v1/models`). Raises ServerError."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise ServerError("the server lists no model: name one with --model") from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the chunks of one streamed answer. Raises ServerError, also in the middle of the answer."""
        data = json.dumps({**body, "stream": True}).encode()
        with self._failures():
            for event in self._events(path, data):
                chunk = json.loads(event)
                if "error" in chunk:
                    raise _refusal(event)
                yield chunk

    def _events(self, path: str, data: bytes) -> Iterator[bytes]:
        """Yields the data of the events before `[DONE]`. If the caller stops before, the server stops, too."""
        position = [""]
        try:
            yield from self._resumed_events(path, data, position)
        except (GeneratorExit, KeyboardInterrupt):
            # Without this the stream would go on for a while, because it can be resumed.
            if stream_id := position[0].partition(":")[0]:
                with (
                    contextlib.suppress(OSError, http.client.HTTPException),
                    self.exchange("DELETE", f"/v1/streams/{stream_id}"),
                ):
                    pass
            raise

    def _resumed_events(self, path: str, data: bytes, position: list[str]) -> Iterator[bytes]:
        """Yields the data of the events, over several connections if necessary. Sets `position[0]` to the last id."""
        last, pause_s = "", _PAUSES_S[0]
        broken_at: float | None = None
        started = False
        while True:
            more = {"X-Antiphon-Resumable": "1"} | ({"Last-Event-ID": last} if last else {})
            try:
                with self._accepted("POST", path, data, more) as response:
                    for event in _whole_events(response):
                        last, pause_s, broken_at, started = event.id or last, _PAUSES_S[0], None, True
                        position[0] = last
                        if event.data == _DONE:
                            return
                        yield event.data
                problem: Exception = ServerError("the stream ended before its end")
            except ServerError as error:
                if not last or error.status not in _TEMPORARY:
                    raise
                problem = error
            except (OSError, http.client.HTTPException) as error:
                if not started:
                    raise
                problem = error
            broken_at = time.monotonic() if broken_at is None else broken_at
            if not last or time.monotonic() - broken_at > GIVE_UP_S:
                raise ServerError(str(problem) or type(problem).__name__) from problem
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    @contextlib.contextmanager
    def _accepted(
        self, method: str, path: str, data: bytes | BinaryIO | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with self.exchange(method, path, data, headers) as response:
            if response.status != 200:
                raise _refusal(response.read(), response.status)
            yield response

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except json.JSONDecodeError as error:
            raise ServerError(f"{self._url.geturl()} answers with something other than JSON: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error
            raise NoConnectionError(f"no connection to {self._url.geturl()}: {reason}") from error


def stream(
    url: str, body: Mapping[str, Any], *, api_key: str = "", headers: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the chunks of one answer. `url`: the endpoint's URL. `stream` is added to `body`.

    Raises ServerError if the server refuses the request or ends the stream with an error, or if the stream breaks and
    cannot be resumed.
    """
    place = urllib.parse.urlsplit(url)
    client = Client(f"{place.scheme}://{place.netloc}", api_key, headers=headers)
    return client.stream(place.path + (f"?{place.query}" if place.query else ""), body)


def server_url(server: str, flag: str, schemes: Sequence[str] = ("http", "https")) -> urllib.parse.SplitResult:
    """Returns the parts of a server's URL, which may lack `http://`. Raises SettingsError that begins with `flag`."""
    url = urllib.parse.urlsplit(server if "//" in server else f"http://{server}")
    if url.scheme not in schemes or not url.hostname:
        raise SettingsError(f"{flag}: {server!r} is no URL like http://127.0.0.1:8000")
    return url


def _refusal(body: bytes, status: int = 0) -> ServerError:
    """Returns the error that the body of an answer describes: the server's sentence, with code and parameter."""
    text = body.decode("utf-8", "replace").strip()
    try:
        found: Any = json.loads(text)
    except ValueError:
        return ServerError(text or f"the server answers with status {status}", status)
    error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return ServerError(error if isinstance(error, str) else text, status)
    fields: dict[str, Any] = {str(name): value for name, value in error.items()}
    message, param = str(fields.get("message") or text), fields.get("param")
    notes = [str(fields["code"])] if fields.get("code") else []
    notes += [f"parameter {param}"] if param and str(param) not in message else []
    return ServerError(message + (f" [{', '.join(notes)}]" if notes else ""), status, fields)


def _whole_events(lines: http.client.HTTPResponse) -> Iterator[_Event]:
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
