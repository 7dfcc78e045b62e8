"""GGUF files of repositories on the hub, chosen by a tag. The hub is one on this machine."""

from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest

from antiphon.shared.config import EngineSettings, TokenizerSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models import hub
from antiphon.shared.models.gguf_model import directory as product
from antiphon.shared.models.model_files import located, model_aliases, model_directory, model_name, tokenizer_directory
from tests.unit.shared.hub_server import COMMITS, NAME, Hub, write_cache
from tests.unit.shared.test_gguf_directory import write
from tests.unit.shared.test_hub import home, online

__all__ = ["home", "online"]
MAIN = COMMITS["main"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(product, "_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> bytes:
    return write(tmp_path / "made.gguf").read_bytes()


def refusal(name: str) -> str:
    with pytest.raises(SettingsError) as raised:
        located(EngineSettings(model=name))
    return str(raised.value)


def weights_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.gguf"))


def downloads(online: Hub) -> set[str]:
    return {path.rpartition("/")[2] for path in online.asked if path.endswith(".gguf")}


def test_a_tag_names_one_file_of_a_repository(online: Hub, file: bytes) -> None:
    online.files[MAIN] |= {"m-Q4_K_M.gguf": file, "m-Q8_0.gguf": file}
    asked = EngineSettings(model=f"{NAME}:q8_0")
    found = located(asked)
    assert weights_of(Path(found.model)) == ["m-Q8_0.gguf"]
    assert downloads(online) == {"m-Q8_0.gguf"}
    assert (Path(found.model) / "m-Q8_0.gguf").read_bytes() == file
    assert (model_name(found), found.given_model, found.revision) == (f"{NAME}:q8_0", f"{NAME}:q8_0", "")
    assert model_aliases(found) == ()
    assert located(found) == found
    # The tokenizer is in the same file.
    assert tokenizer_directory(TokenizerSettings(model=f"{NAME}:q8_0")) == Path(found.model)
    assert model_directory(EngineSettings(model=f"hf.co/{NAME}:Q8_0")) == Path(found.model)


def test_a_repository_of_gguf_files_alone_needs_no_tag(online: Hub, file: bytes) -> None:
    online.files[MAIN] = {"config.json": b"{}", "m-Q4_K_M.gguf": file, "m-Q8_0.gguf": file, "mmproj-F16.gguf": b""}
    for name in (NAME, f"{NAME}:latest"):
        assert weights_of(model_directory(EngineSettings(model=name))) == ["m-Q4_K_M.gguf"]
    assert tokenizer_directory(TokenizerSettings(model=NAME)) == model_directory(EngineSettings(model=NAME))
    assert downloads(online) == {"m-Q4_K_M.gguf"}
    assert hub.find_snapshot(NAME, "", "--model", weights=True).name == "m-Q4_K_M.gguf"


def test_other_weights_come_before_gguf_files(online: Hub, file: bytes) -> None:
    online.files[MAIN] |= {"m-Q4_K_M.gguf": file}
    assert (model_directory(EngineSettings(model=NAME)) / "model.safetensors").is_file()
    del online.files[MAIN]["tokenizer.json"]
    assert model_directory(EngineSettings(model=NAME), weights=False).name == MAIN
    assert not downloads(online)


def test_parts_are_downloaded_together(online: Hub, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-Q4_0.gguf", "llama", split_max_tensors=1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "c", "<eos>"])
    writer.add_token_types([1, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    writer.add_tensor("token_embd.weight", np.ones((5, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    parts = sorted(tmp_path.glob("m-Q4_0-*.gguf"))
    assert len(parts) == 2
    online.files[MAIN] = {f"Q4_0/{part.name}": part.read_bytes() for part in parts}
    directory = model_directory(EngineSettings(model=f"{NAME}:Q4_0"))
    assert weights_of(directory) == [part.name for part in parts]


def test_what_was_downloaded_is_found_without_the_hub(
    online: Hub, file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.files[MAIN] = {"m-Q6_K.gguf": file, "m-Q5_0.gguf": file}
    tagged = EngineSettings(model=f"{NAME}:Q5_0")
    directory = model_directory(tagged)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert model_directory(tagged) == directory
    assert model_directory(EngineSettings(model=NAME)) == directory
    assert "it has no GGUF file with the tag 'Q6_K'; it has: Q5_0." in refusal(f"{NAME}:Q6_K")


def test_a_cache_that_another_program_filled_is_used(home: Path, file: bytes) -> None:
    write_cache(home, {"sub/m-Q4_0.gguf": file})
    assert weights_of(model_directory(EngineSettings(model=f"{NAME}:q4_0"))) == ["m-Q4_0.gguf"]


def test_without_a_hub_a_model_in_the_cache_may_lack_a_tokenizer(home: Path) -> None:
    snapshot = write_cache(home, {"config.json": b"{}"})
    assert model_directory(EngineSettings(model=NAME), weights=False) == snapshot
    assert "HF_HUB_OFFLINE forbids to download it" in refusal(f"{NAME}:Q4_0")


def test_refusals_name_the_repository_and_what_it_has(online: Hub, file: bytes) -> None:
    online.files[MAIN] |= {"m-Q4_K_M.gguf": file, "m-Q8_0.gguf": file}
    told = f"--model: {NAME} cannot be served: it has no GGUF file with the tag 'Q3_K'; it has: Q4_K_M, Q8_0."
    assert refusal(f"{NAME}:Q3_K") == told
    assert "has no model of this name" in refusal("choir/none:Q8_0")
    assert not downloads(online)
