"""`--hf-overrides`: values merged over config.json, in a directory that every process finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.config import EngineSettings, TokenizerSettings, VisionSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models import model_files, overrides
from antiphon.shared.models.model_files import located, model_directory, tokenizer_directory
from antiphon.shared.models.overrides import merged

CONFIG = {"architectures": ["A"], "hidden_size": 8, "text_config": {"rope_theta": 1, "layers": 2}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(overrides, "_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "1_Pooling").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 8}')
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_values_replace_and_extend_fields_and_objects_are_merged() -> None:
    given = {"hidden_size": None, "text_config": {"rope_theta": 2, "new": {"a": 1}}, "classifier": ["no", "yes"]}
    assert merged(CONFIG, given) == {
        "architectures": ["A"],
        "hidden_size": None,
        "text_config": {"rope_theta": 2, "layers": 2, "new": {"a": 1}},
        "classifier": ["no", "yes"],
    }
    assert merged(CONFIG, {"text_config": 3, "architectures": ["B"]})["text_config"] == 3
    assert CONFIG["text_config"] == {"rope_theta": 1, "layers": 2}


def test_every_service_finds_the_same_directory_and_the_models_own_stays_as_it_is(model: Path, cache: Path) -> None:
    given: dict[str, Any] = {"model": str(model), "hf_overrides": '{"text_config": {"layers": 4}}'}
    directory = model_directory(EngineSettings(**given))
    assert directory.parent == cache
    assert read_config(directory) == merged(CONFIG, {"text_config": {"layers": 4}})
    assert json.loads((model / "config.json").read_text()) == CONFIG
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert (directory / "1_Pooling" / "config.json").read_text() == '{"word_embedding_dimension": 8}'
    for kind in (EngineSettings, TokenizerSettings, VisionSettings):
        settings = kind(**given)
        assert model_directory(settings) == tokenizer_directory(settings) == directory
        # A launcher passes the setting on, with the model's own directory; its child finds the same one.
        assert located(settings) == settings


def test_other_values_and_another_config_give_another_directory(model: Path) -> None:
    def directory(values: str) -> Path:
        return model_directory(EngineSettings(model=str(model), hf_overrides=values))

    found = {directory(values) for values in ('{"a": 1}', '{"a": 2}', '{"a":   1}')}
    assert len(found) == 2
    (model / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 16}))
    found.add(directory('{"a": 1}'))
    (model / "generation_config.json").write_text("{}")
    found.add(directory('{"a": 1}'))
    assert len(found) == 4
    assert (directory('{"a": 1}') / "generation_config.json").is_file()


@pytest.mark.parametrize("values", ["", "none", "{}"])
def test_without_values_the_models_own_directory_is_used(model: Path, cache: Path, values: str) -> None:
    assert model_directory(EngineSettings(model=str(model), hf_overrides=values)) == model
    assert not cache.exists()


def test_the_demo_model_and_directories_without_a_config(tmp_path: Path) -> None:
    found = model_directory(EngineSettings(hf_overrides='{"rope_theta": 5}'))
    assert read_config(found)["rope_theta"] == 5
    assert (found / "model.safetensors").resolve() == model_files.DEMO_DIRECTORY / "model.safetensors"
    (tmp_path / "empty").mkdir()
    assert model_directory(EngineSettings(model=str(tmp_path / "empty"), hf_overrides='{"a": 1}')).name == "empty"


def test_a_config_that_is_no_object_is_refused(model: Path) -> None:
    for text in ("[1]", "{"):
        (model / "config.json").write_text(text)
        with pytest.raises(SettingsError, match=r"config\.json"):
            model_directory(EngineSettings(model=str(model), hf_overrides='{"a": 1}'))


def test_a_home_that_others_can_write_is_not_used(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = model_directory(EngineSettings(model=str(model), hf_overrides='{"a": 1}'))
    assert found.is_relative_to(tmp_path / "temporary")
