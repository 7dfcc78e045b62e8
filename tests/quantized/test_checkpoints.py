"""Prepared checkpoints of every layout, in all backends, against transformers with the weights that they stand for."""

import json
import shutil
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.backends.triton.operations import TritonQuantizedLinear
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.models.layers.linear import QuantizedLinear
from antiphon.services.engine.models.layers.mlp import GatedMlp
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.parallel.linear import Summed
from antiphon.services.engine.quantization.choice import WeightForm
from antiphon.services.engine.quantization.formats import prepared
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.services.engine.worker.loading.parameters import ParameterReader
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE, Method, OnlineMode, prepared_method
from tests.model.harness import NUM_TOKENS, Engine, make_prompt, settings
from tests.models import greedy_reference, make_model
from tests.quantized.checkpoints import GROUP, LAYOUTS, compressed, make_checkpoints
from tests.support.ranks import RankThreads

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
APART = "gptq, each matrix in another order"
"""The layout whose matrices cannot be stacked: queries, keys and values become plain weights, gates and ups too."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths are multiples of every layout's groups."""
    return make_model(
        tmp_path_factory.mktemp("model"), "qwen2", seed=3, dtype="float32", hidden_size=64, intermediate_size=192
    )


@pytest.mark.spec("S-QNT-011", "S-QNT-012", "S-QNT-013")
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prepared_checkpoint_gives_the_tokens_of_the_weights_that_it_stands_for(
    name: str, backend: str, model: Path, tmp_path: Path
) -> None:
    quantized, plain = make_checkpoints(model, name, tmp_path)
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(
        quantized, CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False), backend
    )
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "name", ["gptq, symmetric", "gptq, inputs in another order", "awq", "gptq, 8 bits", "fp8, blocks"]
)
def test_the_kernels_for_gpus_multiply_the_weights_of_a_prepared_checkpoint(
    name: str, model: Path, tmp_path: Path
) -> None:
    """Under Triton's interpreter: a prompt in the prefill form, then a token in the decode form."""
    quantized, plain = make_checkpoints(model, name, tmp_path)
    prompt = make_prompt(20)
    engine = Engine(
        quantized, CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False), "triton"
    )
    worker = engine.worker
    assert isinstance(worker, TritonWorker)
    assert isinstance(worker._model._weights.layers[0].o, TritonQuantizedLinear)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    assert engine.generate([prompt], params) == [greedy_reference(plain, prompt, 2)]


def test_inputs_in_another_order_are_divided_among_ranks(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank's inputs of o and down are some of each group's, and stay quantized."""
    quantized, plain = make_checkpoints(model, "gptq, inputs in another order", tmp_path)
    limits, prompts = (
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
        [make_prompt(length) for length in (5, 40)],
    )
    chosen = settings(quantized, max_num_seqs=limits.max_num_seqs)
    ranks = RankThreads(lambda rank: TorchWorker(chosen, quantized, torch.device("cpu"), rank), 2, 1)
    expected = [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]
    assert Engine.around(ranks, limits).generate(prompts) == expected
    for worker in ranks.workers:
        assert isinstance(worker, TorchWorker)
        assert isinstance(worker._model, Decoder)
        for layer in worker._model._weights.layers:
            assert isinstance(layer.o, Summed)
            assert isinstance(layer.mlp, GatedMlp)
            assert isinstance(layer.mlp.down, Summed)
            parts = (layer.qkv, layer.o.part, layer.mlp.gate_up, layer.mlp.down.part)
            assert {type(part) for part in parts} == {QuantizedLinear}
    assert "became float32 weights" not in caplog.text


def test_stacked_matrices_with_different_orders_become_plain(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = make_checkpoints(model, APART, tmp_path)
    with reader(quantized) as parameters:
        kinds = [type(parameters.matrix(f"layers.1.{name}")) for name in ("qkv", "o", "up", "down")]
    assert kinds == [torch.Tensor, QuantizedWeight, torch.Tensor, QuantizedWeight]
    assert "layers.1.qkv and 1 more became float32 weights while loading" in caplog.text


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_exactly(name: str, model: Path, tmp_path: Path) -> None:
    quantized, plain = make_checkpoints(model, name, tmp_path)
    expected = load_file(plain / "model.safetensors")
    with reader(quantized) as parameters:
        for ours, theirs in (("layers.1.o", "self_attn.o_proj"), ("layers.0.down", "mlp.down_proj")):
            weight = parameters.matrix(ours)
            assert isinstance(weight, QuantizedWeight)
            bits = 4 if weight.kind == "int4" else 8
            # Scales, and zero points, of 32 bits for each group; the order of the inputs for all outputs.
            out, width = weight.shape
            assert weight.nbytes <= out * width * (bits + 64 / GROUP) / 8 + 4 * width + 8 * out
            wide = weight.dequantized()
            layer = ours.split(".")[1]
            torch.testing.assert_close(wide, expected[f"model.layers.{layer}.{theirs}.weight"], rtol=1e-6, atol=1e-7)
        fused = parameters.matrix("layers.0.qkv")
        parts = [expected[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert isinstance(fused, QuantizedWeight) == (name != APART)
        wide = fused.dequantized() if isinstance(fused, QuantizedWeight) else fused
        torch.testing.assert_close(wide, torch.cat(parts), rtol=1e-6, atol=1e-7)


def reader(directory: Path) -> ParameterReader:
    config = read_config(directory)
    family = find_family(config)
    description = family.describe(config)
    method = prepared_method(config)
    assert method is not None
    form = WeightForm(name=method, method=prepared(method, config))
    return ParameterReader(directory, description, family.layout(description), torch.float32, torch.device("cpu"), form)


@pytest.mark.spec("S-QNT-014", "S-QNT-018", "S-QNT-023", "S-DEP-014")
@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        # PyTorch's operations do not multiply quantized weights, so `auto` means plain weights there.
        *((asked, backend) for asked in ("", "smoothquant", "smooth_quant") for backend in ("torch", "native")),
        ("auto", "native"),
    ],
)
def test_the_file_of_smoothquant_is_loaded_without_the_original_weights(
    asked: str, backend: str, model: Path, tmp_path: Path
) -> None:
    quantized, plain = make_checkpoints(model, "w8a16", tmp_path)
    (quantized / "model.safetensors").rename(quantized / SMOOTHQUANT_FILE)
    shutil.copy(model / "config.json", quantized / "config.json")
    assert not list(quantized.glob("model*"))
    engine = Engine(
        quantized,
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False),
        backend,
        quantization=asked,
    )
    prompt = make_prompt(30)
    # Rows of 8 bits change logits by about a hundredth, so the first tokens are compared.
    produced, expected = engine.generate([prompt])[0], greedy_reference(plain, prompt, NUM_TOKENS)
    assert produced[:2] == expected[:2]


def test_rows_in_8_bits_follow_from_the_config(model: Path, tmp_path: Path) -> None:
    quantized, _ = make_checkpoints(model, "w8a16", tmp_path)
    config = json.loads((quantized / "config.json").read_text())
    rows = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    for given, kind in ((None, "int8"), (rows, "int8_dynamic")):
        config["quantization_config"] = compressed(8, rows=given, strategy="channel")
        (quantized / "config.json").write_text(json.dumps(config))
        with reader(quantized) as parameters:
            weight = parameters.matrix("layers.0.up")
        assert isinstance(weight, QuantizedWeight)
        assert weight.kind == kind


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 5}, "bits 5; weights of 2, 3, 4, 8 bits are"),
        ({"quant_method": "gptq"}, "'bits'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8; weights of 4 bits are"),
        ({"quant_method": "awq", "version": "gemv"}, "version gemv; gemm is"),
        (compressed(6), "num_bits 6; weights of 4 and 8 bits are"),
        (compressed(4, "float"), "floating-point weights of 4 bits"),
        (compressed(8, rows={"num_bits": 4, "type": "int"}), "input_activations that are not whole numbers of 8 bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups must have one group"),
    ],
)
def test_a_scheme_that_is_not_supported_is_named(settings: dict[str, object], said: str) -> None:
    method: Method = settings["quant_method"]  # type: ignore[assignment]
    with pytest.raises(SettingsError, match="is not supported: ") as refused:
        prepared(method, {"quantization_config": settings})
    assert said in str(refused.value)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "bias"])
def test_tensors_that_do_not_fit_are_named(damage: str, model: Path, tmp_path: Path) -> None:
    quantized, _ = make_checkpoints(model, "gptq", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    if damage == "missing":
        del tensors[f"{name}.scales"]
    elif damage == "extra":
        tensors[f"{name}.surplus"] = torch.zeros(3)
    elif damage == "bias":
        tensors[f"{name}.bias"] = torch.ones(192)
    else:
        tensors[f"{name}.scales"] = tensors[f"{name}.scales"][:1].contiguous()
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ServiceError) as refused, reader(quantized) as parameters:
        parameters.matrix("layers.0.up")
    assert f"{name}." in refused.value.message


def test_a_bias_of_zeros_that_a_package_added_changes_nothing(model: Path, tmp_path: Path) -> None:
    quantized, _ = make_checkpoints(model, "gptq", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(192)
    save_file(tensors, quantized / "model.safetensors")
    with reader(quantized) as parameters:
        assert isinstance(parameters.matrix("layers.0.up"), QuantizedWeight)


@pytest.mark.spec("S-QNT-015", "S-QNT-016")
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", ["qwen2", "lfm2"])
@pytest.mark.parametrize(("mode", "levels"), [("ifq", 255), ("ifq_nf4", 16)])
def test_plain_weights_are_rounded_while_they_are_loaded(
    mode: str, levels: int, family: str, backend: str, model: Path, tmp_path: Path
) -> None:
    """The tokens are those of the rounded weights in transformers; embedding and norms stay as they are."""
    from antiphon.services.engine.quantization.online import online_quantizer

    quantize = online_quantizer(mode)  # type: ignore[arg-type]
    plain = tmp_path / "plain"
    if family == "lfm2":
        model = make_model(tmp_path / "recurrent", family, seed=3, dtype="float32", tie_word_embeddings=False)
    shutil.copytree(model, plain)
    tensors = load_file(plain / "model.safetensors")
    for key, tensor in tensors.items():
        if any(part in key for part in ("_proj.weight", "feed_forward.w")):
            rounded = quantize("o", tensor)
            assert isinstance(rounded, QuantizedWeight)
            tensors[key] = rounded.dequantized()
            row = tensors[key][0]
            assert len(np.unique(row[: min(len(row), 64)])) <= levels
    head = quantize("head", tensors["lm_head.weight"])
    assert isinstance(head, QuantizedWeight)
    assert head.kind == "int8"
    tensors["lm_head.weight"] = head.dequantized()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(
        model,
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
        backend,
        quantization=mode,
    )
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize(
    ("rows_too", "weights_alone", "furthest"),
    [("ifq_w8a8", "ifq", 0.2), ("ifq_w4a8", "ifq_nf4", 1)],  # levels beside rows of 8 bits are rounded
)
def test_rows_are_rounded_too_if_this_is_asked_for(
    rows_too: str, weights_alone: str, furthest: float, family: str, tmp_path: Path
) -> None:
    """The backends compute the same, and what the rounded weights alone give is close."""
    model = make_model(tmp_path / "model", family, seed=5, dtype="float32")
    prompts, limits = (
        [make_prompt(length) for length in (5, 40)],
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
    )
    native, torch_operations, plain_rows = (
        Engine(model, limits, backend, quantization=mode).log_probabilities(prompts, 1)
        for backend, mode in (("native", rows_too), ("torch", rows_too), ("native", weights_alone))
    )
    for ours, others, close in zip(native, torch_operations, plain_rows, strict=True):
        np.testing.assert_allclose(ours, others, atol=2e-2)
        assert 0 < np.abs(np.asarray(ours) - np.asarray(close)).max() < furthest


@pytest.mark.parametrize(
    ("mode", "matrix", "columns", "kind"),
    [
        ("ifq_w8a8", "o", 64, "int8_dynamic"), ("ifq_w8a8", "head", 64, "int8_dynamic"),
        ("ifq_w8a8", "down", 2**16 + 1, "int8"), ("ifq_w4a8", "o", 64, "int4_dynamic"),
        ("ifq_w4a8", "down", 2**16 + 1, "int4_dynamic"), ("ifq_w4a8", "head", 64, "int8_dynamic"),
        ("ifq_w4a8", "head", 2**16 + 1, "int8"), ("ifq_w4a8", "norm", 64, ""), ("ifq_w8a8", "norm", 64, ""),
    ],
)  # fmt: skip
def test_modes_that_round_rows_choose_the_kind_of_each_matrix(mode: str, matrix: str, columns: int, kind: str) -> None:
    from antiphon.services.engine.quantization.online import online_quantizer

    rounded = online_quantizer(cast(OnlineMode, mode))(matrix, torch.ones(2, columns))
    assert (rounded.kind if isinstance(rounded, QuantizedWeight) else "") == kind


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_head_that_is_the_embedding_is_rounded_beside_it(backend: str, tmp_path: Path) -> None:
    from antiphon.services.engine.quantization.online import online_quantizer

    model = make_model(tmp_path / "tied", "qwen2", seed=5, dtype="float32", tie_word_embeddings=True)
    quantize = online_quantizer("ifq")
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for key, tensor in tensors.items():
        name = "head" if key == "lm_head.weight" else "o" if "_proj" in key and key.endswith("weight") else ""
        rounded = quantize(name, tensor)
        tensors[key] = rounded.dequantized() if isinstance(rounded, QuantizedWeight) else rounded
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(
        model,
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
        backend,
        quantization="ifq",
    )
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]
