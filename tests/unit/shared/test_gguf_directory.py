"""Model directories that are made from GGUF files: when they are made, what replaces their files, and refusals."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.gguf_model import directory as product
from antiphon.shared.models.model_files import located, model_aliases, model_directory, model_name, tokenizer_directory
from antiphon.shared.settings.quantization import Device, choose, read_model_config

CPU = Device("a CPU")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(product, "_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None, **fields: int) -> Path:
    """A model without layers."""
    architecture = "llama"
    writer = gguf.GGUFWriter(path, architecture)
    common = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    for name, value in (common | {"attention.head_count": 2} | fields).items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>", "<eos>"])
    writer.add_token_types([1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    blocks = gguf.quants.quantize(np.ones((5, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    if change is not None:
        change(writer)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def settings(path: Path, **more: Any) -> EngineSettings:
    return EngineSettings(model=str(path), **more)


def read(directory: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((directory / name).read_text())


def test_a_file_becomes_a_directory_that_every_service_finds(cache: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    directory = model_directory(settings(file))
    assert directory.parent == cache
    assert directory.stat().st_mode & 0o777 == 0o700
    assert tokenizer_directory(settings(file)) == directory == model_directory(settings(file), weights=False)
    assert (directory / "m.gguf").resolve() == file
    config = read(directory)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["head_dim"], config["tie_word_embeddings"]) == (5, 16, True)
    assert config["quantization_config"] == {"quant_method": "gguf", "types": ["Q8_0"]}
    assert read(directory, "generation_config.json")["eos_token_id"] == [4, 3]
    found = located(settings(file))
    assert (found.model, found.given_model, model_name(found)) == (str(directory), str(file), "m")
    assert model_aliases(found) == (str(file),)
    assert located(found).model == str(directory)


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    first = model_directory(settings(file))
    made = (first / "config.json").stat().st_mtime_ns
    assert model_directory(settings(file)) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    os.utime(file, (5, 5))
    second = model_directory(settings(file))
    assert second != first
    write(file, context_length=32)
    assert read(model_directory(settings(file)))["max_position_embeddings"] == 32


def test_a_directory_with_one_file_is_that_model_and_its_own_files_win(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "m.gguf")
    (folder / "tokenizer.json").write_text('{"mine": 1}')
    (folder / "ti_model_config.json").write_text('{"model_id": "Named"}')
    found = located(settings(folder))
    assert read(Path(found.model), "tokenizer.json") == {"mine": 1}
    assert model_name(settings(folder)) == "model"
    assert found.model_id == "Named"
    (folder / "config.json").write_text('{"architectures": ["MistralForCausalLM"]}')
    config = read(model_directory(settings(folder)))
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "gguf"


def test_other_weights_win_over_a_gguf_file_and_several_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf")
    with pytest.raises(SettingsError, match=r"has 2 GGUF files; give the path of one \(a\.gguf, b\.gguf\)"):
        model_directory(settings(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert model_directory(settings(tmp_path)) == tmp_path


def test_an_unknown_tokenizer_is_no_obstacle_where_another_is_used(tmp_path: Path) -> None:
    def other(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("new-one")

    file, elsewhere = write(tmp_path / "m.gguf", other), tmp_path / "tokenizer"
    elsewhere.mkdir()
    with pytest.raises(SettingsError, match=r"--model: .*m\.gguf: tokenizer\.ggml\.pre is new-one"):
        model_directory(settings(file))
    for more in ({"tokenizer": str(elsewhere)}, {"skip_tokenizer_init": True}):
        directory = model_directory(settings(file, **more))
        assert (directory / "config.json").is_file()
        assert not (directory / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("", "gguf"), ("auto", "gguf"), ("gguf", "gguf"), ("ifq", "ifq contradicts"), ("awq", "awq contradicts")],
)
def test_quantization_follows_the_file(asked: str, answer: str, tmp_path: Path) -> None:
    directory = model_directory(settings(write(tmp_path / "m.gguf")))
    if " " in answer:
        with pytest.raises(SettingsError, match=f"{answer} the model, whose weights are prepared with gguf"):
            choose(asked, directory, read_model_config(directory), CPU)
    else:
        assert choose(asked, directory, read_model_config(directory), CPU).method == answer


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.gguf", b"nothing", "--model: .*m.gguf is not a GGUF file"),
        ("m.gguf", b"GGUF", "--model: .*m.gguf is damaged"),
        ("m.bin", b"", "m.bin is a file; give the path of a directory, or of a file"),
    ],
)
def test_files_that_are_none_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        model_directory(settings(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (lambda w: w.add_string("llama.rope.scaling.type", "other"), {}, "positions scaled by other are not supported"),
        (lambda w: w.add_array("llama.feed_forward_length", [1, 2]), {}, "layers that differ in llama.feed_forward"),
        (None, {"attention.key_length": 16, "attention.value_length": 8}, "keys and values of different sizes"),
        (None, {"attention.head_count": 0}, "it has 0 heads"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(5, np.float32)),
            {},
            r"rope_freqs\.weight is F32 \[5\], not 8 numbers",
        ),
    ],
)
def test_variants_that_are_not_served_are_refused(
    change: Any, fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        model_directory(settings(write(tmp_path / "m.gguf", change, **fields)))


def test_an_architecture_without_a_family_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(
        SettingsError, match="the architecture mamba is not supported in GGUF files; supported: gemma, "
    ):
        model_directory(settings(tmp_path / "m.gguf"))


def test_without_a_private_home_the_temporary_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, open_to_all = write(tmp_path / "m.gguf"), tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setattr(product, "_CACHE", str(open_to_all))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert model_directory(settings(file)).parent == tmp_path / f"antiphon-gguf-{os.geteuid()}"
    monkeypatch.setattr("tempfile.tempdir", str(open_to_all))
    with pytest.raises(SettingsError, match="set HOME to one"):
        model_directory(settings(file))
