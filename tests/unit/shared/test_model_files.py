"""Where a model lies and what it is called."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models import model_files
from antiphon.shared.models.model_files import (
    described,
    located,
    model_aliases,
    model_directory,
    model_name,
    short_name,
    tokenizer_directory,
)
from antiphon.shared.settings.allowed_values import CONV_TEMPLATES


def test_without_a_model_the_demo_model_is_taken():
    assert model_directory(EngineSettings()) == Path(model_files.__file__).resolve().parents[2] / "antiphon" / "demo"
    assert model_name(EngineSettings()) == "antiphon-demo"


@pytest.mark.spec("S-SRV-012", "S-SRV-020")
def test_a_model_is_called_by_the_last_part_of_its_path_unless_it_is_served_under_a_name(tmp_path):
    assert model_name(EngineSettings(model=str(tmp_path))) == tmp_path.name
    assert model_aliases(EngineSettings(model=str(tmp_path), served_model_alias="a,b")) == ("a", "b", str(tmp_path))
    named = EngineSettings(model=str(tmp_path), served_model_name="mine")
    assert (model_name(named), model_aliases(named)) == ("mine", ())
    assert model_directory(EngineSettings(model=str(tmp_path))) == tmp_path


def test_names_follow_from_what_was_given(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    (tmp_path / "m-00001-of-00002.gguf").touch()
    cases = {
        "org/elsewhere": "org/elsewhere",
        "org/repo:Q4_K_M": "org/repo:Q4_K_M",
        "org/here": "here",
        "org/here/": "here",
        "org/here/..": "org",
        ".": tmp_path.name,
        "/data/model": "model",
        "~/a/b/c": "c",
        "/": "/",
        "/data/x.Q8_0.gguf": "x.Q8_0",
        "m-00001-of-00002.gguf": "m",
        "": "",
    }
    assert {given: short_name(given) for given in cases} == cases
    run = EngineSettings(model="/data/model", served_model_alias="model")
    assert (model_name(run), model_aliases(run)) == ("model", ("/data/model",))


@pytest.mark.spec("S-SRV-021")
def test_the_tokenizer_is_the_models_unless_it_is_named(tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    assert tokenizer_directory(EngineSettings(model=str(tmp_path))) == tmp_path
    assert tokenizer_directory(EngineSettings(model=str(tmp_path), tokenizer=str(other))) == other


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match="--tokenizer: there is no directory"):
        tokenizer_directory(EngineSettings(model=str(tmp_path), tokenizer=str(tmp_path / "none")))


def test_a_directory_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"--model: {tmp_path} has no model: neither a config.json nor a file"):
        located(EngineSettings(model=str(tmp_path)))


# --- ti_model_config.json ---------------------------------------------------------------------------------------------

BAICHUAN = {"model_id": "Baichuan2-13B-Chat", "conv_template_name": "baichuan2-chat"}


def configured(directory: Path, content: object, **settings: Any) -> EngineSettings:
    """The settings of a model whose directory has this file."""
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "ti_model_config.json").write_text(text, encoding="utf-8")
    return described(EngineSettings(model=str(directory), **settings))


def test_a_name_in_the_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'model_id' is not a name of at most 256 printable characters"):
        configured(tmp_path, {**BAICHUAN, "model_id": "n" * 257})


@pytest.mark.spec("S-DEP-011", "S-DEP-012", "S-DEP-013", "S-SRV-004:model-directory")
def test_a_file_in_the_directory_names_the_model_and_its_template_where_the_settings_do_not(tmp_path: Path) -> None:
    found = configured(tmp_path, BAICHUAN)
    assert (model_name(found), found.conv_template) == ("Baichuan2-13B-Chat", "baichuan2-chat")
    found = configured(tmp_path, BAICHUAN, model_id="Foo", conv_template="generate")
    assert (model_name(found), found.conv_template) == ("Foo", "generate")
    found = configured(tmp_path, BAICHUAN, served_model_name="served")
    assert (model_name(found), found.model_id) == ("served", "Baichuan2-13B-Chat")


def test_what_a_file_does_not_say_stays_unset_and_what_nobody_knows_is_ignored(tmp_path: Path) -> None:
    plain = EngineSettings(model=str(tmp_path))
    for content in ({}, {"model_id": None, "conv_template_name": ""}, {"quantization": [1]}):
        assert configured(tmp_path, content) == plain
    assert configured(tmp_path, "\ufeff" + json.dumps({"model_id": "x"})).model_id == "x"
    (tmp_path / "ti_model_config.json").unlink()
    assert described(plain) == plain
    assert described(EngineSettings()) == EngineSettings()
    assert described(EngineSettings(model="org/on-the-hub")) == EngineSettings(model="org/on-the-hub")


@pytest.mark.spec("S-DEP-011", "S-DEP-013")
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"model_id": "x",\n oops}', r"is not valid JSON: .*line 2 column 2"),
        ("[1]", "must hold a JSON object with 'model_id' and 'conv_template_name'"),
        ({"model_id": 7}, "model_id must be a text, not 7"),
        ({"conv_template_name": ["llama-2"]}, "conv_template_name must be a text"),
        ({"conv_template_name": "nope"}, f"conv_template_name: nope is not one of {', '.join(CONV_TEMPLATES)}"),
        (
            {"conv_template_name": "shennong_chat"},
            "the layout of shennong_chat is not public: give it with --chat-temp",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_path_and_place(tmp_path: Path, content: object, told: str) -> None:
    with pytest.raises(SettingsError, match=told) as refused:
        configured(tmp_path, content)
    assert str(tmp_path / "ti_model_config.json") in str(refused.value)


@pytest.mark.spec("S-DEP-015b")
def test_the_template_whose_layout_is_not_public_is_one_that_a_user_brings(tmp_path: Path) -> None:
    assert "shennong_chat" in CONV_TEMPLATES
    with pytest.raises(SettingsError, match="the layout of shennong_chat is not public: give it with --chat-template"):
        described(EngineSettings(conv_template="shennong_chat"))
    brought = EngineSettings(conv_template="shennong_chat", chat_template="{{ messages }}")
    assert described(brought) == brought
    assert configured(tmp_path, {"conv_template_name": "shennong_chat"}, chat_template="{{ messages }}").chat_template


def test_a_located_model_is_described_and_stays_the_same(tmp_path: Path) -> None:
    (tmp_path / "ti_model_config.json").write_text(json.dumps(BAICHUAN))
    found = located(EngineSettings(model=str(tmp_path)))
    assert (found.model_id, found.conv_template) == ("Baichuan2-13B-Chat", "baichuan2-chat")
    assert located(found) == described(found) == found


def test_the_demo_model_is_not_looked_for_under_its_served_name():
    with pytest.raises(SettingsError, match="To serve the demo model, leave --model out"):
        model_directory(EngineSettings(model="antiphon-demo"))
