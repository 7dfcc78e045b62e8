"""Models by name: from the hub's cache, from a hub, or one clear message. No hub but this machine's own is asked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from antiphon.launch import launcher
from antiphon.services.tokenizer.service import TokenizerService
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings, TokenizerSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models import hub
from antiphon.shared.models.model_files import located, model_directory, model_name, tokenizer_directory
from tests.unit.shared.hub_server import COMMITS, NAME, Hub, serving, write_cache

SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"#"}
WEIGHTS = {"model.safetensors": b"weights", "pytorch_model.bin": b"the same", "consolidated.safetensors": b"again"}
ROOT = Path(hub.__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({commit: {**SMALL, **WEIGHTS} for commit in COMMITS.values()})) as started:
        files = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", started.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield started


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def refusal(**settings: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        located(EngineSettings(**{"model": NAME, **settings}))
    return str(raised.value)


@pytest.mark.spec("S-SRV-020", "S-SRV-026")
def test_a_name_is_found_in_the_cache_without_a_network(home: Path) -> None:
    main, tagged = write_cache(home, {**SMALL, **WEIGHTS}), write_cache(home, {**SMALL, **WEIGHTS}, "v1")
    assert model_directory(EngineSettings(model=NAME)) == main
    assert model_directory(EngineSettings(model=NAME, revision="v1")) == tagged
    assert model_directory(EngineSettings(model=NAME, revision=COMMITS["v1"])) == tagged
    assert model_name(EngineSettings(model=NAME)) == NAME


@pytest.mark.spec("S-SRV-027")
def test_a_tokenizer_may_be_of_another_revision_or_another_model(home: Path) -> None:
    main, tagged = write_cache(home, SMALL), write_cache(home, SMALL, "v1")
    assert tokenizer_directory(EngineSettings(model=NAME)) == main
    assert tokenizer_directory(EngineSettings(model=NAME, tokenizer_revision="v1")) == tagged
    assert tokenizer_directory(EngineSettings(model="/elsewhere", tokenizer=NAME, tokenizer_revision="v1")) == tagged
    assert tokenizer_directory(EngineSettings(model=NAME, revision="v1")) == tagged


@pytest.mark.spec("S-DEP-011")
def test_a_model_of_the_hub_keeps_its_name_and_has_the_template_of_its_directory(home: Path) -> None:
    said = b'{"model_id": "Baichuan2-13B-Chat", "conv_template_name": "baichuan2-chat"}'
    write_cache(home, {**SMALL, **WEIGHTS, "ti_model_config.json": said})
    for weights in (True, False):
        found = located(TokenizerSettings(model=NAME), weights=weights)
        assert (model_name(found), found.conv_template) == (NAME, "baichuan2-chat")
    assert located(TokenizerSettings(model=NAME, model_id="Foo")).served_model_name == "Foo"


@pytest.mark.spec("S-SRV-026", "S-SRV-027")
def test_a_launcher_looks_once_and_passes_directories_on(home: Path) -> None:
    main, tagged = write_cache(home, {**SMALL, **WEIGHTS}), write_cache(home, SMALL, "v1")
    asked = EngineSettings(model=NAME, revision="main", tokenizer_revision="v1")
    found = located(asked)
    assert (found.model, found.revision, found.served_model_name) == (str(main), "", NAME)
    assert (found.tokenizer, found.tokenizer_revision) == (str(tagged), "")
    assert located(found) == found
    assert located(EngineSettings(model=NAME, served_model_name="mine")).served_model_name == "mine"
    for local in (EngineSettings(), EngineSettings(model=str(main), revision="ignored")):
        assert located(local) == local


@pytest.mark.spec("S-SRV-026")
def test_what_is_missing_is_downloaded_and_no_weights_twice(online: Hub) -> None:
    small = model_directory(EngineSettings(model=NAME), weights=False)
    assert names(small) == {"config.json", "tokenizer.json"}
    whole = model_directory(EngineSettings(model=NAME))
    assert whole == small
    assert names(whole) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert model_directory(EngineSettings(model=NAME, revision="v1")).name == COMMITS["v1"]


def test_of_the_subdirectories_only_the_one_about_pooling_is_downloaded(online: Hub) -> None:
    online.files[COMMITS["main"]] |= {
        "1_Pooling/config.json": b"{}",
        "onnx/config.json": b"{}",
        "1_Dense/a.json": b"{}",
    }
    directory = model_directory(EngineSettings(model=NAME))
    assert (directory / "1_Pooling" / "config.json").is_file()
    assert not (directory / "onnx").exists()
    assert not (directory / "1_Dense").exists()


def test_weights_in_the_older_format_are_taken_where_there_are_no_others(online: Hub) -> None:
    del online.files[COMMITS["main"]]["model.safetensors"]
    assert "pytorch_model.bin" in names(model_directory(EngineSettings(model=NAME)))


def test_a_cache_of_its_own_can_be_named(online: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = home / "elsewhere"
    found = model_directory(EngineSettings(model=NAME, download_dir=str(elsewhere)))
    assert found.is_relative_to(elsewhere)
    assert not (home / "hub").exists()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert located(TokenizerSettings(model=NAME, download_dir=str(elsewhere))).model == str(found)
    assert f"in the cache {home / 'hub'}" in refusal()
    assert f"in the cache {home / 'none'}" in refusal(download_dir=str(home / "none"))


def test_what_was_downloaded_is_there_without_the_hub(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model_directory(EngineSettings(model=NAME))
    online.asked.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert model_directory(EngineSettings(model=NAME)) == whole
    assert not online.asked


def test_half_a_model_is_none(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model_directory(EngineSettings(model=NAME), weights=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "not wholly, in the cache" in refusal()


@pytest.mark.spec("S-SRV-026")
def test_an_unknown_revision_is_named(online: Hub) -> None:
    assert "has no revision 'v9'" in refusal(revision="v9")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RepoNotFound", "has no model of this name, or a private one. Check the name"),
        (401, "", "set HF_TOKEN"),
        (403, "GatedRepo", "is gated: accept its terms at"),
        (503, "", "could not be had from http://127.0.0.1"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(online: Hub, status: int, code: str, said: str) -> None:
    online.refusal = (status, code)
    message = refusal()
    assert message.startswith(f"--model: there is no directory {NAME}, and ")
    assert said in message


def test_a_hub_that_is_not_there_is_named_with_what_to_do(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = f"http://127.0.0.1:{unused_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    message = refusal()
    assert f"could not be had from {gone} (ConnectError" in message
    assert "Check the network" in message


def test_without_a_network_the_message_says_what_to_do(home: Path) -> None:
    message = refusal(revision="v1")
    assert f"{NAME} at revision 'v1' is not, or not wholly, in the cache {home / 'hub'}" in message
    assert f"hf download {NAME}" in message


@pytest.mark.parametrize("path", ["/no/such", "./choir/alto", "../alto", "a/b/c", "a b", "~/none"])
def test_what_can_only_be_a_path_is_looked_for_on_no_hub(path: str) -> None:
    assert refusal(model=path).endswith("Give the path of a model in Hugging Face layout, or of a GGUF file.")


def test_a_service_that_is_started_alone_looks_for_itself() -> None:
    with pytest.raises(SettingsError, match="HF_HUB_OFFLINE forbids"):
        TokenizerService(TokenizerSettings(model=NAME))


def test_a_launcher_starts_nothing_when_the_model_is_not_found() -> None:
    with pytest.raises(SettingsError, match="HF_HUB_OFFLINE forbids"):
        launcher.serve(ServeSettings(model=NAME), {})


@pytest.mark.parametrize("command", [["antiphon", "serve"], ["antiphon.services.tokenizer"]])
def test_the_command_ends_with_78_and_one_message(command: list[str], home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--model", NAME, "--nats=nats://127.0.0.1:1"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"run `hf download {NAME}`" in done.stderr
