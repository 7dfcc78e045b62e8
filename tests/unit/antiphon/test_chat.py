"""The terminal client against a real HTTP server that records what it is asked."""

import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from antiphon.chat import slash
from antiphon.chat.answers import Answer, Piece
from antiphon.chat.conversation import conversation_of
from antiphon.chat.session import Session
from antiphon.cli import make_parser
from antiphon.client import Client, ServerError
from antiphon.commands.command import client_of
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
    """Runs a conversation in which the user says this. An exception among the words is raised in place of a line."""
    options = make_parser()[0].parse_args(["chat", "--server", server, *words])
    waiting = iter(said)

    def read(_prompt: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    client = client_of(options)
    return Session(client, conversation_of(options, client.first_model()), read, slash.run).run()


def messages() -> list[dict]:
    body = Handler.asked[-1][2]
    assert body is not None
    return body["messages"]


@pytest.mark.spec("S-DEP-043")
def test_the_conversation_streams_and_its_whole_history_is_sent_each_time(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(server, ["Hi", "", "More"], "--system", "Be brief", "--max-tokens", "9", "--top-p", "0.5") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["Hello", "Hello", ""]
    body = Handler.asked[-1][2]
    assert body == {
        "model": "demo",
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
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
    first, _, second = messages()
    image, text = first["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert (text, second["content"]) == ({"type": "text", "text": "Look"}, "More")
    with pytest.raises(SettingsError, match=r"b\.png cannot be read"):
        talk(server, ["Look"], "--image", f"{tmp_path}/b.png")
    assert talk(server, ["Look", f"/image {tmp_path}/b.png", f"/image {tmp_path}/a.jpg", "Again"]) == 0
    assert [part["type"] for part in messages()[2]["content"]] == ["image_url", "text"]
    assert "b.png cannot be read" in capsys.readouterr().err


@pytest.mark.spec("S-DEP-043")
def test_without_a_token_there_is_no_authorization_header_and_with_one_there_is(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(server, ["Hi"])
    talk(f"{server}/v1", ["Hi"], "--token", "key-1")
    assert [asked[1] for asked in Handler.asked] == [None, None, "Bearer key-1", "Bearer key-1"]
    assert {asked[0] for asked in Handler.asked} == {"/v1/models", "/v1/chat/completions"}
    (tmp_path / "key").write_text("key-2\n")
    talk(server, ["Hi"], "--api-key", f"@{tmp_path}/key")
    monkeypatch.setenv("ANTIPHON_API_KEY", "key-3")
    talk(server, ["Hi"])
    assert [asked[1] for asked in Handler.asked][-3::2] == ["Bearer key-2", "Bearer key-3"]


@pytest.mark.spec("S-DEP-043")
def test_an_error_is_told_and_the_conversation_goes_on(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = b'{"error": {"message": "wrong key", "code": "invalid_api_key", "param": "model"}}'
    monkeypatch.setattr(Handler, "refusal", refusal)
    assert talk(server, ["Hi", "More"]) == 0
    assert capsys.readouterr().err == "error: wrong key [invalid_api_key, parameter model]\n" * 2
    assert messages() == [{"role": "user", "content": "More"}]


def test_an_unanswered_question_can_be_asked_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "refusal", b"{}")
    options = make_parser()[0].parse_args(["chat", "--server", server])
    waiting = iter(["Hi", "/retry", "/retry"])

    def read(_prompt: str) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        if Handler.asked:
            Handler.refusal = b""
        return line

    session = Session(client_of(options), conversation_of(options, "demo"), read, slash.run)
    assert session.run() == 0
    assert [one["content"] for one in session.conversation.messages] == ["Hi", "Hello"]
    assert len(session.answers) == 2


def test_reasoning_is_shown_and_not_sent_back(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thought = b'data: {"choices": [{"delta": {"reasoning": "Hm.", "reasoning_content": "Hm."}}]}\n\n'
    monkeypatch.setitem(globals(), "STREAM", thought + STREAM)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert talk(server, ["Hi", "More"]) == 0
    assert capsys.readouterr().out.count("\x1b[2mHm.\x1b[0m\n\nHello\n") == 2
    assert messages()[1] == {"role": "assistant", "content": "Hello"}


def test_control_characters_of_a_model_do_not_reach_the_terminal(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    escape = {"choices": [{"delta": {"content": "\x1b]0;title\x07\x9b2Ja\tb\n"}}]}
    monkeypatch.setitem(globals(), "STREAM", b"data: " + json.dumps(escape).encode() + b"\n\n" + STREAM)
    talk(server, ["Hi"])
    told = capsys.readouterr().out
    assert "\ufffd]0;title\ufffd\ufffd2Ja\tb\n" in told
    assert not {"\x1b", "\x07", "\x9b"} & set(told)


def test_ctrl_c_keeps_what_has_arrived(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Answer):
        def read(self, chunks: Iterable[dict[str, Any]]) -> Iterator[Piece]:
            for piece in super().read(chunks):
                yield piece
                raise KeyboardInterrupt

    monkeypatch.setattr("antiphon.chat.session.Answer", Interrupted)
    assert talk(server, ["Hi", "More"]) == 0
    assert [one["content"] for one in messages()] == ["Hi", "Hel", "More"]


def test_settings_and_the_system_message_change_during_the_conversation(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["/set temperature 0", "/set top_k 5", "/set stop END", "/set seed x", "/set nothing 1", "/set top_p none"]
    said += ["/system Be kind.", "/settings", "//path", "/model", "/model other", "/system none", "Hi"]
    assert talk(server, said, "--response-format", '{"type": "json_object"}') == 0
    body = Handler.asked[-1][2]
    assert body is not None
    assert body["messages"] == [
        {"role": "user", "content": "/path"}, {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Hi"},
    ]  # fmt: skip
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.0, 5, ["END"])
    assert body["response_format"] == {"type": "json_object"}
    assert "top_p" not in body
    told = capsys.readouterr()
    assert "system message: Be kind." in told.out
    assert "* demo" in told.out
    for part in ("seed: x is not a whole number", "there is no setting nothing", "the server has no model other"):
        assert part in told.err


def test_a_file_that_is_no_conversation_is_refused(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").write_text('[{"role": "user", "content": "before"}]')
    for name, text in (("a", "{"), ("b", "[1]"), ("c", '{"messages": [], "settings": {"x": 1}}')):
        (tmp_path / name).write_text(text)
    said = [f"/load {tmp_path}/{name}" for name in ("none", "a", "b", "c", "list")]
    assert talk(server, [*said, "Hi"]) == 0
    assert [one["content"] for one in messages()] == ["before", "Hi"]
    told = capsys.readouterr().err
    assert told.count("is no conversation") == 3
    assert "No such file" in told


def test_every_command_is_in_the_help(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(server, ["/help", "/save", "/bye", "never said"]) == 0
    told = capsys.readouterr()
    assert [name for name in slash.COMMANDS if f"  {name} " not in told.out] == []
    assert "write /save FILE" in told.err
    assert [asked[0] for asked in Handler.asked] == ["/v1/models"]


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
