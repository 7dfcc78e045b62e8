"""Adapter files: what cannot be served is refused by name; scales follow peft's rules."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.adapters.peft_files import AdapterReader
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.errors import ServiceError
from tests.adapters import make_adapter
from tests.models import make_model

PREFIX = "base_model.model.model.layers.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def reader_of(model: Path, max_rank: int = 16) -> AdapterReader:
    config = read_config(model)
    family = find_family(config)
    return AdapterReader(family.layout(family.describe(config)), max_rank)


def refusal(reader: AdapterReader, path: Path) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        reader.read(path, "tales")
    assert "'tales'" in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3', not 'LORA'"),
        ({"use_dora": True}, "DoRA adapters are not supported ('use_dora'"),
        ({"bias": "all"}, "biases in an adapter ('bias': 'all') are not supported"),
        ({"lora_bias": True}, "biases of adapters (lora_bias)"),
        ({"modules_to_save": ["lm_head"]}, "whole modules in an adapter (modules_to_save)"),
        ({"trainable_token_indices": [1]}, "trained token embeddings"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "adapters of single parameters"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "it belongs to changed weights of the model"),
        ({"r": 0}, "'r' in adapter_config.json must be a whole number of at least 1, not 0"),
        ({"lora_alpha": "8"}, "'lora_alpha' in adapter_config.json must be a number, not '8'"),
        ({"r": 32}, "its rank is 32, above --max-lora-rank=16"),
        ({"rank_pattern": {"q_proj": 64}}, "its rank is 64, above --max-lora-rank=16"),
        ({"rank_pattern": {"(": 4}}, "which is no regular expression"),
        ({"r": 8}, "lora_A.weight has shape (4, 176), and the model and the rank ask for (8, 176)"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], why: str, model: Path, tmp_path: Path
) -> None:
    error = refusal(reader_of(model), make_adapter(tmp_path, model, **fields))
    assert error.code == "invalid_value"
    assert why in error.message


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}), "changes lm_head; here"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 331)}),
            "embeddings",
        ),
        (lambda t: t.update({f"{PREFIX}.self_attn.q_proj.lora_magnitude_vector": torch.ones(64)}), "DoRA"),
        (lambda t: t.update({f"{PREFIX}.self_attn.q_proj.lora_B.bias": torch.ones(64)}), "it has biases"),
        (
            lambda t: t.update({f"{PREFIX}.self_attn.z_proj.lora_A.weight": torch.ones(4, 64)}),
            "z_proj, which this model",
        ),
        (lambda t: t.update({"something": torch.ones(1)}), "the tensor something is not a LoRA matrix"),
        (lambda t: t.pop(f"{PREFIX}.mlp.up_proj.lora_B.weight"), f"lacks {PREFIX}.mlp.up_proj.lora_B.weight"),
        (lambda t: t[f"{PREFIX}.mlp.up_proj.lora_B.weight"].fill_(float("nan")), "numbers that are not finite"),
        (lambda t: t.clear(), "has no tensors"),
    ],
)
def test_a_tensor_that_cannot_be_served_is_refused_by_name(
    change: Callable[[dict[str, Any]], Any], why: str, model: Path, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path, model)
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")
    assert why in refusal(reader_of(model), path).message


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_cannot_be_read_is_refused_in_the_same_words_and_without_waiting(
    file: str, model: Path, tmp_path: Path
) -> None:
    library = AdapterLibrary(reader_of(model), lambda weights: weights, 1)
    paths = {kind: make_adapter(tmp_path / kind, model) for kind in ("gone", "pipe", "directory", "device", "link")}
    for path in paths.values():
        (path / file).unlink()
    os.mkfifo(paths["pipe"] / file)
    (paths["directory"] / file).mkdir()
    (paths["device"] / file).symlink_to("/dev/zero")
    (paths["link"] / file).symlink_to(paths["pipe"] / file)
    told = set[str]()
    for path in (*paths.values(), tmp_path / "nowhere", tmp_path / "a\0b", Path("~nobody-at-all")):
        for load in (library.load, lambda name, path: reader_of(model).read(Path(path), name)):
            with pytest.raises(ServiceError) as refused:
                load("a", str(path))
            assert refused.value.code == "not_found"
            told.add(refused.value.message.replace(str(path), "PATH"))
    assert {
        message.replace("adapter_config.json", "F").replace("adapter_model.safetensors", "F") for message in told
    } == {"The adapter 'a' cannot be served: there is no directory PATH with a file F that can be read."}


def test_missing_and_damaged_files_are_named(model: Path, tmp_path: Path) -> None:
    reader = reader_of(model)
    path = make_adapter(tmp_path / "a", model)
    (path / "adapter_model.safetensors").write_bytes(b"no")
    assert "cannot be read as safetensors" in refusal(reader, path).message
    (path / "adapter_model.safetensors").unlink()
    assert refusal(reader, path).code == "not_found"
    (path / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refusal(reader, path).message
    (path / "adapter_config.json").unlink()
    assert "with a file adapter_config.json that can be read" in refusal(reader, path).message


def test_scales_are_peft_s_for_ranks_and_alphas_of_modules_and_for_rslora(model: Path, tmp_path: Path) -> None:
    plain = reader_of(model).read(make_adapter(tmp_path / "a", model, alpha=8, rank=4), "a").deltas
    stable = reader_of(model).read(make_adapter(tmp_path / "b", model, alpha=8, rank=4, use_rslora=True), "b").deltas
    some = (
        reader_of(model)
        .read(make_adapter(tmp_path / "c", model, alpha=8, rank=4, alpha_pattern={"layers.1.self_attn.o_proj": 2}), "c")
        .deltas
    )
    for place, delta in plain.items():
        assert torch.equal(delta.a, stable[place].a)
        assert torch.allclose(delta.b * 2, stable[place].b)  # 8 / 4 and 8 / sqrt(4)
        factor = 0.25 if place == (1, "o") else 1.0
        assert torch.allclose(delta.b * factor, some[place].b)


def test_the_parts_of_a_stacked_matrix_have_blocks_of_their_own(model: Path, tmp_path: Path) -> None:
    deltas = reader_of(model).read(make_adapter(tmp_path, model, targets=("q_proj", "v_proj")), "a").deltas
    delta = deltas[0, "qkv"]
    assert (tuple(delta.a.shape), tuple(delta.b.shape)) == ((8, 64), (128, 8))
    assert [(b.row, b.row_end, b.rank, b.rank_end) for b in delta.blocks] == [(0, 64, 0, 4), (96, 128, 4, 8)]
    covered = torch.zeros_like(delta.b, dtype=torch.bool)
    for block in delta.blocks:
        covered[block.row : block.row_end, block.rank : block.rank_end] = True
    assert not bool(delta.b[~covered].any())
    assert bool(delta.b[covered].all())


def test_a_library_keeps_what_is_used_and_reads_the_rest_again(model: Path, tmp_path: Path) -> None:
    library = AdapterLibrary(reader_of(model), lambda weights: weights, 1)
    paths = [make_adapter(tmp_path / str(seed), model, seed=seed) for seed in (1, 2)]
    first = library.load("first", str(paths[0]))
    version = first.version
    second = library.load("second", str(paths[1]))
    assert library.find(version) is first, "a sequence may still use it"
    del first
    assert library.find(version) is None, "only the last one is kept"
    assert library.load("first", str(paths[0]), version).version == version
    make_adapter(paths[1], model, seed=3)
    assert library.load("second", str(paths[1]), second.version) is second, "in memory, whatever the files are now"
    replaced = library.load("second", str(paths[1]))
    assert replaced.version != second.version
    old = second.version
    del second
    with pytest.raises(ServiceError, match="have changed: load the adapter again"):
        library.load("second", str(paths[1]), old)
    assert json.loads((paths[0] / "adapter_config.json").read_text())["r"] == replaced.rank
