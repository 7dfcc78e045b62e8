"""Where a model lies and what it is called."""

from pathlib import Path

import pytest

from shared import model_files
from shared.config import EngineSettings, SettingsError
from shared.model_files import model_directory, model_name, tokenizer_directory


def test_without_a_model_the_demo_model_is_taken():
    assert model_directory(EngineSettings()) == Path(model_files.__file__).parents[1] / "antiphon" / "demo"
    assert model_name(EngineSettings()) == "antiphon-demo"


@pytest.mark.spec("S-SRV-012", "S-SRV-020")
def test_a_model_is_called_by_its_path_unless_it_is_served_under_a_name(tmp_path):
    assert model_name(EngineSettings(model=str(tmp_path))) == str(tmp_path)
    assert model_name(EngineSettings(model=str(tmp_path), served_model_name="mine")) == "mine"
    assert model_directory(EngineSettings(model=str(tmp_path))) == tmp_path


@pytest.mark.spec("S-SRV-021")
def test_the_tokenizer_is_the_models_unless_it_is_named(tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    assert tokenizer_directory(EngineSettings(model=str(tmp_path))) == tmp_path
    assert tokenizer_directory(EngineSettings(model=str(tmp_path), tokenizer=str(other))) == other


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match="--tokenizer: there is no directory"):
        tokenizer_directory(EngineSettings(model=str(tmp_path), tokenizer=str(tmp_path / "none")))
