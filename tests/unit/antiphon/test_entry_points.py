"""The two other ways to start everything: the wrapper `antiphon run` and the direct entry point, and their defaults."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main, make_parser
from antiphon.entrypoints.openai import api_server
from antiphon.launch import devices, launcher
from antiphon.settings import SERVICES, DirectSettings, RunSettings, ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import flags_of, values_of
from antiphon.shared.models.model_files import model_name
from antiphon.shared.settings.allowed_values import CONV_TEMPLATES
from antiphon.shared.settings.other_options import VARIABLES

ROOT = Path(launcher.__file__).parents[2]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings that would be served with on a machine with one GPU; this machine's variables do not count."""
    found: list[ServeSettings] = []

    def serve(settings: ServeSettings, _environ: object) -> int:
        found.append(settings)
        return 0

    for kind in (*SERVICES.values(), RunSettings):
        for item in flags_of(kind):
            monkeypatch.delenv(item.metadata["env"] or "UNNAMED", raising=False)
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(devices.VARIABLE, "0")
    monkeypatch.setattr(launcher, "serve", serve)
    return found


def run(served: list[ServeSettings], *words: str) -> ServeSettings:
    assert main(["run", *words]) == 0
    return served[-1]


def values(settings: ServeSettings, *names: str) -> tuple[Any, ...]:
    given = values_of(settings)
    return tuple(given[name] for name in names)


@pytest.mark.spec("S-SRV-001:module")
def test_the_direct_entry_point_serves_with_the_engines_own_defaults(served: list[ServeSettings]) -> None:
    assert api_server.main(["--model", "/m", "--max_num_seqs=3", "--use-lookahead", "--use-v2-block-manager"]) == 0
    [settings] = served
    assert values(settings, "host", "port", "seed", "dtype", "enforce_eager") == ("0.0.0.0", 8000, 0, "auto", False)
    assert values(settings, "model", "max_num_seqs", "limit_worker_concurrency") == ("/m", 3, None)
    same = values_of(EngineSettings())
    changed = {"model": "/m", "max_num_seqs": 3, "use_lookahead": True, "use_v2_block_manager": True}
    assert {name: value for name, value in values_of(settings).items() if name in same} == {**same, **changed}


@pytest.mark.spec("S-SRV-001:module", "S-SRV-020")
def test_the_direct_entry_point_needs_a_model(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api_server.main([]) == 78
    assert "--model is needed" in capsys.readouterr().err
    monkeypatch.setenv("MODEL_PATH", "/from/variable")
    assert api_server.main([]) == 0
    assert served[0].model == "/from/variable"


@pytest.mark.spec("S-SRV-001:module")
def test_the_direct_entry_point_is_a_module_that_python_runs() -> None:
    argv = [sys.executable, "-m", "antiphon.entrypoints.openai.api_server"]
    said = subprocess.run([*argv, "--max-num-sesq=3"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "Did you mean --max-num-seqs?" in said.stderr


@pytest.mark.spec("S-SRV-002:start", "S-SRV-011", "S-SRV-015", "S-SRV-031", "S-SRV-033", "S-SRV-080:cpu")
def test_run_has_the_defaults_of_its_backend(served: list[ServeSettings]) -> None:
    for words in ((), ("--backend=vllm",)):
        settings = run(served, *words)
        assert values(settings, "host", "port", "model") == ("0.0.0.0", 8501, "/data/model")
        assert values(settings, "dtype", "seed", "enforce_eager") == ("float16", None, True)
        assert values(settings, "engines", "limit_worker_concurrency", "max_num_seqs") == (1, 128, 256)
        assert values(settings, "gpu_memory_utilization", "max_model_len") == (0.9, None)
        assert values(settings, "use_lookahead", "num_speculative_tokens") == (False, 8)
        assert values(settings, "max_batch_size", "batch_wait_timeout") == (None, None)


@pytest.mark.spec("S-SRV-002:start", "S-SRV-015", "S-SRV-034:types", "S-SRV-059", "S-SRV-060")
def test_run_has_the_other_defaults_of_the_other_backend(served: list[ServeSettings]) -> None:
    settings = run(served, "--backend", "deepspeed")
    assert values(settings, "port", "model", "dtype", "seed") == (8501, "/data/model", "float16", None)
    assert values(settings, "limit_worker_concurrency", "engines") == (32, 1)
    assert values(settings, "max_batch_size", "batch_wait_timeout") == (16, 0.1)
    assert run(served, "--backend=deepspeed", "--batch-wait-timeout=0").scheduler.batch_wait_timeout == 0


@pytest.mark.spec(
    "S-SRV-002:start", "S-SRV-014", "S-SRV-015", "S-SRV-031", "S-SRV-080:cpu", "S-DEP-034a", "S-DEP-034b", "S-DEP-035b",
    "S-DEP-036d", "S-DEP-037a", "S-DEP-037b",
)  # fmt: skip
def test_run_is_told_by_variables_and_flags_beat_them(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"MODEL_PATH": "/m", "WORKER_NUM": "3", "MAX_CONCURRENCY": "5", "DTYPE": "bfloat16", "SEED": "7"}
    told |= {"ENFORCE_EAGER": "0", "USE_LOOKAHEAD": "1", "NUM_SPECULATIVE_TOKENS": "4"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    names = ("model", "engines", "limit_worker_concurrency", "dtype", "seed")
    more = ("enforce_eager", "use_lookahead", "num_speculative_tokens")
    assert values(run(served), *names, *more) == ("/m", 3, 5, "bfloat16", 7, False, True, 4)
    words = ("--worker-num=2", "--limit-worker-concurrency=6", "--seed=none", "--enforce-eager", "--use-lookahead=0")
    assert values(run(served, *words), *names, *more) == ("/m", 2, 6, "bfloat16", None, True, False, 4)


@pytest.mark.spec("S-SRV-034:types")
def test_a_type_that_the_other_backend_ignores_is_told(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(served, "--backend=deepspeed", "--dtype=float32").execution.dtype == "float16"
    assert "--dtype (DTYPE) has no effect with --backend=deepspeed: " in capsys.readouterr().err
    run(served, "--dtype=float32")
    run(served, "--backend=deepspeed", "--ds-dtype=bfloat16")
    assert capsys.readouterr().err == ""


@pytest.mark.spec("S-SRV-070", "S-DEP-033", "S-SRV-002:flags")
def test_run_divides_all_gpus_of_the_container_among_its_workers(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [("0", (), 1), ("0,1", (), 2), ("0,1,2,3", (), 4), ("0,1,2,3", ("--worker-num=2",), 2)]
    cases += [("0,1,2", ("--worker-num=2",), 1), ("0", ("--worker-num=2",), 1), ("0,1,2,3", ("--num-gpus=1",), 1)]
    cases += [("0,1,2,3", ("--pipeline-parallel-size=2",), 2), ("0,1,2,3", ("--prefill=1", "--decode=1"), 2)]
    cases += [("0,1", ("--backend=deepspeed",), 1), ("0,1", ("--device=cpu",), 1), ("", (), 1)]
    cases += [("0,1", (f"--also={tmp_path}=other",), 1), ("0,1", ("--device=cuda",), 2)]
    for gpus, words, size in cases:
        monkeypatch.setenv(devices.VARIABLE, gpus)
        assert run(served, *words).parallel.tensor_parallel_size == size, (gpus, words)
    monkeypatch.setenv("TP", "1")
    monkeypatch.setenv(devices.VARIABLE, "0,1")
    assert run(served).parallel.tensor_parallel_size == 1
    monkeypatch.undo()
    assert main(["run", "--num-gpus=0"]) == 78


@pytest.mark.spec("S-SRV-070", "S-SRV-105:workers")
def test_run_leaves_no_gpu_of_the_container_unused(
    monkeypatch: pytest.MonkeyPatch, served: list[ServeSettings]
) -> None:
    monkeypatch.setenv(devices.VARIABLE, "0,1,2,3")
    found = launcher.assign_gpus([run(served, "--worker-num=2")], ["0", "1", "2", "3"])
    assert found == devices.Assignment(("0,1", "2,3"))


ACTING = [
    ("MODEL_ID", "Foo", "--model-id=bar", "model_id", ("Foo", "bar", "")),
    ("CONV_TEMPLATE", "llama-2", "--conv-template=llama-3", "conv_template", ("llama-2", "llama-3", None)),
    ("MODEL_PATH", "/m", "--model-path=/n", "model", ("/m", "/n", "/data/model")),
    ("WORKER_NUM", "3", "--worker-num=2", "engines", (3, 2, 1)),
    ("MAX_CONCURRENCY", "5", "--limit-worker-concurrency=6", "limit_worker_concurrency", (5, 6, 128)),
    ("DTYPE", "bfloat16", "--dtype=float32", "dtype", ("bfloat16", "float32", "float16")),
    ("SEED", "7", "--seed=8", "seed", (7, 8, None)),
    ("MAX_MODEL_LEN", "100", "--max-model-len=200", "max_model_len", (100, 200, None)),
    ("GPU_MEMORY_UTILIZATION", "0.5", "--gpu_memory_utilization=0.6", "gpu_memory_utilization", (0.5, 0.6, 0.9)),
    ("QUANTIZATION", "ifq", "--quantization=ifq_nf4", "quantization", ("ifq", "ifq_nf4", "")),
    ("ENFORCE_EAGER", "0", "--enforce-eager=1", "enforce_eager", (False, True, True)),
    ("USE_LOOKAHEAD", "1", "--use-lookahead=0", "use_lookahead", (True, False, False)),
    ("NUM_SPECULATIVE_TOKENS", "4", "--num-speculative-tokens=3", "num_speculative_tokens", (4, 3, 8)),
    ("OPENAI_API_KEYS", "a,b", "--api-keys=c", "api_keys", ("a,b", "c", "")),
    ("DS_DTYPE", "bfloat16", "--ds-dtype=float16", "ds_dtype", ("bfloat16", "float16", "")),
    ("MAX_BATCH_SIZE", "4", "--max-batch-size=5", "max_batch_size", (4, 5, 16)),
    ("TP", "2", "--num-gpus=3", "tensor_parallel_size", (2, 3, 1)),
    ("BATCH_WAIT_TIMEOUT", "0.5", "--batch-wait-timeout=2", "batch_wait_timeout", (0.5, 2.0, 0.1)),
]
"""Of each variable: a value, a flag that beats it, and what the setting is by variable, by flag and by default."""
OTHER_BACKEND = ("DS_DTYPE", "MAX_BATCH_SIZE", "BATCH_WAIT_TIMEOUT")


@pytest.mark.spec("S-SRV-004:order", "S-SRV-004:all-variables")
@pytest.mark.parametrize(("variable", "value", "flag", "field", "expected"), ACTING, ids=[row[0] for row in ACTING])
def test_a_flag_beats_its_variable_which_beats_the_default(
    served: list[ServeSettings],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    flag: str,
    field: str,
    expected: tuple[Any, Any, Any],
) -> None:
    backend = ("--backend=deepspeed",) if variable in OTHER_BACKEND else ()
    by_variable, by_flag, by_default = expected
    for given in (None, ""):
        if given is not None:
            monkeypatch.setenv(variable, given)
        assert values_of(run(served, *backend))[field] == by_default
        assert values_of(run(served, *backend, flag))[field] == by_flag
    monkeypatch.setenv(variable, value)
    assert values_of(run(served, *backend))[field] == by_variable
    assert values_of(run(served, *backend, flag))[field] == by_flag


@pytest.mark.spec("S-SRV-004:all-variables")
def test_the_table_has_every_variable_of_the_wrapper() -> None:
    named = {item.metadata["env"] for item in flags_of(RunSettings)} - {""}
    own = {name for name in named if name.startswith("ANTIPHON_")}
    of_the_role_script = {"USE_OPENAI"}
    of_several_machines = {"NODE_RANK"}
    assert named - own - of_the_role_script - of_several_machines == {row[0] for row in ACTING}
    assert len(ACTING) == 18
    assert not {row[0] for row in ACTING} & {variable.name for variable in VARIABLES}


FLAGS = [
    ("--backend=deepspeed", "backend", "deepspeed"),
    ("--host=127.0.0.1", "host", "127.0.0.1"),
    ("--port=9000", "port", 9000),
    ("--served-model-name=a", "served_model_name", "a"),
    ("--max-num-batched-tokens=64", "max_num_batched_tokens", 64),
    ("--max-num-seqs=9", "max_num_seqs", 9),
]
"""Flags of the wrapper that have no variable: a value, and the setting that it gives."""


@pytest.mark.spec("S-SRV-002:flags")
def test_every_flag_of_the_wrapper_is_taken(served: list[ServeSettings]) -> None:
    for flag, field, value in FLAGS:
        assert values_of(run(served, flag))[field] == value, flag
    for variable, _, flag, field, (_, value, _) in ACTING:
        backend = ("--backend=deepspeed",) if variable in OTHER_BACKEND else ()
        assert values_of(run(served, *backend, flag))[field] == value, flag


@pytest.mark.parametrize("words", [("run",), ("serve",), ("run", "--conv-template=nope")])
def test_an_unknown_conversation_template_is_answered_with_the_nine_that_there_are(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if len(words) == 1:
        monkeypatch.setenv("CONV_TEMPLATE", "nope")
    assert main(list(words)) == 78
    said = capsys.readouterr().err
    assert ("environment variable CONV_TEMPLATE: " if len(words) == 1 else "--conv-template: ") + "nope is not" in said
    assert len(CONV_TEMPLATES) == 9
    assert all(name in said for name in CONV_TEMPLATES)


def test_a_variable_that_says_none_names_no_template(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("none", "None"):
        monkeypatch.setenv("CONV_TEMPLATE", word)
        assert run(served).conv_template is None


@pytest.mark.spec("S-DEP-015b")
@pytest.mark.parametrize("command", ["run", "serve"])
def test_the_template_whose_layout_is_not_public_is_refused_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONV_TEMPLATE", "shennong_chat")
    assert main([command, f"--model={tmp_path}"]) == 78
    assert "the layout of shennong_chat is not public: give it with --chat-template" in capsys.readouterr().err


@pytest.mark.spec("S-SRV-056", "S-SRV-102")
@pytest.mark.parametrize("start", [api_server.main, lambda words: main(["serve", *words])], ids=["direct", "serve"])
def test_lookahead_without_the_block_manager_is_refused_before_anything_starts(
    start: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start([f"--model={tmp_path}", "--use-lookahead"]) == 78
    assert "--use-lookahead needs --use-v2-block-manager: add it" in capsys.readouterr().err


@pytest.mark.spec("S-SRV-002:start", "S-SRV-056")
def test_lookahead_in_run_brings_the_block_manager_that_it_needs(served: list[ServeSettings]) -> None:
    names = ("use_lookahead", "use_v2_block_manager")
    assert values(run(served), *names) == (False, False)
    assert values(run(served, "--use-lookahead=1"), *names) == (True, True)


@pytest.mark.spec(
    "S-SRV-034:types", "S-SRV-033", "S-DEP-039a:types", "S-DEP-039b", "S-DEP-039c", "S-SRV-059", "S-SRV-060"
)
def test_the_other_backend_computes_in_the_type_of_its_own_flag(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed = ("--backend=deepspeed", "--dtype=float32")
    assert run(served, *deepspeed).execution.dtype == "float16"
    assert run(served, *deepspeed, "--ds-dtype=bfloat16").execution.dtype == "bfloat16"
    for name, value in {"DS_DTYPE": "bfloat16", "MAX_BATCH_SIZE": "4", "BATCH_WAIT_TIMEOUT": "0.5"}.items():
        monkeypatch.setenv(name, value)
    assert values(run(served, *deepspeed), "dtype", "max_batch_size", "batch_wait_timeout") == ("bfloat16", 4, 0.5)


@pytest.mark.spec("S-SRV-034:int8", "S-DEP-039a:int8")
def test_int8_of_the_other_backend_means_weights_of_8_bits(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed = ("--backend=deepspeed", "--dtype=float32")
    named = values(run(served, *deepspeed, "--ds-dtype=int8"), "quantization", "dtype")
    monkeypatch.setenv("DS_DTYPE", "int8")
    assert values(run(served, *deepspeed), "quantization", "dtype") == named == ("ifq", "float16")
    assert values(run(served, *deepspeed, "--quantization=ifq"), "quantization") == ("ifq",)
    assert values(run(served, *deepspeed, "--ds-dtype=bfloat16"), "quantization", "dtype") == ("", "bfloat16")


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ((), "auto"),
        (("--dtype=float16",), "float16"),
        (("--device=cuda",), "float16"),
        (("--backend=deepspeed",), "auto"),
        (("--backend=deepspeed", "--ds-dtype=float16"), "float16"),
    ],
)
def test_run_computes_in_float16_on_a_cpu_only_where_somebody_names_it(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], dtype: str
) -> None:
    monkeypatch.setenv(devices.VARIABLE, "")
    assert run(served, *words).execution.dtype == dtype
    monkeypatch.setenv(devices.VARIABLE, "0")
    assert run(served, *words, "--device=cpu").execution.dtype == ("auto" if "--device=cuda" in words else dtype)


def test_run_answers_to_the_name_model_beside_its_own(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> tuple[str, str, float]:
        settings = served[-1]
        return model_name(settings), settings.served_model_alias, settings.default_chat_temperature

    run(served)
    assert names() == ("model", "model", 0.7)
    run(served, "--served-model-name", "a", "b")
    assert names() == ("a", "b,model", 0.7)
    assert main(["serve", "/m"]) == 0
    assert names() == ("m", "", 1.0)
    monkeypatch.setenv("MODEL_ID", "Foo")
    run(served)
    assert names() == ("Foo", "model", 0.7)
    run(served, "--served-model-name=bar")
    assert names() == ("bar", "model", 0.7)
    assert main(["serve", "/m"]) == 0
    assert names() == ("Foo", "", 1.0)


@pytest.mark.spec("S-SRV-034:types", "S-SRV-107:present")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--backend=deepspeed", "--ds-dtype=int8", "-q", "ifq_nf4"],
            "--ds-dtype=int8 contradicts --quantization=ifq_nf4",
        ),
        (["--ds-dtype=float16"], "--ds-dtype needs --backend=deepspeed"),
    ],
)
def test_a_type_that_cannot_be_computed_in_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 78
    assert said in capsys.readouterr().err


@pytest.mark.spec("S-SRV-034:types", "S-SRV-107:present")
def test_another_type_of_the_other_backend_is_answered_with_the_allowed_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--backend=deepspeed", "--ds-dtype=float32"])
    printed = capsys.readouterr().err
    assert all(word in printed for word in ("--ds-dtype", "float32", "float16", "bfloat16", "int8"))


def test_a_service_is_not_what_run_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "engine"])
    assert "Did you mean `antiphon service engine`?" in capsys.readouterr().err


def test_the_ways_to_start_differ_in_defaults_alone() -> None:
    plain = {item.name: item for item in flags_of(ServeSettings)}
    for kind, own in ((DirectSettings, set[str]()), (RunSettings, {"backend", "ds_dtype"})):
        others = {item.name: item for item in flags_of(kind)}
        assert set(others) == set(plain) | own
        for name in plain:
            same = ("env", "choices", "alias", "group", "rule")
            assert [others[name].metadata[key] for key in same] == [plain[name].metadata[key] for key in same], name
    assert replace(DirectSettings(), host="127.0.0.1", seed=None) == DirectSettings(host="127.0.0.1", seed=None)


def test_help_has_a_heading_for_each_kind_of_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "run"):
        help_text = make_parser()[1][command].help_about("all")
        headings = [line[:-1] for line in help_text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        assert headings[-11:] == [
            "model", "http", "processes", "engine: scheduling", "engine: memory", "engine: execution",
            "engine: parallel", "engine: KV transfer", "adapters", "images", "bus",
        ]  # fmt: skip


def test_the_direct_entry_point_takes_the_key_of_vllm_s_variable(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert api_server.main(["--model=/m"]) == 0
    assert api_server.main(["--model=/m", "--api-key=own"]) == 0
    assert [settings.api_keys for settings in served] == ["secret", "own"]


@pytest.mark.parametrize("start", [["serve"], ["run"]])
def test_a_list_of_keys_without_a_key_does_not_open_the_server(
    served: list[ServeSettings],
    start: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEYS", " , ")
    assert main(start) == 78
    assert "OPENAI_API_KEYS" in capsys.readouterr().err
    assert served == []
