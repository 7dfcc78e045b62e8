"""Options and variables of other servers at the commands that start everything, and at a single service."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from antiphon.cli import main, make_parser
from antiphon.entrypoints.openai import api_server
from antiphon.launch import launcher
from antiphon.settings import SERVICES, ServeSettings, check, child_environment
from antiphon.shared.flags import SettingsError, normalise
from antiphon.shared.settings.other_options import BY_NAME, OPTIONS, VARIABLES, Other, Variable, take

ROOT = Path(launcher.__file__).parents[2]
VALUES = {"flag": [], "value": ["7"], "values": ["7", "8"]}
STARTS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": lambda words: main(["serve", *words]),
    "run": lambda words: main(["run", *words]),
    "direct": lambda words: api_server.main(["--model=/m", *words]),
}
NAMES = (ROOT / "tests" / "golden" / "options.txt").read_text().split()
"""Options of vLLM 0.4 to 0.6, and of servers that have its flags and more."""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings that would be served with; variables of this machine do not count."""
    found: list[ServeSettings] = []

    def serve(settings: ServeSettings, _environ: object) -> int:
        found.append(settings)
        return 0

    for name in ("MODEL_PATH", "MODEL_ID", "TP", *(variable.name for variable in VARIABLES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "serve", serve)
    return found


def cases(*, refused: bool) -> list[object]:
    return [
        pytest.param(name, o, id=name) for o in OPTIONS if o.refused is refused and not o.instead for name in o.names
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_the_servers_that_people_come_from_is_a_setting_or_answered(name: str) -> None:
    for command in ("serve", "run"):
        actions = make_parser()[1][command]._actions
        assert any(name in action.option_strings for action in actions) != (name in BY_NAME)


OPTIONS_042 = (ROOT / "tests" / "golden" / "options_of_vllm_0.4.2.txt").read_text().splitlines()
"""The options of vLLM 0.4.2's server; `refused` stands behind those that name what there is not here."""


@pytest.mark.spec("S-SRV-001:options")
def test_the_direct_entry_point_knows_every_option_of_its_source(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {option for action in make_parser()[1]["serve"]._actions for option in action.option_strings}
    for line in OPTIONS_042:
        option, _, refused = line.partition(" ")
        assert (option in settings) != (option in BY_NAME), option
        assert (option in BY_NAME and BY_NAME[option].refused) == bool(refused), option
        if refused:
            assert api_server.main(["--model=/m", option, *VALUES[BY_NAME[option].takes]]) == 78
            assert f"{option} 7" in capsys.readouterr().err
    words = ("--use-lookahead", "--use-v2-block-manager", "--num-speculative-tokens=6", "--quantization=ifq_nf4")
    assert api_server.main(["--model=/m", *words]) == 0
    [taken] = served
    assert (taken.scheduler.use_lookahead, taken.scheduler.num_speculative_tokens, taken.execution.quantization) == (
        True,
        6,
        "ifq_nf4",
    )


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("name", "other"), cases(refused=False))
def test_an_option_without_effect_is_accepted_and_told_once(
    start: str, name: str, other: Other, served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert STARTS[start]([name, *VALUES[other.takes], "--max-num-seqs=3"]) == 0
    assert served[0].scheduler.max_num_seqs == 3
    said = capsys.readouterr().err
    assert said.startswith(f"antiphon: {name}")
    assert said.count("has no effect here: ") == said.count("\n") == 1


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("name", "other"), cases(refused=True))
def test_an_option_that_would_change_something_is_refused_before_anything_starts(
    start: str, name: str, other: Other, served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert STARTS[start]([name, *VALUES[other.takes], "--max-num-seqs=3"]) == 78
    assert not served
    said = capsys.readouterr().err
    assert said.startswith(" ".join(["antiphon:", name, *VALUES[other.takes], "is not supported here: "]))
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--data-parallel-size", "1"], ["-dp=1"], ["--enable_expert_parallel=0"], ["-q", "None"],
        ["--quantization=none"], ["--enable-lora=false"], ["--no-enable-lora"], ["--enabe_mm", "0"],
        ["--mm-processor-kwargs", "{}"], ["--response-role", "assistant"],
        ["--ssl-cert-reqs", "0"],
    ],
)  # fmt: skip
def test_a_value_that_asks_for_nothing_passes_in_silence(
    words: list[str], served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    for start in STARTS.values():
        assert start(words) == 0
    assert len(served) == len(STARTS)
    assert capsys.readouterr().err == ""


@pytest.mark.spec("S-SRV-001:options")
@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer", "xgrammar", "auto"])
def test_what_compiles_grammars_is_no_choice(
    backend: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert api_server.main(["--model=/m", "--guided-decoding-backend", backend]) == 0
    assert len(served) == 1
    assert f"--guided-decoding-backend {backend} has no effect here: llguidance" in capsys.readouterr().err


@pytest.mark.spec("S-SRV-001:options", "S-SRV-072")
def test_the_former_flag_of_ray_names_its_executor(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    for words, backend in (([], "ray"), (["true"], "ray"), (["false"], "auto")):
        assert api_server.main(["--model=/m", "--worker-use-ray", *words]) == 0
        assert served[-1].parallel.distributed_executor_backend == backend
    assert api_server.main(["--model=/m", "--no-worker-use-ray"]) == 0
    assert served[-1].parallel.distributed_executor_backend == "auto"
    assert capsys.readouterr().err == ""


def test_options_are_taken_out_with_their_values_and_nothing_else() -> None:
    words = [
        "--disable_log_requests",
        "/m",
        "--middleware",
        "a=b",
        "c=d",
        "--port",
        "0",
        "--max-log-len=5",
        "-dp",
        "2",
    ]
    taken = take(normalise(words), {})
    assert taken.words == ["--no-access-log", "/m", "--port", "0"]
    assert list(taken.told) == ["--max-log-len 5"]
    assert list(taken.refused) == ["--middleware a=b c=d", "-dp 2"]
    assert take(["-dp"], {}).refused == {"-dp": "needs a value"}
    assert take(["--runner", "--port=0"], {}).words == ["--port=0"]


def test_all_that_is_refused_is_named_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_PORTS", "7")
    assert main(["run", "--disable-image-processor"]) == 78
    lines = capsys.readouterr().err.removeprefix("antiphon: ").splitlines()
    names = ["--disable-image-processor", "NODE_PORTS=7"]
    assert [line.split()[0] for line in lines] == names
    assert all("is not supported here: " in line for line in lines)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_no_variable_of_other_servers_is_ignored_in_silence(
    start: str,
    variable: Variable,
    served: list[ServeSettings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable.name, "7")
    assert STARTS[start]([]) == (78 if variable.refused else 0)
    assert f"{variable.name}=7" in capsys.readouterr().err
    for value in ("", *variable.asks_nothing):
        monkeypatch.setenv(variable.name, value)
        assert STARTS[start]([]) == 0
    assert capsys.readouterr().err == ""


def test_help_is_given_whatever_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_PORTS", "7")
    with pytest.raises(SystemExit) as end:
        main(["run", "--help"])
    assert end.value.code == 0


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["--tensor-paralel-size=2"], "--tensor-parallel-size"),
        (["--enable-lra"], "--enable-lora"),
        (["--disable-log-request"], "--disable-log"),
    ],
)
def test_a_mistyped_name_is_unknown_and_answered_with_the_nearest(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for start in STARTS.values():
        with pytest.raises(SystemExit) as end:
            start(words)
        assert end.value.code == 2
        assert f"Did you mean {near}" in capsys.readouterr().err


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_alone_refuses_the_same(service: str) -> None:
    argv = [sys.executable, "-m", "antiphon", "service", service, "--nats=nats://127.0.0.1:1", "-dp=2"]
    environ = {**os.environ, "NODE_PORTS": "7"}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith(f"{service}: -dp 2 is not supported here: ")
    assert "\n  NODE_PORTS=7 is not supported here: " in done.stderr


def test_children_are_not_told_again_of_what_the_launcher_answered() -> None:
    environ = {variable.name: "7" for variable in VARIABLES}
    assert child_environment({**environ, "HOME": "/h"}) == {"HOME": "/h"}


def test_lookahead_needs_the_block_manager_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="--use-lookahead needs --use-v2-block-manager"):
        check(ServeSettings(use_lookahead=True))
    check(ServeSettings(use_lookahead=True, use_v2_block_manager=True))


@pytest.mark.parametrize("words", [["--ssl-keyfile=/k"], ["--allowed-origins=*"], ["--allowed-headers", '["a", 1]']])
def test_settings_of_the_server_that_cannot_be_are_refused_by_name(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "serve", lambda settings, _environ: check(settings) or 0)
    for start in STARTS.values():
        assert start(words) == 78
        assert words[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"method": "mtp", "num_speculative_tokens": 2}', (True, False, 2)),
        ('{"method": "deepseek_mtp"}', (True, False, 8)),
        ('{"method": "ngram", "num_speculative_tokens": 5}', (False, True, 5)),
    ],
)
def test_speculation_as_vllm_has_it_is_read_as_the_settings_here(
    config: str, expected: tuple[bool, bool, int], served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    for start in STARTS.values():
        assert start(["--speculative-config", config]) == 0
        scheduler = served[-1].scheduler
        assert (scheduler.use_mtp, scheduler.use_lookahead, scheduler.num_speculative_tokens) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"method": "eagle"}', '{"method": "mtp", "model": "m"}', '{"num_speculative_tokens": 2}']
)
def test_speculation_that_is_not_here_is_refused_with_what_is(
    config: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    for start in STARTS.values():
        assert start([f"--speculative-config={config}"]) == 78
        said = capsys.readouterr().err
        assert "is not supported here: the methods are ngram (--use-lookahead) and mtp (--use-mtp)" in said
    assert not served
