import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.services.engine.models.decoder import DecoderWeights
from antiphon.services.engine.models.layers.linear import DenseLinear
from antiphon.services.engine.models.layers.mlp import GatedMlp
from antiphon.services.engine.models.layers.norm import RmsNorm
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.services.engine.worker.loading.weights import load_weights
from antiphon.shared.errors import ServiceError

CPU = torch.device("cpu")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    config = read_config(directory)
    family = find_family(config)
    description = family.describe(config)
    with torch.inference_mode():
        return load_weights(directory, description, family.layout(description), dtype, CPU)


def refusal(directory: Path) -> str:
    with pytest.raises(ServiceError) as failure:
        load(directory)
    assert failure.value.param == "model"
    return failure.value.message


def test_projections_are_fused_in_the_order_query_key_value_and_gate_up(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    tensors, layer = load_file(directory / "model.safetensors"), load(directory).layers[1]
    x = torch.randn(3, 32)
    assert isinstance(layer.mlp, GatedMlp)
    for linear, prefix, names in (
        (layer.qkv, "self_attn", ("q_proj", "k_proj", "v_proj")),
        (layer.mlp.gate_up, "mlp", ("gate_proj", "up_proj")),
    ):
        expected = torch.cat([x @ tensors[f"model.layers.1.{prefix}.{name}.weight"].T for name in names], dim=-1)
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-5)
    assert layer.qk_norm is not None
    assert torch.equal(layer.qk_norm[3], tensors["model.layers.1.self_attn.q_norm.weight"])
    assert torch.equal(layer.qk_norm[4], tensors["model.layers.1.self_attn.k_norm.weight"])


def test_weights_are_converted_while_they_are_read(checkpoint: Callable[..., Path]) -> None:
    weights = load(checkpoint(dtype=torch.float16), torch.bfloat16)
    assert isinstance(weights.final_norm, RmsNorm)
    assert {weights.embedding.dtype, weights.final_norm.weight.dtype} == {torch.bfloat16}
    assert weights.head(torch.randn(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_the_embedding(checkpoint: Callable[..., Path], stored: torch.dtype) -> None:
    weights = load(checkpoint(dtype=stored, tie_word_embeddings=True))
    x = torch.randn(2, 32)
    torch.testing.assert_close(weights.head(x), x @ weights.embedding.T, rtol=1e-4, atol=1e-5)
    # A second form of the matrix is made only where the first one is the file's pages.
    assert isinstance(weights.head, DenseLinear) == (stored != torch.float32)


def test_a_tied_checkpoint_may_hold_a_head_of_its_own_and_old_buffers(checkpoint: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(53, 32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    load(checkpoint(change, tie_word_embeddings=True))


def test_names_may_lack_their_first_part(checkpoint: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    bare, x = load(checkpoint(change)), torch.randn(2, 32)
    whole = load(checkpoint())
    assert torch.equal(bare.embedding, whole.embedding)
    assert torch.equal(bare.head(x), whole.head(x))


def test_missing_tensors_are_named(checkpoint: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]

    assert "lacks lm_head.weight, model.layers.1.mlp.up_proj.weight" in refusal(checkpoint(change))


def test_tensors_that_the_model_does_not_use_are_named(checkpoint: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(32) for i in range(8)})

    message = refusal(checkpoint(change))
    assert "model.layers.0.self_attn.q_proj.bias" in message
    assert "and 3 more" in message


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(31)

    message = refusal(checkpoint(change))
    assert "model.norm.weight has shape (31,)" in message
    assert "(32,)" in message


@pytest.mark.matrix("S-08")
def test_a_damaged_file_is_refused(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot be read as safetensors" in refusal(directory)


def test_a_directory_without_weights_is_refused(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    (directory / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(directory)


def shard(directory: Path) -> dict[str, str]:
    """Splits the checkpoint so that the parts of fused parameters lie in different files."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


@pytest.mark.spec("S-DEP-010")
def test_a_checkpoint_may_be_split_over_files_by_an_index(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    whole = load(directory)
    shard(directory)
    split, x = load(directory), torch.randn(2, 32)
    assert torch.equal(split.embedding, whole.embedding)
    for ours, theirs in zip(split.layers, whole.layers, strict=True):
        assert torch.equal(ours.qkv(x), theirs.qkv(x))


def test_an_index_that_names_files_that_are_not_there_is_refused(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    shard(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(directory)


@pytest.mark.matrix("S-08")
@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_reach_outside_the_directory(checkpoint: Callable[..., Path], name: object) -> None:
    directory = checkpoint()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "outside the model directory" in refusal(directory)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_file_that_is_no_index_is_refused(checkpoint: Callable[..., Path], text: str) -> None:
    directory = checkpoint()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(text)
    assert "is not an index" in refusal(directory)
