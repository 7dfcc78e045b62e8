"""Checkpoints of gpt-oss with experts in MXFP4, against the plain weights that transformers makes of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.models.layers.linear import QuantizedLinear
from antiphon.services.engine.models.layers.mlp import ExpertMlp
from antiphon.services.engine.quantization.formats.mxfp4 import LEVELS, Mxfp4
from antiphon.shared.errors import ServiceError
from tests.model.harness import NUM_TOKENS, Engine, make_prompt, settings
from tests.models import greedy_reference, make_model
from tests.support.ranks import RankThreads

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
LIMITS = CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False)
PROMPTS = [make_prompt(length) for length in (5, 40)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and the plain one that it stands for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = make_model(tmp_path_factory.mktemp("plain"), "gpt_oss", intermediate_size=64)
    packed = make_model(tmp_path_factory.mktemp("packed"), "gpt_oss", intermediate_size=64)
    generator = torch.Generator().manual_seed(1)
    tensors, changed = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        changed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        weight = Mxfp4().weight({"blocks": blocks, "scales": scales}, (experts * out, width))
        assert torch.equal(weight.dequantized(), expected.transpose(1, 2).flatten(0, 1))
        tensors[name] = expected.contiguous()
    assert changed
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    others = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in changed}
    save_file({**others, **changed}, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_experts_in_mxfp4_stay_so_and_give_the_text_of_the_weights_that_they_stand_for(
    backend: str, both: tuple[Path, Path]
) -> None:
    packed, plain = both
    engine = Engine(packed, LIMITS, backend)
    assert engine.generate(PROMPTS) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]
    worker = engine.worker
    if isinstance(worker, CpuWorker):
        sizes = {entry.name: entry.num_bytes for entry in worker._decoder.weights}
        # 4 bits for each of 32 numbers and 4 bytes for their scale, in rows of 16 gates and 16 partners.
        assert sizes["layer 0, experts.up 1"] < 0.25 * 128 * 64 * 4
        return
    assert isinstance(worker, TorchWorker)
    assert isinstance(worker._model, Decoder)
    mlp = worker._model._weights.layers[0].mlp
    assert isinstance(mlp, ExpertMlp)
    assert {type(linear) for linear in (*mlp.gate_up, *mlp.down)} == {QuantizedLinear}


def test_experts_in_mxfp4_are_divided_among_ranks(both: tuple[Path, Path]) -> None:
    packed, plain = both
    chosen = settings(packed, max_num_seqs=LIMITS.max_num_seqs)
    ranks = RankThreads(lambda rank: TorchWorker(chosen, packed, torch.device("cpu"), rank), 2, 1)
    expected = [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert Engine.around(ranks, LIMITS).generate(PROMPTS) == expected


def test_levels_and_scales_are_those_of_the_format() -> None:
    blocks = torch.arange(16, dtype=torch.uint8).repeat(1, 1, 1, 1)
    parts = {"blocks": blocks, "scales": torch.tensor([[[127]]], dtype=torch.uint8)}
    found = Mxfp4().weight(parts, (1, 32)).dequantized()
    assert found.shape == (1, 32)
    assert found[0, ::2].tolist() == list(LEVELS)
    assert Mxfp4().weight({**parts, "scales": parts["scales"] + 3}, (1, 32)).dequantized()[0, 4] == 8.0
    with pytest.raises(ValueError, match="scales has shape"):
        Mxfp4().weight({**parts, "scales": parts["scales"][..., :0]}, (1, 32))
    with pytest.raises(ValueError, match="for 33 inputs in groups of 32"):
        Mxfp4().weight(parts, (1, 33))


def test_blocks_without_scales_are_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(both[0], tmp_path, dirs_exist_ok=True)
    tensors = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if not name.endswith("_scales")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ServiceError, match=r"the checkpoint lacks .*down_proj_scales"):
        Engine(tmp_path, LIMITS)
