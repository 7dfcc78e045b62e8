"""The command line: what it accepts, what it says about what it does not, and that it is light."""

import os
import subprocess
import sys

import pytest

from antiphon.cli import main, make_parser
from antiphon.launch import launcher
from antiphon.settings import NOT_FOR_USERS, ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError, flags_of, normalise, parse

HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "nats", "pydantic", "numpy", "tokenizers", "msgspec"}


def options_of(*words: str):
    return make_parser()[0].parse_args(normalise(words))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings that `antiphon serve` would start with."""
    found: list[ServeSettings] = []

    def serve(settings: ServeSettings, _environ: object) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(launcher, "serve", serve)
    return found


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["chat", "--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom antiphon.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"found = {HEAVY!r} & set(sys.modules)\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_serve_listens_on_this_machine_only_unless_told_otherwise(served: list[ServeSettings]) -> None:
    assert main(["serve"]) == 0
    assert (served[0].host, served[0].port) == ("127.0.0.1", 8000)
    assert (served[0].gateways, served[0].tokenizers, served[0].engines, served[0].detokenizers) == (1, 1, 1, 1)


@pytest.mark.spec("S-SRV-006")
def test_dashes_and_underscores_in_option_names_are_the_same(served: list[ServeSettings]) -> None:
    main(["serve", "--max_num_seqs", "3", "--max-model_len=128", "--enable_prefix_caching=false"])
    assert (
        served[0].scheduler.max_num_seqs,
        served[0].scheduler.max_model_len,
        served[0].cache.enable_prefix_caching,
    ) == (3, 128, False)


@pytest.mark.spec("S-SRV-020")
def test_the_model_can_be_named_by_word_flag_alias_or_variable(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATH", "/from/variable")
    for words in (["serve"], ["serve", "/m"], ["serve", "--model", "/m"], ["serve", "--model-path=/m"]):
        main(words)
    assert [s.model for s in served] == ["/from/variable", "/m", "/m", "/m"]


def test_a_model_named_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/a", "--model", "/b"]) == 78
    assert "named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["serve", "--max-num-sesq", "3"], "--max-num-seqs"),
        (["serve", "--prot=80"], "--port"),
        (["chat", "--temprature", "1"], "--temperature"),
        (["sevre"], "serve"),
        (["service", "engin"], "engine"),
        (["serve", "--dtype", "bfloat61"], "bfloat16"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(
    words: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert f"Did you mean {suggestion}?" in capsys.readouterr().err


def test_an_abbreviation_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--max-num", "3"])
    assert "unknown option --max-num" in capsys.readouterr().err


def test_serve_takes_every_flag_of_every_service() -> None:
    options = vars(options_of("serve"))
    needed = {item.name for item in flags_of(ServeSettings)} - NOT_FOR_USERS
    assert needed <= set(options)
    assert {item.name for item in flags_of(EngineSettings)} <= {item.name for item in flags_of(ServeSettings)}


@pytest.mark.spec("S-SRV-004:order")
def test_a_flag_beats_the_variable_and_an_empty_variable_counts_as_unset() -> None:
    environ = {"DTYPE": "bfloat16", "MAX_MODEL_LEN": ""}
    assert parse(ServeSettings, options_of("serve"), environ).execution.dtype == "bfloat16"
    assert parse(ServeSettings, options_of("serve", "--dtype", "float32"), environ).execution.dtype == "float32"
    assert parse(ServeSettings, options_of("serve"), environ).scheduler.max_model_len is None


@pytest.mark.spec("S-SRV-005")
@pytest.mark.parametrize(("word", "value"), [("1", True), ("0", False), ("TRUE", True), ("false", False)])
def test_booleans_are_0_1_true_and_false(word: str, value: bool) -> None:
    given = parse(ServeSettings, options_of("serve", "--enable-prefix-caching", word), {})
    assert given.cache.enable_prefix_caching is value


def test_a_boolean_can_be_switched_off_by_its_other_form() -> None:
    for words, value in ((["--no-enable-prefix-caching"], False), (["--no_enforce_eager"], True), ([], True)):
        given = parse(ServeSettings, options_of("serve", *words), {})
        assert given.cache.enable_prefix_caching is value
    assert (
        parse(ServeSettings, options_of("serve", "--no-enforce-eager"), {"ENFORCE_EAGER": "1"}).execution.enforce_eager
        is False
    )


def test_several_names_need_a_model_that_is_clearly_none_of_them(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["/m", "--served-model-name", "a", "b"], ["--served-model-name", "a", "b", "--model=/m"]):
        assert main(["serve", *words]) == 0
    assert [(s.model, s.served_model_name, s.served_model_alias) for s in served] == [("/m", "a", "b")] * 2
    assert main(["serve", "--served-model-name", "a", "/m"]) == 78
    assert "took all of a, /m as names" in capsys.readouterr().err


def test_several_names_that_cannot_be_a_model_are_names_of_the_demo_model(served: list[ServeSettings]) -> None:
    assert main(["serve", "--served-model-name", "a", "b"]) == 0
    assert [(s.model, s.served_model_name, s.served_model_alias) for s in served] == [("", "a", "b")]


def test_an_impossible_variable_ends_with_78_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAX_MODEL_LEN", "many")
    assert main(["serve"]) == 78
    assert "MAX_MODEL_LEN" in capsys.readouterr().err


@pytest.mark.spec("S-DEP-043")
def test_chat_has_the_known_options_and_defaults() -> None:
    options = options_of("chat", "--top_p", "0.5")
    assert (options.max_tokens, options.temperature, options.top_p) == (512, 0.7, 0.5)
    assert (options.system, options.api_key) == (None, None)


def test_service_hands_all_flags_to_the_service() -> None:
    code = (
        "import runpy, sys\nrunpy.run_module = lambda name, run_name: print(name, run_name, sys.argv)\n"
        "from antiphon.cli import main\nmain(['service', 'engine', '--max_num_seqs', '3', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert (
        done.stdout.strip()
        == "antiphon.services.engine __main__ ['antiphon service engine', '--max-num-seqs', '3', '--help']"
    )


def test_settings_errors_name_the_setting() -> None:
    with pytest.raises(SettingsError, match="MAX_MODEL_LEN"):
        parse(ServeSettings, options_of("serve"), {"MAX_MODEL_LEN": "x"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--threads", "x"], "argument --threads: 'x' is not a whole number"),
        (["serve", "--gpu-memory-utilization=much"], "argument --gpu-memory-utilization: 'much' is not a number"),
    ],
)
def test_a_word_in_the_place_of_a_number_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_a_command_has_all_its_flags_when_only_it_gets_them() -> None:
    every = make_parser()[1]
    for name, parser in every.items():
        assert make_parser(name)[1][name].format_help() == parser.format_help()
