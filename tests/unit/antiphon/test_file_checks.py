"""What `antiphon serve` refuses by a model's files before it starts any process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.launch import devices
from antiphon.launch.file_checks import check_files
from antiphon.launch.launcher import located_models
from antiphon.services.engine.backends.load import choose_device, load_worker
from antiphon.services.engine.backends.torch.own_cache.kinds import OWN_CACHE_TYPES
from antiphon.services.engine.backends.torch.whole_text.kinds import ENCODERS
from antiphon.services.engine.models import unknown
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, converted
from antiphon.shared.models.model_files import DEMO_DIRECTORY

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(DEMO_DIRECTORY, tmp_path / "model"))


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refusal(directory: Path, **settings: Any) -> str:
    """The message, which the engine itself gives too."""
    asked = ServeSettings(model=str(directory), device="cpu", **settings)
    with pytest.raises(SettingsError) as raised:
        located_models([asked], {})
    with pytest.raises((ServiceError, SettingsError)) as from_engine:
        load_worker(converted(asked, EngineSettings))
    error = from_engine.value
    assert str(raised.value) == (error.message if isinstance(error, ServiceError) else str(error))
    return str(raised.value)


def test_a_context_beyond_the_models_is_refused(model: Path) -> None:
    message = "--max-model-len is 999999; this model allows 1 to 2048 tokens."
    assert refusal(model, max_model_len=999999) == message
    assert refusal(model, max_model_len=0) == message.replace("999999", "0")
    located_models([ServeSettings(model=str(model), device="cpu", max_model_len=2048)], {})
    located_models([ServeSettings(device="cpu")], {})


def test_a_directory_without_config_or_weights_is_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.rename(model / "elsewhere")
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert "names files that are not there: one.safetensors" in refusal(model)
    (model / "config.json").unlink()
    assert refusal(model) == f"{model} is not a model directory: it has no config.json."


def test_a_directory_of_something_else_has_no_model(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"has no model: neither a config\.json nor a file \*\.gguf"):
        located_models([ServeSettings(model=str(tmp_path), device="cpu")], {})


def test_a_truncated_file_is_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    assert f"The model cannot be loaded: {weights} cannot be read as safetensors" in refusal(model)
    os.truncate(weights, 4)
    assert "cannot be read as safetensors" in refusal(model)


def test_a_type_of_weights_that_nothing_computes_with_is_refused(model: Path) -> None:
    change(model, torch_dtype="float13")
    assert refusal(model) == (
        "config.json: weights of type 'float13' are not supported; supported: float32, float16, bfloat16."
    )


def test_an_architecture_that_nobody_knows_is_refused(model: Path) -> None:
    change(model, architectures=["FooForCausalLM"], model_type="foo")
    assert refusal(model).startswith(
        "config.json: architecture FooForCausalLM is not supported, nor does it run through transformers: it has no "
        "models of type 'foo'. Supported by themselves: AfmoeForCausalLM"
    )
    change(model, auto_map={"AutoModelForCausalLM": "modeling_foo.Foo"})
    assert "its code comes with the model, and is run with --trust-remote-code only" in refusal(model)
    located_models([ServeSettings(model=str(model), device="cpu", trust_remote_code=True)], {})
    # What transformers may know is left to it.
    change(model, model_type="phimoe", auto_map=None)
    located_models([ServeSettings(model=str(model), device="cpu")], {})


@pytest.mark.parametrize("kind", sorted({*OWN_CACHE_TYPES, *ENCODERS}))
def test_types_that_run_through_transformers_are_known(kind: str) -> None:
    unknown.check_known({"model_type": kind}, trusted=False)


def test_without_the_lists_of_transformers_nothing_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown, "_LISTS", ("moved.py",))
    unknown.check_known({"model_type": "foo"}, trusted=False)


def test_a_gpu_is_missed_at_once(tmp_path: Path) -> None:
    asked, nothing = ServeSettings(device="cuda"), {"PATH": "/bin"}
    for environ, files in ((nothing, ()), ({devices.VARIABLE: ""}, ("nvidia0",)), ({devices.VARIABLE: "0"}, ())):
        directory = tmp_path / f"{len(environ)}{environ.get(devices.VARIABLE)}"
        directory.mkdir()
        for name in files:
            (directory / name).touch()
        with pytest.raises(SettingsError, match="--device cuda: no CUDA device is available here"):
            check_files(asked, environ, directory)
    for name in ("nvidia0", "dxg", "kfd"):
        (tmp_path / name).touch()
        check_files(asked, nothing, tmp_path)
        (tmp_path / name).unlink()


def test_the_engine_says_the_same_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ServiceError, match="--device cuda: no CUDA device is available here"):
        choose_device("cuda")


def test_a_refusal_is_the_only_line_and_imports_no_torch(model: Path) -> None:
    code = (
        "import sys; from antiphon.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code if not {'torch', 'numpy', 'transformers'} & sys.modules.keys() else 3)"
    )
    (model / "model.safetensors").unlink()
    words = ["serve", str(model), "--device=cpu", "--port=0"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78, done.stderr
    assert done.stderr.startswith("antiphon: The model cannot be loaded: ")
    assert done.stderr.count("\n") == 1
