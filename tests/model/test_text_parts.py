"""The text of checkpoints with a vision encoder, against transformers with the whole model, on every CPU backend."""

from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.extras import check_extras
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from tests.model.harness import BACKENDS, Engine, greedy, make_prompt

pytestmark = pytest.mark.model

NUM_TOKENS = 8
TEXT: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VISION_IN_MODEL: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", WINDOWS, VISION),
    "mistral3": ("mistral3", {}, VISION),
    "mistral3 with ministral3": ("mistral3", {"model_type": "ministral3", "rope_parameters": YARN}, VISION),
    "internvl with qwen2": ("internvl", {}, VISION),
    "internvl with qwen3": ("internvl", {"model_type": "qwen3"}, VISION),
    "llava_onevision": ("llava_onevision", {}, VISION),
    "qwen3_vl": (
        "qwen3_vl",
        {"rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
        {**VISION_IN_MODEL, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": (
        "glm4v",
        {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        VISION_IN_MODEL,
    ),
    "smolvlm": ("smolvlm", {}, VISION),
}


def _make(directory: Path, name: str) -> Any:
    """Writes a checkpoint and gives the model back."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, text, vision = CASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config={**TEXT, **text}, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model, prompts = _make(tmp_path, name), [make_prompt(length) for length in (5, 40)]
    expected = list[list[int]]()
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(NUM_TOKENS):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            expected.append(ids[len(prompt) :])
    for backend in BACKENDS:
        engine = Engine(tmp_path, CoreLimits(max_num_seqs=4, max_num_batched_tokens=24), backend)
        assert engine.generate(prompts, greedy(NUM_TOKENS)) == expected, backend


def test_ministral_3_is_served_up_to_the_context_in_which_queries_are_not_scaled(tmp_path: Path) -> None:
    _make(tmp_path, "mistral3 with ministral3")
    config = read_config(tmp_path)
    assert find_family(config).describe(config).max_positions == 128


def test_other_decoders_and_wrong_sections_are_refused_with_the_reason(tmp_path: Path) -> None:
    _make(tmp_path, "glm4v")
    config = read_config(tmp_path)
    check_extras(EngineSettings(enable_mm=True), config)
    with pytest.raises(SettingsError, match="takes text only"):
        check_extras(EngineSettings(enable_mm=True), {**config, "model_type": "aya_vision"})
    for wrong in ([2, 2], [2, 1, 2]):
        config["text_config"]["rope_parameters"]["mrope_section"] = wrong
        with pytest.raises(ServiceError, match="must divide the 4 frequencies in three"):
            find_family(config).describe(config)
    config["text_config"]["model_type"] = "mamba"
    with pytest.raises(ServiceError, match="'mamba' is not served here; served: glm4v_text"):
        find_family(config).describe(config)
