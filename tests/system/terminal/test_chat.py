"""`antiphon chat` in a real terminal: editing, history, Ctrl-C, commands, and errors that do not end it."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.served import ROOT, Served
from tests.system.terminal.conftest import Open

pytestmark = [pytest.mark.system, pytest.mark.nats]
SHORT = ("--temperature=0", "--max-tokens=5")
LONG = ("--temperature=0", "--max-tokens=16000")
FIGURES = " · first after"


def chat(served: Served, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "antiphon", "chat", "--server", served.url, *words]
    return subprocess.run(argv, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False, timeout=60)


def test_a_conversation_has_answers_with_figures_and_ends_with_ctrl_d(open_terminal: Open) -> None:
    terminal = open_terminal("chat", *SHORT, "--system=Be brief.")
    terminal.wait_for("tiny: /help lists the commands")
    terminal.line("Hello")
    terminal.wait_for("5 tokens · ")
    terminal.wait_for(FIGURES)
    terminal.line("")
    terminal.line("/stats")
    terminal.wait_for("1 answers, 5 tokens")
    terminal.line("/tokens")
    terminal.wait_for("of 16384 tokens after the last answer")
    terminal.keys("C-d")
    terminal.wait_for("exit 0\nicanon")


def test_ctrl_c_ends_the_answer_and_then_the_session(open_terminal: Open) -> None:
    terminal = open_terminal("chat", *LONG)
    terminal.wait_for(">>> ")
    terminal.line("Begin")
    terminal.wait_for(">>> Begin\n")
    terminal.wait_for_answer()
    terminal.keys("C-c")
    terminal.wait_for("stopped")
    terminal.line("/set max_tokens 3")
    terminal.line("Again")
    terminal.wait_for("3 tokens · ")
    terminal.keys("C-c")
    terminal.wait_for("Ctrl-C again or Ctrl-D ends")
    terminal.keys("C-c")
    terminal.wait_for("exit 0\nicanon")


def test_lines_are_edited_and_remembered_in_a_private_file(open_terminal: Open, tmp_path: Path) -> None:
    terminal = open_terminal("chat", *SHORT)
    terminal.wait_for(">>> ")
    terminal.keys("-l", "Helo")
    terminal.keys("Left", "l", "Enter")
    terminal.wait_for(FIGURES)
    assert ">>> Hello\n" in terminal.text
    terminal.keys("Up", "Enter")
    terminal.wait_for(FIGURES, 2)
    assert terminal.text.count(">>> Hello\n") == 2
    terminal.line("/exit")
    terminal.wait_for("exit 0")
    history = tmp_path / "antiphon" / "chat_history"
    assert history.read_text().splitlines() == ["Hello", "/exit"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    again = open_terminal("chat", *SHORT)
    again.wait_for(">>> ")
    again.keys("Up", "Up", "Enter")
    again.wait_for(FIGURES)
    assert ">>> Hello\n" in again.text


def test_an_error_does_not_end_the_conversation(open_terminal: Open) -> None:
    terminal = open_terminal("chat", *SHORT)
    terminal.wait_for(">>> ")
    terminal.line("/set temperature 9")
    terminal.line("Hello")
    terminal.wait_for("error: 'temperature' must be between 0 and 2")
    terminal.wait_for("/retry asks it again")
    terminal.line("/nonsense")
    terminal.wait_for("there is no command /nonsense")
    terminal.line("/set temperature 0")
    terminal.line("/retry")
    terminal.wait_for("5 tokens · ")
    terminal.keys("C-d")
    terminal.wait_for("exit 0")


def test_a_message_has_several_lines_and_is_saved(open_terminal: Open, tmp_path: Path) -> None:
    terminal = open_terminal("chat", *SHORT)
    terminal.wait_for(">>> ")
    for line in ('"""', "one", "", 'two"""'):
        terminal.line(line)
    terminal.wait_for(FIGURES)
    terminal.line("three \\")
    terminal.wait_for("... ", 4)
    terminal.line("four")
    terminal.wait_for(FIGURES, 2)
    terminal.line("/sy\tBe brief.")
    terminal.wait_for("system message: Be brief.")
    terminal.line(f"/save {tmp_path}/saved.json")
    terminal.wait_for("5 messages in")
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [one["content"] for one in saved["messages"] if one["role"] == "user"] == ["one\n\ntwo", "three \nfour"]
    terminal.line("/clear")
    terminal.line(f"/load {tmp_path}/saved.json")
    terminal.wait_for("5 messages from")
    terminal.line("/undo")
    terminal.wait_for("3 messages are left")


def test_colours_obey_the_variable(open_terminal: Open) -> None:
    coloured, plain = open_terminal("chat"), open_terminal("chat", NO_COLOR="1")
    for terminal in (coloured, plain):
        terminal.wait_for(">>> ")
    assert "\x1b[2mtiny" in coloured.styled
    assert "\x1b[" not in plain.styled


def test_one_question_and_a_pipe_print_only_the_answer(talker: Served) -> None:
    asked = chat(talker, *SHORT, "Hello", "there")
    piped = chat(talker, *SHORT, stdin="Hello there\n")
    assert (asked.returncode, piped.returncode) == (0, 0), asked.stderr + piped.stderr
    assert asked.stdout == piped.stdout
    assert "cut off" in asked.stderr
    answer = json.loads(chat(talker, *SHORT, "--json", "Hello there").stdout)
    assert answer["content"] == asked.stdout.removesuffix("\n")
    assert (answer["role"], answer["finish_reason"]) == ("assistant", "length")
    assert answer["usage"]["completion_tokens"] == 5
    both = json.loads(chat(talker, *SHORT, "--json", "Summarise", stdin="a long text\n").stdout)
    assert both["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("words", "stdin", "code", "said"),
    [
        ((), "", 2, "there is no question"),
        (("--server=http://127.0.0.1:1", "Hi"), "", 3, "no connection to http://127.0.0.1:1: Connection refused"),
        (("--model=none", "Hi"), "", 4, "none"),
        (("--temperature=9", "Hi"), "", 1, "'temperature' must be between 0 and 2"),
        (("--response-format={", "Hi"), "", 2, "--response-format: { is no JSON"),
    ],
)
def test_failures_have_their_exit_codes(
    talker: Served, words: tuple[str, ...], stdin: str, code: int, said: str
) -> None:
    done = chat(talker, *words, stdin=stdin)
    assert (done.returncode, done.stdout.strip()) == (code, "")
    assert said in done.stderr
    assert os.linesep * 2 not in done.stderr
