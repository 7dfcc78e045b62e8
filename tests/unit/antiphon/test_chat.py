"""The terminal client against a real HTTP server that records what it is asked."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from antiphon import chat
from antiphon.cli import make_parser
from antiphon.client import Client, ServerError
from antiphon.shared.flags import SettingsError

STREAM = (
    b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    b": comment\n\n"
    b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
    b"data: [DONE]\n\n"
)


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str | None, dict | None]]] = []
    refusal: ClassVar[bytes] = b""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.note(None)
        self.answer(200, b'{"data": [{"id": "demo"}]}')

    def do_POST(self) -> None:
        self.note(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(401 if self.refusal else 200, self.refusal or STREAM)

    def note(self, body: dict | None) -> None:
        self.asked.append((self.path, self.headers.get("Authorization"), body))

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "asked", [])
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


def talk(server: str, said: list[str], *words: str) -> int:
    options = make_parser()[0].parse_args(["chat", "--server", server, *words])
    waiting = iter(said)

    def read(prompt: str) -> str:
        sys.stdout.write(prompt)
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    return chat.run(Client(options.server, options.token), options, read)


@pytest.mark.spec("S-DEP-043")
def test_the_conversation_streams_and_its_whole_history_is_sent_each_time(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(server, ["Hi", "More"], "--system", "Be brief", "--max-tokens", "9", "--top-p", "0.5") == 0
    assert capsys.readouterr().out == "User: Assistant: Hello\nUser: Assistant: Hello\nUser: \n"
    body = Handler.asked[-1][2]
    assert body == {
        "model": "demo",
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.5,
        "stream": True,
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "More"},
        ],
    }


def test_images_are_sent_with_the_first_message(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff file")
    assert talk(server, ["Look", "More"], "--image", f"{tmp_path}/a.jpg") == 0
    body = Handler.asked[-1][2]
    assert body is not None
    first, _, second = body["messages"]
    image, text = first["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert (text, second["content"]) == ({"type": "text", "text": "Look"}, "More")
    with pytest.raises(SettingsError, match=r"b\.png cannot be read"):
        talk(server, ["Look"], "--image", f"{tmp_path}/b.png")


@pytest.mark.spec("S-DEP-043")
def test_without_a_token_there_is_no_authorization_header_and_with_one_there_is(server: str) -> None:
    talk(server, ["Hi"])
    talk(f"{server}/v1", ["Hi"], "--token", "key-1")
    assert [asked[1] for asked in Handler.asked] == [None, None, "Bearer key-1", "Bearer key-1"]
    assert {asked[0] for asked in Handler.asked} == {"/v1/models", "/v1/chat/completions"}


@pytest.mark.spec("S-DEP-043")
def test_an_error_is_printed_as_json_and_ends_the_conversation(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "refusal", b'{"error": {"message": "wrong key"}}')
    assert talk(server, ["Hi", "never asked"]) == 1
    assert json.loads(capsys.readouterr().err) == {"error": {"message": "wrong key"}}


def test_reasoning_is_shown_and_not_sent_back(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thought = b'data: {"choices": [{"delta": {"reasoning": "Hm.", "reasoning_content": "Hm."}}]}\n\n'
    monkeypatch.setitem(globals(), "STREAM", thought + STREAM)
    assert talk(server, ["Hi", "More"]) == 0
    said = "Assistant: [reasoning] Hm.\n[answer] Hello\n"
    assert capsys.readouterr().out == f"User: {said}User: {said}User: \n"
    asked = Handler.asked[-1][2]
    assert asked is not None
    assert asked["messages"][1] == {"role": "assistant", "content": "Hello"}


def test_no_server_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("http://127.0.0.1:1", ["Hi"]) == 1
    assert "no connection to http://127.0.0.1:1" in capsys.readouterr().err


def test_an_error_in_the_middle_of_a_stream_is_an_error(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"choices": [{"delta": {"content": "a"}}]}
    lost = b'data: {"error": {"message": "lost"}}\n\n'
    monkeypatch.setitem(globals(), "STREAM", b"data: " + json.dumps(first).encode() + b"\n\n" + lost)
    got = Client(server).stream("/v1/chat/completions", {})
    assert next(got) == first
    with pytest.raises(ServerError, match="lost"):
        next(got)


def test_a_completion_that_breaks_off_is_an_error_and_no_shorter_text(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, chunk = b'data: {"choices": [{"text": "Hel"}]}\n\n', {"choices": [{"text": "Hel"}]}
    monkeypatch.setitem(globals(), "STREAM", begun + b"data: [DONE]\n\n")
    assert list(Client(server).stream("/v1/requests/r/fork", {})) == [chunk]
    monkeypatch.setitem(globals(), "STREAM", begun)
    got = Client(server).stream("/v1/requests/r/fork", {})
    assert next(got) == chunk
    with pytest.raises(ServerError, match="the stream ended before its end"):
        next(got)


def test_a_server_that_is_no_url_is_refused() -> None:
    with pytest.raises(SettingsError, match="--server"):
        Client("ftp://host")
