"""The text of checkpoints with a vision encoder, against transformers with the whole model, on every CPU backend."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LLAMA4 = {
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "attention_chunk_size": 20,
    "no_rope_layers": [1, 0],
    "floor_scale": 16,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
QWEN3_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GLM_EXPERTS = {
    "n_routed_experts": 8,
    "n_group": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
LFM2_VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_patches": 16,
    "patch_size": 14,
}
KIMI_VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
GEMMA4_VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
GEMMA4 = {**WINDOWS, "global_head_dim": 48, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 331}
GEMMA3N = {
    **WINDOWS,
    "num_hidden_layers": 4,
    "layer_types": WINDOWS["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 331,
    "laurel_rank": 8,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", WINDOWS, VISION),
    "gemma3n": ("gemma3n", GEMMA3N, {}),
    "gemma4": ("gemma4", GEMMA4, {**GEMMA4_VISION, "head_dim": 16, "num_key_value_heads": 2}),
    "gemma4_unified": ("gemma4_unified", {**WINDOWS, "global_head_dim": 48}, GEMMA4_VISION),
    "mistral3": ("mistral3", {}, VISION),
    "mistral3 with ministral3": ("mistral3", {"model_type": "ministral3", "rope_parameters": YARN}, VISION),
    "mistral3 with mistral4": (
        "mistral3",
        {**LATENT, "model_type": "mistral4", "head_dim": 24, "n_group": 2, "rope_parameters": YARN},
        VISION,
    ),
    "mistral3 with mistral4, queries without a latent": (
        "mistral3",
        {**LATENT, "model_type": "mistral4", "head_dim": 24, "q_lora_rank": None, "rope_parameters": YARN},
        VISION,
    ),
    "kimi_k25": ("kimi_k25", LATENT, KIMI_VISION),
    "internvl with qwen2": ("internvl", {}, VISION),
    "internvl with qwen3": ("internvl", {"model_type": "qwen3"}, VISION),
    "llava_onevision": ("llava_onevision", {}, VISION),
    "qwen3_vl": (
        "qwen3_vl",
        {"rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
        {**VISION_IN_MODEL, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("qwen3_5", DELTA, VISION_IN_MODEL),
    "qwen3_5 with experts": ("qwen3_5_moe", {**DELTA, **EXPERTS}, VISION_IN_MODEL),
    "glm4v": (
        "glm4v",
        {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        VISION_IN_MODEL,
    ),
    "smolvlm": ("smolvlm", {}, VISION),
    "llama4": ("llama4", LLAMA4, {**VISION, "intermediate_size": 64, "vision_output_dim": 32}),
    "lfm2_vl": ("lfm2_vl", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, LFM2_VISION),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {**QWEN3_EXPERTS, "rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
        {**VISION_IN_MODEL, "deepstack_visual_indexes": [0]},
    ),
    "glm46v": (
        "glm46v",
        {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        VISION_IN_MODEL,
    ),
    "glm4v_moe": ("glm4v_moe", GLM_EXPERTS, VISION_IN_MODEL),
    "minicpmv4_6": ("minicpmv4_6", DELTA, VISION),
    "interns1": ("internvl", {"model_type": "qwen3_moe", **QWEN3_EXPERTS}, VISION),
    "internvl_chat": ("internvl", {"model_type": "qwen3"}, VISION),
    "internvl_chat with experts": ("internvl", {"model_type": "qwen3_moe", **QWEN3_EXPERTS}, VISION),
}
PUBLISHED: dict[str, tuple[str, dict[str, str]]] = {
    "gemma3n": ("Gemma3nForConditionalGeneration", {"model.": "model.language_model."}),
    "interns1": (
        "InternS1ForConditionalGeneration",
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
    "internvl_chat": ("InternVLChatModel", {"vision_tower.": "vision_model.", "multi_modal_projector.": "mlp1."}),
}
"""By first word of a case: the architecture and prefixes of tensors in checkpoints whose code transformers has under
other names."""
ALONE: dict[str, tuple[str, ...]] = {
    "gemma3n": (
        "model.vision_tower.stem.weight",
        "model.embed_vision.embedding.weight",
        "model.audio_tower.stem.weight",
        "model.embed_audio.embedding.weight",
        "model.language_model.layers.2.self_attn.k_proj.weight",
        "model.language_model.layers.3.self_attn.v_norm.weight",
    )
}
"""Cases whose encoders transformers makes with a package that is not here, so that the text is compared alone. With
tensors that such checkpoints have besides."""


def small_config(name: str) -> dict[str, Any]:
    """The content of config.json of a case's model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config, fields = _config(name), dict[str, Any]()
    architecture = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]
    if (kind := name.split()[0]) in PUBLISHED:
        architecture, fields["model_type"] = PUBLISHED[kind][0], kind
    written = {**config.to_diff_dict(), "architectures": [architecture], **fields}
    if architecture == "InternVLChatModel":
        written["llm_config"] = written.pop("text_config")
    return written


def _config(name: str) -> Any:
    from transformers import AutoConfig

    kind, text, vision = CASES[name]
    return AutoConfig.for_model(kind, text_config={**TEXT, **text}, vision_config=vision)


def _make(directory: Path, name: str) -> Any:
    """Writes a checkpoint and gives the model back."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind, config = CASES[name][0], _config(name)
    torch.manual_seed(0)
    if name in ALONE:
        model = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.float32).eval()
    else:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(directory)
    if kind == "kimi_k25":
        _name_layers_as_published(directory / "model.safetensors")
    if name.split()[0] in PUBLISHED:
        _name_parts_as_published(directory, name)
    return model


def _name_parts_as_published(directory: Path, name: str) -> None:
    path, (_, prefixes) = directory / "model.safetensors", PUBLISHED[name.split()[0]]
    (directory / "config.json").write_text(json.dumps(small_config(name)), encoding="utf-8")
    tensors = {each: torch.ones(2, 2) for each in ALONE.get(name, ())}
    for each, tensor in load_file(path).items():
        prefix = next((one for one in prefixes if each.startswith(one)), "")
        tensors[prefixes.get(prefix, "") + each.removeprefix(prefix)] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def _name_layers_as_published(path: Path) -> None:
    """Transformers reads `blocks` as `layers` in this type of model, and so writes all layers as `blocks`."""
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


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
    # Only these have latent attention with queries that grow.
    for backend in (*BACKENDS, "triton") if name == "mistral3 with mistral4" else BACKENDS:
        engine = Engine(tmp_path, CoreLimits(max_num_seqs=4, max_num_batched_tokens=24), backend)
        assert engine.generate(prompts, greedy(NUM_TOKENS)) == expected, backend


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
