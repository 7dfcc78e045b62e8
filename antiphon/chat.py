"""`antiphon chat`: a conversation in the terminal with any server that implements OpenAI's chat completions API.

Uses only the HTTP client of the standard library. Answers are always streamed. If the connection breaks, the answer
continues on a new connection, provided that the server can resume streams. The whole conversation is kept and sent with
each request.
"""

import argparse
import contextlib
import http.client
import json
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from antiphon import resumable
from shared.config import SettingsError
from shared.request.data_urls import data_url

TIMEOUT_S = 600.0
_JSON_MAX = 1 << 20


class ServerError(Exception):
    """The server could not be reached, or answered with an error (the exception's text is the body)."""


class Piece(NamedTuple):
    """New text of an answer.

    `is_reasoning`: it is part of the model's reasoning, which is printed but not sent back.
    """

    text: str
    is_reasoning: bool = False


class Client:
    """An HTTP client for one server, which is given as `http://HOST:PORT`, with or without `/v1`.

    `token` is sent as API key. Raises SettingsError for an invalid URL.
    """

    def __init__(self, server: str, token: str | None = None) -> None:
        url = urllib.parse.urlsplit(server if "//" in server else f"http://{server}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise SettingsError(f"--server: {server!r} is no URL like http://127.0.0.1:8000")
        self._url = url
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "X-Antiphon-Resumable": "1"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def first_model(self) -> str:
        """Returns the name of the server's first model (`/v1/models`). Raises ServerError."""
        with self._ask("GET", "/v1/models", None) as response:
            return str(json.loads(response.read(_JSON_MAX))["data"][0]["id"])

    def get(self, path: str) -> bytes:
        """Returns the body of the answer to a GET request. Raises ServerError."""
        with self._ask("GET", path, None) as response:
            return response.read()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Returns the body of the answer to a POST request. Raises ServerError."""
        with self._ask("POST", path, body) as response:
            return response.read()

    def stream(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Yields the pieces of one answer. Raises ServerError, also in the middle of the answer."""
        with self._readable():
            yield from pieces(self._events("/v1/chat/completions", body))

    def stream_text(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Yields the text of a streamed completion. Raises ServerError, also in the middle of the answer."""
        with self._readable():
            for event in decoded(self._events(path, body)):
                yield from (choice["text"] for choice in event["choices"])

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        def ask(more: Mapping[str, str]) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
            return self._connected("POST", path, {**body, "stream": True}, more)

        return resumable.events(ask)

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        with self._readable(), self._connected(method, path, body, {}) as response:
            yield response

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Raises ServerError for every failure of the connection or the server."""
        try:
            yield
        except resumable.RefusedError as error:
            raise ServerError(str(error)) from error
        except (OSError, http.client.HTTPException, resumable.BrokenStreamError) as error:
            raise ServerError(f"no connection to {self._url.geturl()}: {error}") from error

    @contextlib.contextmanager
    def _connected(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, data, {**self._headers, **headers})
            response = connection.getresponse()
            if response.status != 200:
                raise resumable.RefusedError(response.status, readable(response.read(_JSON_MAX)))
            yield response
        finally:
            connection.close()


def pieces(events: Iterator[bytes]) -> Iterator[Piece]:
    """Yields the pieces of text in the events of a stream until `[DONE]`. Raises ServerError for an error event."""
    for event in decoded(events):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if text := delta.get("reasoning") or delta.get("reasoning_content"):
                yield Piece(text, is_reasoning=True)
            if text := delta.get("content"):
                yield Piece(text)


def decoded(events: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream as objects until `[DONE]`. Raises ServerError for an error event."""
    for data in events:
        if data == resumable.DONE:
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(readable(data))
        yield event


def readable(body: bytes) -> str:
    """Returns the body of an error as indented JSON, or unchanged if the body is not JSON."""
    try:
        return json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    except ValueError:
        return body.decode("utf-8", "replace")


def run(client: Client, options: argparse.Namespace, read: Callable[[str], str] = input) -> int:
    """Runs the conversation until the end of the input or Ctrl-C. Returns 0, or 1 after an error of the server.

    The pictures in `options.image` are sent with the first message. Raises SettingsError if one cannot be read.
    """
    pictures = [{"type": "image_url", "image_url": {"url": _image(path)}} for path in options.image or ()]
    messages: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    try:
        body = {
            "model": options.model or client.first_model(),
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
        }
        while (text := _ask_user(read)) is not None:
            content = [*pictures, {"type": "text", "text": text}] if pictures else text
            messages.append({"role": "user", "content": content})
            pictures = []
            messages.append({"role": "assistant", "content": _answer(client, {**body, "messages": messages})})
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _image(path: Path) -> str:
    try:
        return data_url(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"--image: {path} cannot be read: {error.strerror}") from None


def _ask_user(read: Callable[[str], str]) -> str | None:
    try:
        return read("User: ")
    except EOFError:
        print()
        return None


def _answer(client: Client, body: dict[str, Any]) -> str:
    print("Assistant: ", end="", flush=True)
    answer, reasoning = "", False
    for piece in client.stream(body):
        if piece.is_reasoning != reasoning:
            reasoning = piece.is_reasoning
            print("[reasoning] " if reasoning else "\n[answer] ", end="")
        print(piece.text, end="", flush=True)
        answer += "" if reasoning else piece.text
    print()
    return answer
