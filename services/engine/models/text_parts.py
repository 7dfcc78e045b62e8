"""Decoders of multimodal checkpoints that are the same as the decoder of another family, except for images.

The decoder's fields are in `text_config` or `llm_config`, and its tensors have another prefix. The tensors of encoder
and projection are skipped: `services/vision` runs them (`antiphon.shared.models.image_models`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, config_error, integer
from antiphon.services.engine.models.description import DecoderDescription, RopeParameters
from antiphon.services.engine.models.families import (
    deepseek,
    gemma,
    gemma3n,
    gemma4,
    glm,
    glm4_moe,
    lfm2,
    llama,
    llama4,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen_moe,
)
from antiphon.services.engine.models.layout import Parameter


class _Decoder(Protocol):
    @staticmethod
    def describe(config: Config) -> DecoderDescription: ...

    @staticmethod
    def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]: ...


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of decoder: its family, its architecture, and default values of fields that a `text_config` may omit."""

    family: _Decoder
    architecture: str
    defaults: Mapping[str, Any]


_USUAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_GEMMA3_TOKENS = 256
"""Number of tokens of each image of Gemma 3, if its config does not tell."""
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_GLM4V = {
    "vocab_size": 151_552,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
}
_GLM4V_MOE = {
    "vocab_size": 151_424,
    "intermediate_size": 10_944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
_LFM2 = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
_LLAMA4 = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
_MISTRAL = {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_MISTRAL4 = {
    "vocab_size": 131_072,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
}
_MINISTRAL3 = {"num_hidden_layers": 34, "max_position_embeddings": 262_144}
_QWEN = {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
_QWEN3_MOE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_QWEN3_VL_MOE = {
    **_QWEN3_MOE,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128_000,
    "num_local_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
_QWEN3_5 = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
_QWEN3_5_MOE = {
    **_QWEN3_5,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DEEPSEEK3 = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 4096,
}
_KINDS = {
    "deepseek_v3": _Kind(deepseek, "DeepseekV3ForCausalLM", _DEEPSEEK3),
    "gemma3_text": _Kind(gemma, "Gemma3ForCausalLM", _GEMMA3),
    "gemma3n_text": _Kind(gemma3n, "Gemma3nForCausalLM", gemma3n.DEFAULTS),
    "gemma4_text": _Kind(gemma4, "Gemma4ForCausalLM", gemma4.DEFAULTS),
    "gemma4_unified_text": _Kind(
        gemma4,
        "Gemma4UnifiedForCausalLM",
        {**gemma4.DEFAULTS, "max_position_embeddings": 262_144, "sliding_window": 1024},
    ),
    "glm4v_moe_text": _Kind(glm4_moe, "Glm4MoeForCausalLM", _GLM4V_MOE),
    "glm4v_text": _Kind(glm, "Glm4ForCausalLM", _GLM4V),
    "kimi_k2": _Kind(deepseek, "DeepseekV3ForCausalLM", _DEEPSEEK3),
    "lfm2": _Kind(lfm2, "Lfm2ForCausalLM", _LFM2),
    "llama": _Kind(llama, "LlamaForCausalLM", {"vocab_size": 32_000, "intermediate_size": 11_008}),
    "llama4_text": _Kind(llama4, "Llama4ForCausalLM", _LLAMA4),
    "mistral4": _Kind(deepseek, "Mistral4ForCausalLM", _MISTRAL4),
    "ministral3": _Kind(mistral, "Ministral3ForCausalLM", {**_MISTRAL, "vocab_size": 131_072, **_MINISTRAL3}),
    "mistral": _Kind(mistral, "MistralForCausalLM", {**_MISTRAL, "vocab_size": 32_000, "sliding_window": 4096}),
    "qwen2": _Kind(qwen2, "Qwen2ForCausalLM", _QWEN),
    "qwen3": _Kind(qwen3, "Qwen3ForCausalLM", _QWEN),
    "qwen3_5_text": _Kind(qwen3_5, "Qwen3_5ForCausalLM", {**_QWEN, **_QWEN3_5}),
    "qwen3_5_moe_text": _Kind(qwen3_5, "Qwen3_5MoeForCausalLM", {**_QWEN, **_QWEN3_5_MOE}),
    "qwen3_moe": _Kind(qwen_moe, "Qwen3MoeForCausalLM", _QWEN3_MOE),
    "qwen3_vl_moe_text": _Kind(qwen_moe, "Qwen3MoeForCausalLM", _QWEN3_VL_MOE),
    "qwen3_vl_text": _Kind(qwen3, "Qwen3ForCausalLM", {**_QWEN, "max_position_embeddings": 128_000}),
}
"""By `model_type` of the `text_config`. The defaults are those of transformers, for fields that such configs omit."""
_LAYOUTS: dict[str, _Decoder] = {
    "deepseek": deepseek, "gemma": gemma, "gemma3n": gemma3n, "gemma4": gemma4, "glm": glm, "glm4_moe": glm4_moe,
    "lfm2": lfm2, "llama": llama, "llama4": llama4, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3,
    "qwen3_5": qwen3_5, "qwen_moe": qwen_moe,
}  # fmt: skip
"""By name of the family in a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A `Family` of checkpoints whose decoder's tensors begin with `body` and `head` in place of `model` and `lm_head`.

    `others`: name prefixes of the other tensors.
    """

    ARCHITECTURES: tuple[str, ...]
    ABOUT: About
    body: str
    head: str
    others: tuple[str, ...]
    kinds: tuple[str, ...]
    """Types of decoders that were compared with transformers."""
    section: str = "text_config"
    """The field of the config that has the decoder's fields."""
    images: Callable[[Config, Mapping[str, Any], DecoderDescription], DecoderDescription] | None = None
    """Function that adds to the description what images need in the decoder. It gets the config and the decoder's
    fields.
    """

    def describe(self, config: Config) -> DecoderDescription:
        """See `Family`."""
        text: dict[str, Any] = dict(config.get(self.section) or {})
        kind = text.get("model_type")
        if kind not in self.kinds:
            raise config_error(f"a decoder of type {kind!r} is not served here; served: {', '.join(self.kinds)}.")
        decoder = _KINDS[kind]
        fields = {**_USUAL, **decoder.defaults, **text, "architectures": [decoder.architecture]}
        for name in ("tie_word_embeddings", "tie_embedding", "dtype", "torch_dtype", "eos_token_id"):
            if config.get(name) is not None:
                fields[name] = config[name]
        description = decoder.family.describe(fields)
        tied = (f"{self.head}.weight",) if description.tied_embeddings else ()
        drafting = map(self._name, description.other_parts)
        description = replace(description, other_parts=(*self.others, *tied, *drafting))
        return description if self.images is None else self.images(config, fields, description)

    def layout(self, description: DecoderDescription, /) -> tuple[Parameter, ...]:
        """See `Family`."""
        return tuple(map(self._renamed, _LAYOUTS[description.family].layout(description)))

    def _renamed(self, parameter: Parameter) -> Parameter:
        return replace(parameter, sources=tuple(replace(x, name=self._name(x.name)) for x in parameter.sources))

    def _name(self, name: str) -> str:
        first, _, rest = name.partition(".")
        ours = {"model": self.body, "lm_head": self.head}
        return f"{ours.get(first, first)}.{rest}"


def _gemma3_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    return replace(text, mutual_images=True, mutual_tokens=integer(config, "mm_tokens_per_image", _GEMMA3_TOKENS))


def _gemma4_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    return replace(text, mutual_images=gemma4.has_mutual_images(fields), mutual_in_windows=True)


def _qwen3_vl_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    """Adds the alternating sections of rotary positions, and the number of layers that images add embeddings to."""
    rope = replace(_in_sections(text, fields, _QWEN3_VL_SECTIONS), interleaved_sections=True)
    levels = (config.get("vision_config") or {}).get("deepstack_visual_indexes", _QWEN3_VL_LEVELS)
    return replace(text, rope=rope, image_layers=len(levels))


def _qwen3_5_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    return replace(text, rope=replace(_in_sections(text, fields, _QWEN3_5_SECTIONS), interleaved_sections=True))


def _glm4v_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    return replace(text, rope=_in_sections(text, fields, _GLM4V_SECTIONS))


def _in_sections(text: DecoderDescription, fields: Mapping[str, Any], usual: tuple[int, ...]) -> RopeParameters:
    """Returns the rotary embedding with its sections; the `usual` ones if the config has none."""
    scaling = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    sections = tuple(scaling.get("mrope_section") or usual)
    assert text.rope is not None
    if len(sections) != _AXES or sum(sections) != text.rope.rotary_dim // 2:
        raise config_error(f"'mrope_section' must divide the {text.rope.rotary_dim // 2} frequencies in three.")
    return replace(text.rope, sections=sections)


_AXES = 3
_GLM4V_SECTIONS = (8, 12, 12)
_QWEN3_VL_SECTIONS = (24, 20, 20)
_QWEN3_VL_LEVELS = (8, 16, 24)
_QWEN3_5_SECTIONS = (11, 11, 10)
_LLAVA_LIKE = partial(TextPart, body="language_model.model", head="language_model.lm_head")
_IN_MODEL = partial(TextPart, body="model.language_model", head="lm_head", others=("model.visual.",))
_BESIDE = ("model.vision_tower.", "model.multi_modal_projector.")
_LLAVA_PARTS = ("vision_tower.", "multi_modal_projector.")
TEXT_PARTS = (
    _LLAVA_LIKE(
        ARCHITECTURES=("Gemma3ForConditionalGeneration",), ABOUT=About(models="Gemma 3 with images"),
        others=_LLAVA_PARTS, kinds=("gemma3_text",), images=_gemma3_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("Gemma3nForConditionalGeneration",),
        ABOUT=About(models="Gemma 3n (E2B, E4B)", limits=f"text only; {gemma3n.LIMITS}"),
        others=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
        kinds=("gemma3n_text",),
    ),
    _IN_MODEL(
        ARCHITECTURES=("Gemma4ForConditionalGeneration",),
        ABOUT=About(
            models="Gemma 4 (E2B, E4B, 26B, 31B)", tools=("gemma4",), reasoning=("gemma4",),
            limits=f"no sound; {gemma4.LIMITS}",
        ),
        others=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
        kinds=("gemma4_text",), images=_gemma4_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("Gemma4UnifiedForConditionalGeneration",),
        ABOUT=About(
            models="Gemma 4 (12B)", tools=("gemma4",), reasoning=("gemma4",), limits=f"text only; {gemma4.LIMITS}"
        ),
        others=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
        kinds=("gemma4_unified_text",),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("Mistral3ForConditionalGeneration",),
        ABOUT=About(
            models="Mistral Small 3.1 to 4, Ministral 3 with images", tools=("mistral",), reasoning=("mistral",),
            limits="Mistral Small 4: no LoRA",
        ),
        others=_LLAVA_PARTS, kinds=("mistral", "ministral3", "mistral4"),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("Llama4ForConditionalGeneration",),
        ABOUT=About(models="Llama 4 (checkpoints with images)", tools=("pythonic",), limits="text only"),
        others=("vision_model.", "multi_modal_projector."), kinds=("llama4_text",),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("InternVLForConditionalGeneration",), ABOUT=About(models="InternVL 3"),
        others=_LLAVA_PARTS, kinds=("qwen2", "qwen3", "llama"),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("InternVLChatModel",),
        ABOUT=About(models="InternVL 2.5 to 3.5 in the first format", limits="text only; not with InternLM decoders"),
        others=("vision_model.", "mlp1."), kinds=("qwen2", "qwen3", "qwen3_moe"), section="llm_config",
    ),
    _IN_MODEL(
        ARCHITECTURES=("InternS1ForConditionalGeneration",),
        ABOUT=About(models="Intern-S1", reasoning=("qwen3",), limits="text only"),
        others=_BESIDE, kinds=("qwen3", "qwen3_moe"),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ABOUT=About(
            models="Kimi K2.5", tools=("kimi_k2",), reasoning=("qwen3",),
        ),
        others=("vision_tower.", "mm_projector."), kinds=("deepseek_v3", "kimi_k2"),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("LlavaOnevisionForConditionalGeneration",), ABOUT=About(models="LLaVA-OneVision"),
        others=(*_LLAVA_PARTS, "image_newline"), kinds=("qwen2",),
    ),
    _IN_MODEL(
        ARCHITECTURES=("Qwen3VLForConditionalGeneration",),
        ABOUT=About(models="Qwen3-VL (dense)", tools=("hermes",), reasoning=("qwen3",)),
        kinds=("qwen3_vl_text",), images=_qwen3_vl_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("Qwen3VLMoeForConditionalGeneration",),
        ABOUT=About(models="Qwen3-VL with experts", tools=("hermes",), reasoning=("qwen3",)),
        kinds=("qwen3_vl_moe_text",), images=_qwen3_vl_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("MiniCPMV4_6ForConditionalGeneration",),
        ABOUT=About(models="MiniCPM-V 4.6", limits="text only"),
        others=("model.vision_tower.", "model.merger."), kinds=("qwen3_5_text",),
    ),
    _IN_MODEL(
        ARCHITECTURES=("Lfm2VlForConditionalGeneration",),
        ABOUT=About(models="LFM2-VL and LFM2.5-VL", tools=("lfm2",), limits="text only"),
        others=_BESIDE, kinds=("lfm2",),
    ),
    _IN_MODEL(
        ARCHITECTURES=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ABOUT=About(
            models="Qwen 3.5 to 3.8 (checkpoints with images)", tools=("qwen3_coder",), reasoning=("qwen3",),
            limits="`--use-mtp`: C++ and PyTorch",
        ),
        kinds=("qwen3_5_text", "qwen3_5_moe_text"), images=_qwen3_5_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("Glm4vForConditionalGeneration",), ABOUT=About(models="GLM-4.1V"), kinds=("glm4v_text",),
        images=_glm4v_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("Glm46VForConditionalGeneration",),
        ABOUT=About(models="GLM-4.6V-Flash, GLM-GA", tools=("glm45",), reasoning=("qwen3",)),
        kinds=("glm4v_text",), images=_glm4v_images,
    ),
    _IN_MODEL(
        ARCHITECTURES=("Glm4vMoeForConditionalGeneration",),
        ABOUT=About(
            models="GLM-4.5V and 4.6V", tools=("glm45",), reasoning=("qwen3",),
            limits="`--use-mtp`: C++ and PyTorch",
        ),
        kinds=("glm4v_moe_text",), images=_glm4v_images,
    ),
    TextPart(
        ARCHITECTURES=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        ABOUT=About(models="Idefics 3, SmolVLM"),
        body="model.text_model", head="lm_head", others=("model.vision_model.", "model.connector."), kinds=("llama",),
    ),
)  # fmt: skip
