"""The address of the server and the API key, colour, and what a command says about an error."""

import argparse
import io
import json
from collections.abc import Mapping

import pytest

from antiphon.client import ServerError
from antiphon.commands.ending import guarded
from antiphon.commands.parser import Parser
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import DEFAULT, address_of, server_flags
from antiphon.terminal.exit_codes import CommandError, NotFoundError
from antiphon.terminal.output import has_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def options(*words: str) -> argparse.Namespace:
    parser = Parser(prog="x")
    server_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ((), {}, (DEFAULT, "--server", "")),
        (("--server=http://a",), {"ANTIPHON_SERVER": "http://b"}, ("http://a", "--server", "")),
        (("--url=http://a", "--token=k"), {"ANTIPHON_API_KEY": "l"}, ("http://a", "--server", "k")),
        ((), {"ANTIPHON_SERVER": "http://b", "ANTIPHON_API_KEY": "l"}, ("http://b", "ANTIPHON_SERVER", "l")),
        ((), {"ANTIPHON_SERVER": "", "OPENAI_BASE_URL": "http://c/v1"}, ("http://c/v1", "OPENAI_BASE_URL", "")),
        ((), {"OPENAI_BASE_URL": "http://c/v1", "OPENAI_API_KEY": "m"}, ("http://c/v1", "OPENAI_BASE_URL", "m")),
        ((), {"OPENAI_API_KEY": "m"}, (DEFAULT, "--server", "m")),
        (("--server=localhost:1",), {"OPENAI_API_KEY": "m"}, ("localhost:1", "--server", "m")),
        (("--server=http://far",), {"OPENAI_API_KEY": "m"}, ("http://far", "--server", "")),
        ((), {"ANTIPHON_API_KEY": "l", "OPENAI_API_KEY": "m"}, (DEFAULT, "--server", "l")),
    ],
)
def test_flags_come_before_variables_and_own_variables_before_those_of_openai(
    words: tuple[str, ...], environ: Mapping[str, str], expected: tuple[str, str, str]
) -> None:
    found = address_of(options(*words), environ)
    assert (found.server, found.source, found.api_key) == expected


def test_a_key_of_an_unreadable_file_is_an_error() -> None:
    with pytest.raises(SettingsError, match="--api-key: /none cannot be read"):
        address_of(options("--api-key=@/none"), {})


def test_a_variable_that_is_no_address_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from antiphon.cli import main

    monkeypatch.setenv("ANTIPHON_SERVER", "ftp://x")
    assert main(["top", "--once"]) == 2
    assert "ANTIPHON_SERVER: 'ftp://x' is no URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "0"}, True, False),
    ],
)
def test_colour_is_for_terminals(environ: Mapping[str, str], on_terminal: bool, elsewhere: bool) -> None:
    assert (has_colour(Terminal(), environ), has_colour(io.StringIO(), environ)) == (on_terminal, elsewhere)


@pytest.mark.parametrize(
    ("error", "starts_server", "code"),
    [
        (SettingsError("wrong"), False, 2),
        (SettingsError("wrong"), True, 78),
        (CommandError("failed"), False, 1),
        (NotFoundError("none"), False, 4),
        (ServerError("refused", 400), False, 1),
        (ServerError("none", 404), False, 4),
        (KeyboardInterrupt(), False, 130),
    ],
)
def test_an_error_has_the_exit_code_of_its_kind(
    error: BaseException, starts_server: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise error

    assert guarded(run, starts_server=starts_server) == code
    assert capsys.readouterr().err == (f"antiphon: {error}\n" if str(error) else "")


def test_an_error_in_json_has_the_fields_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise ServerError("No. [busy]", 401, {"message": "No.", "code": "busy", "param": None})

    assert guarded(run, as_json=True) == 1
    found = json.loads(capsys.readouterr().err)["error"]
    assert (found["message"], found["code"], found["exit_code"]) == ("No.", "busy", 1)
    assert "--api-key" in found["hints"][0]
