"""Checkpoints of gpt-oss with experts in MXFP4, against the plain weights that transformers makes of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.core.plan import CoreLimits
from services.engine.quantization.formats import prepared
from services.engine.quantization.formats.mxfp4 import LEVELS, plain_experts
from services.engine.worker.loading.model_files import read_config
from services.engine.worker.torch_worker import load_model
from shared.errors import ServiceError
from tests.model.harness import NUM_TOKENS, Engine, make_prompt
from tests.models import greedy_reference, make_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]


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
        assert torch.equal(plain_experts(blocks, scales, torch.float32), expected)
        tensors[name] = expected.contiguous()
    assert changed
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    others = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in changed}
    save_file({**others, **changed}, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def test_experts_in_mxfp4_give_the_text_of_the_weights_that_they_stand_for(both: tuple[Path, Path]) -> None:
    packed, plain = both
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(packed, CoreLimits(8, 24, enable_prefix_caching=False), "torch")
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]


def test_levels_and_scales_are_those_of_the_format() -> None:
    blocks = torch.arange(16, dtype=torch.uint8).repeat(1, 1, 1, 1)
    scales = torch.tensor([[[127]]], dtype=torch.uint8)
    found = plain_experts(blocks, scales, torch.float32)
    assert found.shape == (1, 32, 1)
    assert found[0, ::2, 0].tolist() == list(LEVELS)
    assert plain_experts(blocks, scales + 3, torch.float32)[0, 2, 0] == 4.0
    with pytest.raises(ValueError, match="do not belong together"):
        plain_experts(blocks, scales[..., :0], torch.float32)


def test_blocks_without_scales_are_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = both
    tensors = {name: t for name, t in load_file(packed / "model.safetensors").items() if not name.endswith("_scales")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    config = read_config(tmp_path)
    assert prepared("mxfp4", config).parts("model.layers.0.mlp.router", lambda _: True) == {}
    with pytest.raises(ServiceError, match=r"_blocks has no .*_scales"):
        load_model(tmp_path, config, torch.float32, torch.device("cpu"))
