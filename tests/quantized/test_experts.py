"""Models with experts whose matrices are quantized, in all backends, against transformers with what they stand for."""

import logging
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts
from antiphon.services.engine.backends.triton.operations import TritonExpertMlp
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.models.layers.linear import DenseLinear, QuantizedLinear
from antiphon.services.engine.models.layers.mlp import ExpertMlp
from antiphon.services.engine.parallel.linear import Summed
from antiphon.services.engine.quantization.online import online_quantizer
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import NUM_TOKENS, Engine, make_prompt, settings
from tests.models import greedy_reference, make_model
from tests.quantized.checkpoints import LAYOUTS, make_checkpoints
from tests.support.ranks import RankThreads

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
APART = "gptq, each matrix in another order"
"""The layout whose gates and ups cannot be stacked; see `test_checkpoints`."""
SIZES = {
    "mixtral": {"intermediate_size": 96},
    "qwen2_moe": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 96, "mlp_only_layers": [1], "intermediate_size": 192},
    "glm4_moe": {"moe_intermediate_size": 96, "intermediate_size": 192},
    "ernie4_5_moe": {"moe_intermediate_size": 96, "intermediate_size": 192},
    "minimax_m2": {"intermediate_size": 96, "head_dim": 32},
}
"""Widths are multiples of every layout's groups."""
LIMITS = CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False)
PROMPTS = [make_prompt(length) for length in (5, 40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_model(root / family, family, seed=3, dtype="float32", **sizes) for family, sizes in SIZES.items()
    }


def expected(plain: Path) -> list[list[int]]:
    return [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]


def is_packed(engine: Engine) -> bool:
    """Whether the matrices of the first layer's experts are in memory as they are quantized."""
    worker = engine.worker
    if isinstance(worker, CpuWorker):
        weights = {entry.name: entry.num_bytes for entry in worker._decoder.weights}
        d = worker._decoder.description
        assert d.experts is not None
        plain = 2 * d.experts.intermediate_size * d.hidden_size * torch.float32.itemsize
        return weights["layer 0, experts.up 1"] < 0.5 * plain
    assert isinstance(worker, TorchWorker)
    assert isinstance(worker._model, Decoder)
    mlp = worker._model._weights.layers[0].mlp
    assert isinstance(mlp, ExpertMlp)
    kinds = {type(linear) for linear in (*mlp.gate_up, *mlp.down)}
    assert kinds in ({QuantizedLinear}, {DenseLinear})
    return kinds == {QuantizedLinear}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != APART])
def test_prepared_experts_give_the_tokens_of_the_weights_that_they_stand_for(
    name: str, models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = make_checkpoints(models["qwen2_moe"], name, tmp_path)
    tokens = expected(plain)
    for backend in ("torch", "native"):
        caplog.clear()
        engine = Engine(quantized, LIMITS, backend)
        assert engine.generate(PROMPTS) == tokens
        packs = not (backend == "native" and name.startswith("fp8"))
        assert is_packed(engine) == packs
        assert ("became float32 weights while loading" in caplog.text) == (not packs)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *product(("mixtral", "qwen3_moe", "glm4_moe"), ("gptq", "awq", "w8a16", "fp8, blocks")),
        ("ernie4_5_moe", "w4a16"),
        ("minimax_m2", "fp8, blocks"),
    ],
)
def test_families_name_their_experts_in_their_own_way(
    name: str, family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    quantized, plain = make_checkpoints(models[family], name, tmp_path)
    tokens = expected(plain)
    for backend in ("torch", "native"):
        assert Engine(quantized, LIMITS, backend).generate(PROMPTS) == tokens


@pytest.mark.spec("S-QNT-015", "S-QNT-016")
@pytest.mark.parametrize("mode", ["ifq", "ifq_nf4", "weight_only_int8", "auto"])
def test_experts_are_rounded_while_they_are_loaded(mode: str, models: dict[str, Path], tmp_path: Path) -> None:
    quantize = online_quantizer("ifq_nf4" if mode == "ifq_nf4" else "ifq")
    plain = tmp_path / "plain"
    shutil.copytree(models["qwen2_moe"], plain)
    tensors = load_file(plain / "model.safetensors")
    for key, tensor in tensors.items():
        if "_proj" in key:
            rounded = quantize("o", tensor) if key.endswith("weight") else tensor
            tensors[key] = rounded.dequantized() if isinstance(rounded, QuantizedWeight) else rounded
    head = quantize("head", tensors["lm_head.weight"])
    assert isinstance(head, QuantizedWeight)
    tensors["lm_head.weight"] = head.dequantized()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    tokens = expected(plain)
    # PyTorch's operations do not multiply quantized weights, so `auto` means plain weights there.
    for backend in ("native",) if mode == "auto" else ("torch", "native"):
        engine = Engine(models["qwen2_moe"], LIMITS, backend, quantization=mode)
        assert engine.generate(PROMPTS) == tokens
        assert is_packed(engine)


@pytest.mark.parametrize("name", ["gptq", "w8a16", "fp8, blocks", "ifq_nf4"])
def test_experts_are_divided_among_ranks(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Down has 192 inputs, and groups of 64 (NF4) or 32 are cut to 96: groups of 64 become groups of 32."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 128}
    model = make_model(tmp_path / "model", "qwen2_moe", seed=3, dtype="float32", **sizes)
    overrides = {"quantization": name} if name == "ifq_nf4" else {}
    quantized = model if overrides else make_checkpoints(model, name, tmp_path)[0]
    chosen = settings(quantized, max_num_seqs=LIMITS.max_num_seqs, **overrides)
    ranks = RankThreads(lambda rank: TorchWorker(chosen, quantized, torch.device("cpu"), rank), 2, 1)
    tokens = Engine(quantized, LIMITS, "torch", **overrides).generate(PROMPTS)
    assert Engine.around(ranks, LIMITS).generate(PROMPTS) == tokens
    for worker in ranks.workers:
        assert isinstance(worker, TorchWorker)
        assert isinstance(worker._model, Decoder)
        mlp = worker._model._weights.layers[0].mlp
        assert isinstance(mlp, Summed)
        assert isinstance(mlp.part, ExpertMlp)
        assert {type(linear) for linear in (*mlp.part.gate_up, *mlp.part.down)} == {QuantizedLinear}
    assert "became float32 weights" not in caplog.text


@pytest.mark.parametrize(
    ("family", "name"), [("mixtral", "awq"), ("qwen2_moe", "gptq"), ("qwen2_moe", "fp8, blocks"), ("mixtral", "w8a16")]
)
def test_the_kernels_for_gpus_multiply_packed_experts(
    family: str, name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Under Triton's interpreter."""
    quantized, plain = make_checkpoints(models[family], name, tmp_path)
    prompt = make_prompt(20)
    engine = Engine(quantized, LIMITS, "triton")
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    assert engine.generate([prompt], params) == [greedy_reference(plain, prompt, 2)]
    mlp = triton_mlp(engine)
    assert isinstance(mlp.weights.gate_up, PackedExperts)
    assert isinstance(mlp.weights.down, PackedExperts)


def test_the_kernels_for_gpus_say_which_experts_they_make_plain(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    prompt = make_prompt(20)
    with caplog.at_level(logging.WARNING):
        engine = Engine(models["mixtral"], LIMITS, "triton", quantization="ifq_w8a8")
    assert caplog.text.count("the Triton kernels multiply no experts of this format") == 1
    assert isinstance(triton_mlp(engine).weights.gate_up, torch.Tensor)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    assert len(engine.generate([prompt], params)[0]) == 1


def triton_mlp(engine: Engine) -> TritonExpertMlp:
    assert isinstance(engine.worker, TritonWorker)
    mlp = engine.worker._model._weights.layers[0].mlp
    assert isinstance(mlp, TritonExpertMlp)
    return mlp
