"""What every command has: a line in the overview, `--json`, an exit code for each kind of failure, and completion."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from antiphon.cli import main
from antiphon.commands.command import HELP_CHARS
from antiphon.commands.completion import script, tree_of
from antiphon.commands.parser import Parser
from antiphon.commands.tree import BY_NAME, COMMANDS, HEADINGS, make_parser

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "reference" / "command-line.md"
NOTHING = "http://127.0.0.1:1"
"""An address at which nothing listens."""
WITHOUT_JSON = {"serve", "run", "service", "start-role", "help", "completion"}
"""Commands that print no answer: they serve, or print text for people or shells."""
ASKING: Mapping[str, tuple[str, ...]] = {
    "chat": ("Hi",),
    "run-batch": ("in.jsonl", "out.jsonl"),
    "top": ("--once",),
    "watch": ("--once",),
    "trace": ("id",),
    "drain": ("engine-1",),
    "resume": ("engine-1",),
    "sleep": ("engine-1",),
    "wake": ("engine-1",),
    "models list": (),
    "models set": ("a=b",),
    "models shadow": ("a=b",),
    "models rollback": ("a",),
    "models load": ("a=b",),
    "models unload": ("a",),
    "replay": ("id",),
    "fork": ("id", "--at=1"),
    "record save": ("id", "file"),
    "session export": ("id", "file"),
    "session import": ("in.jsonl",),
    "session continue": ("sess_a",),
    "session list": (),
    "session delete": ("sess_a",),
    "bench serve": (),
}
"""Arguments of the commands that ask a server."""
LOCAL = {"complete", "pull", "list", "rm", "quantize", "plan", "doctor", "ranktable", "tools-path", "version"} | {
    "tap", "chaos", "bench latency", "bench throughput", "verify",
}  # fmt: skip
"""Commands that ask no server, or only one that they start, or one on this machine."""
REFUSED: Mapping[str, tuple[str, ...]] = {
    "chat": ("Hi", "--response-format={"),
    "complete": ("x", "--temperature=5"),
    "verify": ("day.jsonl", "--model=demo", "--sample=2"),
    "run-batch": ("none.jsonl", "out.jsonl"),
    "pull": ("/data/model",),
    "quantize": ("-i", "none", "-o", "out", "-quant_type", "awq", "-tp", "1", "-t", "bf16"),
    "plan": ("--gpu=none",),
    "doctor": ("--hf-overrides=7",),
    "ranktable": ("--mode=gen",),
    "top": ("--interval=0",),
    "watch": ("--interval=0",),
    "tap": ("--count=-1",),
    "trace": ("id", "--server=ftp://x"),
    "drain": ("engine-1", "--server=ftp://x"),
    "resume": ("engine-1", "--server=ftp://x"),
    "sleep": ("engine-1", "--level=3"),
    "wake": ("engine-1", "--server=ftp://x"),
    "models set": ("nothing",),
    "models shadow": ("a=b", "--share=2"),
    "models list": ("--server=ftp://x",),
    "models rollback": ("a", "--server=ftp://x"),
    "models load": ("a=b", "--set=max-model-len"),
    "models unload": ("a", "--server=ftp://x"),
    "replay": ("id", "--server=ftp://x"),
    "fork": ("id", "--at=1", "--server=ftp://x"),
    "record save": ("id", "file", "--server=ftp://x"),
    "session export": ("id", "file", "--key-file=none"),
    "session import": ("in.jsonl", "--key-file=none"),
    "session continue": ("sess_a", "--message=a", "--prompt=b"),
    "session list": ("--server=ftp://x",),
    "session delete": ("sess_a", "--server=ftp://x"),
    "bench serve": ("--num-prompts=0",),
    "bench latency": ("--batch-size=0",),
    "bench throughput": ("--num-prompts=0",),
    "chaos": ("--minutes=0",),
    "version": ("--nothing",),
    "tools-path": ("--nothing",),
    "list": ("--nothing",),
    "rm": ("--nothing",),
}
"""Arguments that cannot be used."""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setenv("ANTIPHON_SESSION_KEY", "0123456789abcdef")
    for name in ("ANTIPHON_SERVER", "ANTIPHON_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    body = {"model": "m", "prompt": "x"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")


def leaves() -> dict[str, Parser]:
    """The parsers that read flags, by the words of their commands."""
    found: dict[str, Parser] = {}
    for name, parser in make_parser()[1].items():
        kinds = parser.kinds()
        found |= {f"{name} {kind}": one for kind, one in kinds.items()} if kinds else {name: parser}
    return found


LEAVES = leaves()


def code_of(*words: str) -> int:
    try:
        return int(main(words))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_overview_has_one_line_for_each_command_and_no_two_alike() -> None:
    text = make_parser("")[0].format_help()
    assert all(f"\n{heading}:\n" in text for heading in HEADINGS.values())
    assert max(map(len, text.splitlines())) <= 90
    for command in COMMANDS:
        assert len(re.findall(rf"^  {command.name} ", text, re.M)) == 1
        assert 0 < len(command.help) <= HELP_CHARS, command.name
    assert len({command.help for command in COMMANDS}) == len(COMMANDS) == len(BY_NAME)


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_every_command_that_answers_does_so_in_json(name: str) -> None:
    assert ("--json" in LEAVES[name].options()) == (name.partition(" ")[0] not in WITHOUT_JSON)


def test_every_command_is_known_here() -> None:
    assert set(LEAVES) == set(ASKING) | LOCAL | WITHOUT_JSON, "say of a new command whether it asks a server"
    assert set(REFUSED) | WITHOUT_JSON == set(LEAVES), "give a new command arguments that cannot be used"


@pytest.mark.parametrize("name", sorted(ASKING))
def test_a_server_that_is_not_there_has_its_code_and_says_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "run-batch":
        monkeypatch.setattr("antiphon.batch.TRIES", 1)
        assert code_of(name, *ASKING[name], "--server", NOTHING, "--json") == 1
        assert json.loads(capsys.readouterr().out)["failed"] == 1
        return
    words = (*name.split(), *ASKING[name])
    assert code_of(*words, "--server", NOTHING) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert f"antiphon: no connection to {NOTHING}: Connection refused\n" in told.err
    assert "ANTIPHON_SERVER" in told.err
    for flag in ("--url", "--base-url"):
        assert code_of(*words, flag, NOTHING) == 3
    monkeypatch.setenv("ANTIPHON_SERVER", NOTHING)
    capsys.readouterr()
    assert code_of(*words, "--json") == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert json.loads(told.err)["error"]["exit_code"] == 3


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_wrong_arguments_have_their_code(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(*name.split(), *REFUSED[name]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.match(r"antiphon( [\w -]+)?: \S", told.err)


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_help_and_completion_have_every_flag(name: str) -> None:
    words = name.split()
    parser = LEAVES[name]
    text = parser.help_about("all")
    assert text.startswith(f"usage: antiphon {words[0]}")
    assert len(text.splitlines()[0]) <= 100
    root = tree_of(make_parser()[0])
    node = root.kinds[words[0]]
    node = node.kinds[words[1]] if words[1:] else node
    completed = {flag for one in node.flags for flag in one.names}
    assert completed == {flag for action in parser.shown_actions() for flag in action.option_strings}
    assert all(flag in text for flag in completed)
    assert not {"--token", "--url", "--base-url", "--enabe-mm"} & completed


def test_the_page_has_every_command_and_exit_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [command.name for command in COMMANDS if f"`{command.name}`" not in page] == []
    assert [code for code in (0, 1, 2, 3, 4, 78, 130, 141) if f"| {code} |" not in page] == []


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (("serve", "--help"), ("--port", "flags that matter most", "--help=all"), ("--swap-space",)),
        (("serve", "--help=all"), ("--port", "--swap-space", "engine: memory:"), ("--enabe-mm",)),
        (("serve", "--help=listgroup"), ("engine: memory", "http"), ("--port",)),
        (("serve", "--help=CacheConfig"), ("--swap-space", "engine: memory:"), ("--port", "http:")),
        (("serve", "--help=http"), ("--port", "http:"), ("--swap-space",)),
        (("serve", "--help=max_num_seqs"), ("--max-num-seqs",), ("--max-model-len",)),
        (("serve", "--help", "max"), ("--max-num-seqs", "--max-model-len"), ("--port",)),
        (("help", "serve", "swap"), ("--swap-space",), ("--port",)),
        (("help", "drain"), ("usage: antiphon drain ENGINE [FLAGS]", "--force"), ()),
        (("help", "models", "set"), ("usage: antiphon models set NAME=DIR [FLAGS]", "--timeout"), ("--share",)),
        (("help",), ("for operators of a server:", "chaos"), ("--force",)),
        (("fork", "--help"), ("usage: antiphon fork ID --at N [FLAGS]",), ()),
    ],
)
def test_help_is_about_what_is_asked_for(
    words: tuple[str, ...], shown: tuple[str, ...], hidden: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*words) == 0
    text = capsys.readouterr().out
    assert [part for part in shown if part not in text] == []
    assert [part for part in hidden if part in text] == []


def test_a_word_that_no_flag_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("serve", "--help=zzz") == 2
    assert "--help=groups lists the groups" in capsys.readouterr().err
    assert code_of("help", "nothing") == 4
    assert code_of() == 2
    assert "for users:" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("version",), ("help",), ("list", "--json"), ("serve", "--help=all")])
def test_a_reader_that_has_enough_ends_a_command_quietly(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "antiphon", *words]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


COMPLETIONS = [
    (("antiphon", "dr"), ["drain"]),
    (("antiphon", "serve", "--enable-m"), ["--enable-mm"]),
    (("antiphon", "serve", "--load-format", ""), ["auto", "safetensors", "gguf", "dummy"]),
    (("antiphon", "serve", "--load-format", "=", "g"), ["gguf"]),
    (("antiphon", "models", ""), ["list", "set", "shadow", "rollback", "load", "unload"]),
    (("antiphon", "models", "shadow", "--sh"), ["--share"]),
    (("antiphon", "bench", "serve", "--max-c"), ["--max-concurrency"]),
    (("antiphon", "completion", "z"), ["zsh"]),
    (("antiphon", "serve", "--model", "in"), []),
    (("antiphon", "help", "--"), ["--help"]),
]


@pytest.mark.parametrize(("typed", "offered"), COMPLETIONS)
def test_bash_completes_commands_flags_and_choices(typed: tuple[str, ...], offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script("bash", tree_of(make_parser()[0])))
    words = " ".join(f"'{word}'" for word in typed)
    program = f'source ./script; COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _antiphon; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-euc", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("completion", shell) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
