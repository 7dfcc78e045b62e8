"""Which models a command line and a file name, with which settings; and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main
from antiphon.entrypoints.openai import api_server
from antiphon.launch import launcher
from antiphon.launch.launcher import Place, VersionPlan
from antiphon.launch.served_models import loaded_model, models_of
from antiphon.settings import DirectSettings, RunSettings, ServeSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.limits import MODELS_MAX
from antiphon.shared.models.model_files import model_aliases, model_name
from antiphon.supervision.processes import ChildSpec
from tests.models import make_model

TOML = """
[[models]]
model = "/models/small"
served-model-name = "small"
max-model-len = 2048
engines = 2
enable_prefix_caching = false

[[models]]
model-path = "org/large"
worker-num = 3
gpu-memory-utilization = 0.5
"""


def written(directory: Path, text: str, name: str = "models.toml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_one_model_is_served_with_the_settings_as_they_are() -> None:
    settings = ServeSettings(model="/a", engines=2)
    assert models_of(settings) == [settings]
    assert models_of(ServeSettings()) == [ServeSettings()]


def test_a_further_model_has_the_command_line_s_settings_but_its_own_files() -> None:
    first = ServeSettings(
        model="/a", served_model_name="a", revision="r", tokenizer="/t", chat_template="t.jinja", max_num_seqs=7,
        engines=3, also=("/with=sign=b", "org/c=c"),
    )  # fmt: skip
    models = models_of(first)
    assert models[0] == first
    plain = replace(first, revision="", tokenizer="", chat_template="")
    assert models[1] == replace(plain, model="/with=sign", served_model_name="b")
    assert models[2] == replace(plain, model="org/c", served_model_name="c")


def test_each_model_has_the_name_and_the_template_of_its_own_directory(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("first", "second", "third")]
    for directory, template in zip(directories, ("chatglm2", "chatglm3", None), strict=True):
        directory.mkdir()
        said = {"model_id": directory.name.upper(), "conv_template_name": template}
        (directory / "ti_model_config.json").write_text(json.dumps(said))
    first, second, third = map(str, directories)
    file = written(tmp_path, f"[[models]]\nmodel = '{third}'\nconv-template = 'llama-2'")
    serve = ServeSettings(
        model=first, also=(f"{second}=b",), models=file, conv_template="generate", default_model="THIRD"
    )
    models = models_of(serve)
    assert [model_name(model) for model in models] == ["FIRST", "b", "THIRD"]
    assert [model.conv_template for model in models] == ["generate", "chatglm3", "llama-2"]
    with pytest.raises(SettingsError, match="two models are called 'FIRST'"):
        models_of(replace(serve, also=(f"{second}=FIRST",)))


@pytest.mark.parametrize(
    ("settings", "flag"), [({"conv_template": "llama-2"}, "--conv-template"), ({"model_id": "x"}, "--model-id")]
)
def test_a_template_of_no_model_is_refused(settings: dict[str, Any], flag: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{flag} is about the model of --model"):
        models_of(ServeSettings(models=written(tmp_path, TOML), **settings))


@pytest.mark.parametrize("kind", [ServeSettings, DirectSettings, RunSettings])
def test_a_file_alone_decides_which_models_there_are(kind: type[ServeSettings], tmp_path: Path) -> None:
    small, large = models_of(kind(models=written(tmp_path, TOML), tokenizers=4))
    assert (small.model, small.served_model_name, small.scheduler.max_model_len) == ("/models/small", "small", 2048)
    assert (small.engines, small.tokenizers, small.cache.enable_prefix_caching) == (2, 4, False)
    assert (large.model, model_name(large), large.engines) == ("org/large", "org/large", 3)
    assert (large.cache.gpu_memory_utilization, large.scheduler.max_model_len) == (0.5, None)


def test_a_named_model_comes_before_those_of_also_and_those_of_the_file(tmp_path: Path) -> None:
    models = models_of(ServeSettings(model="/a", also=("/b=b",), models=written(tmp_path, TOML)))
    assert [model_name(model) for model in models] == ["a", "b", "small", "org/large"]


def test_models_in_directories_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    rows = [{"model": "/a/same"}, {"model": "/b/same"}, {"model": "/c/other"}]
    models = models_of(ServeSettings(models=written(tmp_path, json.dumps({"models": rows}), "m.json")))
    assert [model_name(model) for model in models] == ["/a/same", "/b/same", "other"]
    assert [model_aliases(model) for model in models] == [(), (), ("/c/other",)]


def test_a_json_file_says_the_same_as_a_toml_file(tmp_path: Path) -> None:
    rows = [{"model": "/b", "served-model-name": "b", "max-num-seqs": 3, "use-warmup": True, "max-model-len": None}]
    (model,) = models_of(ServeSettings(models=written(tmp_path, json.dumps({"models": rows}), "m.json")))
    assert model == replace(
        ServeSettings(model="/b", served_model_name="b", max_num_seqs=3, use_warmup=True), models=model.models
    )


def test_fields_of_the_config_are_a_table_of_one_model(tmp_path: Path) -> None:
    text = "[[models]]\nmodel = '/b'\n[models.hf-overrides]\nrope_theta = 5\ntext_config = {layers = 2}"
    first, second = models_of(ServeSettings(model="/a", hf_overrides='{"x": 1}', models=written(tmp_path, text)))
    assert json.loads(first.hf_overrides) == {"x": 1}
    assert json.loads(second.hf_overrides) == {"rope_theta": 5, "text_config": {"layers": 2}}
    [_, other] = models_of(ServeSettings(model="/a", hf_overrides='{"x": 1}', also=("/b=b",)))
    assert other.hf_overrides == ""


@pytest.mark.parametrize("word", ["/b", "=b", "/b=", "="])
def test_also_without_directory_or_name_is_refused(word: str) -> None:
    with pytest.raises(SettingsError, match=r"--also: .* is not DIR=NAME"):
        models_of(ServeSettings(also=(word,)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = [", "is not valid TOML"),
        ("", "must hold a list 'models'"),
        ("models = []", "must hold a list 'models'"),
        ("port = 3\n[[models]]\nmodel = '/b'", "must hold a list 'models' and nothing else"),
        ("models = ['/b']", "model 1: give a table"),
        ("[[models]]\nserved-model-name = 'b'", "model 1: 'model' is missing"),
        (
            "[[models]]\nmodel = '/b'\nmax-model-length = 3",
            "unknown setting 'max-model-length'. Did you mean max-model",
        ),
        ("[[models]]\nmodel = '/b'\nmax-model-len = 'long'", "max-model-len: 'long' is not a valid int"),
        ("[[models]]\nmodel = '/b'\nmax-model-len = 0", "max-model-len: 0 is not at least 1"),
        ("[[models]]\nmodel = '/b'\nmax-num-seqs = [1]", r"max-num-seqs: \[1\] is no text"),
        ("[[models]]\nmodel = '/b'\ndtype = 'int3'", "dtype: 'int3' is not one of auto"),
        ("[[models]]\nmodel = '/b'\nconv-template = 'x'", "conv-template: x is not one of generate, shennong_chat"),
        ("[[models]]\nmodel = '/b'\nport = 80", "'port' is for the whole server: give --port on the command line"),
        ("[[models]]\nmodel = '/b'\nservice-id = 'x'", "is for the whole server"),
        ("[[models]]\nmodel = '/b'\nalso = 'x=y'", "is for the whole server"),
        ("[[models]]\nmodel = '/b'\nengines = 1\nworker-num = 2", "given twice"),
        ("[[models]]\nmodel = '/b'\n[[models]]\nmodel = '/b'", "two models are called '/b'"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_the_place(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        models_of(ServeSettings(models=written(tmp_path, text)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml cannot be read: No such file"):
        models_of(ServeSettings(models=str(tmp_path / "nowhere.toml")))


@pytest.mark.parametrize("also", [("/b=a",), ("/b=b", "/c=b"), ("/b=antiphon-demo",)])
def test_two_models_of_one_name_are_refused(also: tuple[str, ...]) -> None:
    served = "" if also == ("/b=antiphon-demo",) else "a"
    with pytest.raises(SettingsError, match="two models are called"):
        models_of(ServeSettings(served_model_name=served, also=also))


def test_what_is_said_of_a_model_that_the_command_line_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--served-model-name is about the model of --model"):
        models_of(ServeSettings(models=written(tmp_path, TOML), served_model_name="x"))


def test_a_default_model_must_be_served_here_unless_the_bus_is_shared() -> None:
    two = ServeSettings(model="/a", also=("/b=b",), default_model="c")
    with pytest.raises(SettingsError, match=r"--default-model: 'c' is not served\. Served: 'a', 'b'"):
        models_of(two)
    assert len(models_of(replace(two, default_model="b"))) == 2
    by_path = models_of(replace(two, default_model="/a"))
    assert [model.default_model for model in by_path] == ["a", "a"]
    assert len(models_of(replace(two, nats="nats://bus"))) == 2


def test_a_further_model_with_too_long_a_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="is not a name of at most 256 printable characters"):
        models_of(ServeSettings(model="/a", also=(f"/b={'n' * 257}",)))


def test_too_many_models_are_refused() -> None:
    with pytest.raises(SettingsError, match=f"{MODELS_MAX + 1} models are more than {MODELS_MAX}"):
        models_of(ServeSettings(also=tuple(f"/m{i}={i}" for i in range(MODELS_MAX))))


@pytest.mark.parametrize("command", ["serve", "run"])
def test_the_flag_is_repeated_for_each_further_model(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServeSettings] = []
    monkeypatch.setattr(launcher, "serve", lambda settings, _environ: found.append(settings) or 0)
    assert main([command, "--model=/a", "--also", "/b=b", "--also=/c=c"]) == 0
    assert [model.model for model in models_of(found[0])] == ["/a", "/b", "/c"]


def test_a_further_model_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", "--model", str(tmp_path), "--also", f"{tmp_path}/missing=b"]) == 78
    assert "missing" in capsys.readouterr().err


def test_the_direct_entry_point_takes_the_file_in_place_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[ServeSettings] = []
    monkeypatch.setattr(launcher, "serve", lambda settings, _environ: found.append(settings) or 0)
    assert api_server.main([f"--models={written(tmp_path, TOML)}"]) == 0
    assert [model_name(model) for model in models_of(found[0])] == ["small", "org/large"]
    assert api_server.main(["--also=/b=b"]) == 78
    assert "--model is needed" in capsys.readouterr().err


def test_a_model_that_is_loaded_has_the_settings_of_the_server_and_its_own() -> None:
    serve = ServeSettings(model="/a", served_model_name="a", engines=2, max_model_len=512, chat_template="x")
    model = loaded_model(serve, "b", {"model": "/b", "max-model-len": "64", "enable-prefix-caching": False}, [serve])
    assert (model.model, model.served_model_name, model.engines) == ("/b", "b", 2)
    assert (model.cache.enable_prefix_caching, model.chat_template) == (False, "")
    assert model.scheduler.max_model_len == 64


@pytest.mark.parametrize(
    ("name", "entry", "why"),
    [
        ("b", {"port": 1}, "settings: 'port' is for the whole server"),
        ("b", {"nats": "nats://elsewhere"}, "settings: 'nats' is for the whole server"),
        ("b", {"trust-remote-code": True}, "'trust-remote-code' can only be given when the server starts"),
        ("b", {"tokenizer_extension_path": "/x.py"}, "'tokenizer-extension-path' can only be given when the server"),
        ("b", {"served_model_name": "c"}, "leave out 'served-model-name': the model is loaded as 'b'"),
        ("b", {"max-model-length": 1}, "max-model-length"),
        ("a", {"served-model-alias": "also"}, None),
        ("b", {"served-model-alias": "a"}, "two models are called 'a'"),
    ],
)
def test_what_a_model_that_is_loaded_cannot_have_is_refused(name: str, entry: dict[str, Any], why: str | None) -> None:
    serve = ServeSettings(model="/a", served_model_name="a")
    if why is None:  # in place of the model of the command line, which was unloaded
        assert loaded_model(serve, name, {"model": "/b", **entry}, [serve]).served_model_name == name
        return
    with pytest.raises(SettingsError) as error:
        loaded_model(serve, name, {"model": "/b", **entry}, [serve])
    assert why in str(error.value)


def test_the_processes_of_a_loaded_model_use_gpus_that_no_engine_uses(tmp_path: Path) -> None:
    serve = ServeSettings(model=str(make_model(tmp_path / "one")), served_model_name="one")
    other, environ = str(make_model(tmp_path / "two")), {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    place = Place("nats://127.0.0.1:1", "", "")
    plan = VersionPlan(models=[serve], environ=environ, place=place, visible=("4", "5", "6"), common=serve)
    first = ChildSpec(name="engine-1", service="engine", argv=(), environ=environ, model="one")

    def loaded(number: int, running: list[ChildSpec], **entry: Any) -> list[ChildSpec]:
        return plan.loaded("two", number, other, {"model": other, **entry}, running)

    def gpus(specs: list[ChildSpec]) -> list[str]:
        return [(spec.environ or {})["CUDA_VISIBLE_DEVICES"] for spec in specs if spec.service == "engine"]

    specs = loaded(1, [first], engines=2)
    assert {spec.model for spec in specs} == {"two"}
    assert len({spec.name for spec in specs} | {"engine-1"}) == len(specs) + 1
    assert gpus(specs) == ["5", "6"]
    assert gpus(loaded(2, [first, *specs])) == ["4"]
    assert gpus(loaded(2, [first, *specs], device="cpu")) == ["4,5,6"]
    with pytest.raises(SettingsError, match="started with a role"):
        VersionPlan(models=[serve], environ={}, place=place).loaded("two", 1, other, {"model": other}, [])
