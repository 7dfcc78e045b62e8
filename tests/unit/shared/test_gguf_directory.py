"""Model directories that are made from GGUF files: when they are made, what replaces their files, and refusals."""

import json
import os
import re
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


def write(
    path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None, architecture: str = "llama", /, **fields: int
) -> Path:
    """A model without layers."""
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
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(
        SettingsError, match="the architecture rwkv7 is not supported in GGUF files; supported: arcee, "
    ):
        model_directory(settings(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("architecture", "heads", "fields", "message"),
    [
        ("lfm2", [0, 2, 0], {}, "attention.head_count_kv has 3 numbers for 2 layers"),
        ("lfm2", [1, 2], {}, "layers that differ in lfm2.attention.head_count_kv are not supported"),
        ("lfm2", [0, 2], {"attention.sliding_window": 8}, "windows in the architecture lfm2 are not supported"),
        ("lfm2moe", [0, 2], {"expert_gating_func": 1}, "experts that are not chosen by sigmoids are not supported"),
        ("jamba", [0, 0], {}, "jamba.attention.head_count_kv is 0 for all layers"),
        ("llama", [0, 2], {}, "layers that differ in llama.attention.head_count_kv are not supported"),
    ],
)
def test_layers_without_attention_are_read_where_they_are_served(
    architecture: str, heads: list[int], fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    def with_heads(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(heads)

    common = {"block_count": 2, "shortconv.l_cache": 3}
    file = write(tmp_path / "m.gguf", with_heads, architecture, **common, **fields)
    with pytest.raises(SettingsError, match=re.escape(message)):
        model_directory(settings(file))


def test_layers_with_a_convolution_are_those_without_key_heads(tmp_path: Path) -> None:
    fields = {"block_count": 2, "shortconv.l_cache": 3}
    file = write(tmp_path / "m.gguf", lambda writer: writer.add_head_count_kv([0, 2]), "lfm2", **fields)
    config = read(model_directory(settings(file)))
    assert (config["layer_types"], config["num_key_value_heads"]) == (["conv", "full_attention"], 2)
    assert (config["conv_L_cache"], config["conv_bias"], config["intermediate_size"]) == (3, False, 32)
    assert config["norm_eps"] == pytest.approx(1e-5)


DELTA = {"ssm.inner_size": 24, "ssm.time_step_rank": 4, "ssm.group_count": 2, "ssm.state_size": 8, "ssm.conv_kernel": 4}


def test_every_fourth_layer_of_linear_attention_attends_if_the_file_does_not_say_it(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", None, "qwen35", **DELTA, **{"block_count": 6, "nextn_predict_layers": 1})
    config = read(model_directory(settings(file)))
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"]
    assert (config["num_hidden_layers"], config["linear_value_head_dim"], config["partial_rotary_factor"]) == (5, 6, 1)


def sliding(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window_pattern([True, False])


@pytest.mark.parametrize(
    ("architecture", "fields", "arrays", "message"),
    [
        ("qwen35", {**DELTA, "ssm.inner_size": 23}, {}, "qwen35.ssm.inner_size is 23, which are not 4 heads"),
        ("qwen35", DELTA, {"attention.recurrent_layers": [True]}, "recurrent_layers has 1 numbers for 2 layers"),
        ("granitehybrid", {**DELTA, "ssm.inner_size": 40}, {"attention.head_count_kv": [0, 2]}, "no multiple of 32"),
        ("jamba", DELTA, {"attention.head_count_kv": [0, 2]}, "ssm.inner_size is 24, no multiple of 32"),
        (
            "jamba",
            {**DELTA, "ssm.inner_size": 64, "block_count": 5},
            {"attention.head_count_kv": [0, 2, 2, 0, 2]},
            "the layers of the kind attn_layer are not every n-th one",
        ),
        ("llama4", {"expert_count": 4}, {}, "chunks of another length than 8192 are not supported"),
        ("gemma4", {}, {"feed_forward_length": [32, 48]}, "layers that differ in gemma4.feed_forward_length"),
        ("gemma4", {"rope.dimension_count_swa": 8}, {}, "heads of layers with windows that are rotated in part"),
        ("gemma4", {}, {"rope_freqs": [1.0] * 4 + [2.0] * 4}, "not that of a head that is rotated in part"),
        ("gemma4", {}, {"rope_freqs": [1.0] * 4}, "not that of a head that is rotated in part"),
    ],
)
def test_what_newer_architectures_must_not_have_is_refused(
    architecture: str, fields: dict[str, int], arrays: dict[str, list[Any]], message: str, tmp_path: Path
) -> None:
    def with_arrays(writer: gguf.GGUFWriter) -> None:
        sliding(writer)
        for name, values in arrays.items():
            if name == "rope_freqs":
                writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))
            else:
                writer.add_array(f"{architecture}.{name}", values)

    file = write(
        tmp_path / "m.gguf", with_arrays, architecture, **{"block_count": 2, **fields, "attention.sliding_window": 8}
    )
    with pytest.raises(SettingsError, match=re.escape(message)):
        model_directory(settings(file))


def test_layers_of_gemma_4_that_see_all_tokens_have_heads_of_their_own(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        sliding(writer)
        writer.add_head_count_kv([2, 1])
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 2 + [1e30] * 6, dtype=np.float32))

    more = {"block_count": 2, "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 8}
    file = write(tmp_path / "m.gguf", fill, "gemma4", **more, **{"attention.sliding_window": 8})
    config = read(model_directory(settings(file)))
    assert config["per_layer_config"] == {"1": {"head_dim": 16, "num_key_value_heads": 1}}
    assert (config["head_dim"], config["num_key_value_heads"], config["attention_k_eq_v"]) == (8, 2, True)
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25


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
