"""What the files of a model say about it."""

from pathlib import Path

import gguf
import pytest

from antiphon.services.engine.worker.loading.model_facts import model_facts
from antiphon.shared.config import EngineSettings
from antiphon.shared.models.model_files import DEMO_DIRECTORY, model_directory
from tests.gguf_files import write_gguf
from tests.models import make_model


def test_a_checkpoint_has_the_size_of_its_files_and_the_parameters_of_its_architecture() -> None:
    facts = model_facts(DEMO_DIRECTORY, on_device=False)
    assert (facts.architecture, facts.file_format, facts.quantization) == ("llama", "safetensors", "BF16")
    assert facts.weight_bytes == sum(path.stat().st_size for path in DEMO_DIRECTORY.glob("*.safetensors"))
    assert 0 <= facts.weight_bytes - 2 * facts.num_parameters < 2**16  # two bytes each, and the file's header
    assert not facts.on_device


def test_a_gguf_file_has_its_own_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = make_model(tmp_path / "model")
    path = tmp_path / "file.gguf"
    write_gguf(model, path, gguf.GGMLQuantizationType.Q8_0)
    facts = model_facts(model_directory(EngineSettings(model=str(path))), on_device=True)
    assert (facts.architecture, facts.file_format, facts.quantization) == ("llama", "gguf", "Q8_0")
    assert (facts.weight_bytes, facts.on_device) == (path.stat().st_size, True)
    assert facts.num_parameters == model_facts(model, on_device=False).num_parameters
