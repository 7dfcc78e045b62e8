"""Decoders of multimodal checkpoints that are the same as the decoder of another family, except for images.

The decoder's fields are in `text_config`, and its tensors have another prefix. The tensors of encoder and projection
are skipped: `services/vision` runs them (`antiphon.shared.models.image_models`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from antiphon.services.engine.models.config_fields import Config, config_error, integer
from antiphon.services.engine.models.description import DecoderDescription, RopeParameters
from antiphon.services.engine.models.families import gemma, glm, llama, mistral, qwen2, qwen3
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
_MISTRAL = {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_QWEN = {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
_KINDS = {
    "gemma3_text": _Kind(gemma, "Gemma3ForCausalLM", _GEMMA3),
    "glm4v_text": _Kind(glm, "Glm4ForCausalLM", _GLM4V),
    "llama": _Kind(llama, "LlamaForCausalLM", {"vocab_size": 32_000, "intermediate_size": 11_008}),
    "ministral3": _Kind(mistral, "MistralForCausalLM", {**_MISTRAL, "vocab_size": 131_072, "rms_norm_eps": 1e-5}),
    "mistral": _Kind(mistral, "MistralForCausalLM", {**_MISTRAL, "vocab_size": 32_000, "sliding_window": 4096}),
    "qwen2": _Kind(qwen2, "Qwen2ForCausalLM", _QWEN),
    "qwen3": _Kind(qwen3, "Qwen3ForCausalLM", _QWEN),
    "qwen3_vl_text": _Kind(qwen3, "Qwen3ForCausalLM", {**_QWEN, "max_position_embeddings": 128_000}),
}
"""By `model_type` of the `text_config`. The defaults are those of transformers, for fields that such configs omit."""
_LAYOUTS: dict[str, _Decoder] = {
    "gemma": gemma, "glm": glm, "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3,
}  # fmt: skip
"""By name of the family in a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A `Family` of checkpoints whose decoder's tensors begin with `body` and `head` in place of `model` and `lm_head`.

    `others`: name prefixes of the other tensors.
    """

    ARCHITECTURES: tuple[str, ...]
    body: str
    head: str
    others: tuple[str, ...]
    kinds: tuple[str, ...]
    """Types of decoders that were compared with transformers."""
    images: Callable[[Config, Mapping[str, Any], DecoderDescription], DecoderDescription] | None = None
    """Function that adds to the description what images need in the decoder. It gets the config and the decoder's
    fields.
    """

    def describe(self, config: Config) -> DecoderDescription:
        """See `Family`."""
        text: dict[str, Any] = dict(config.get("text_config") or {})
        kind = text.get("model_type")
        if kind not in self.kinds:
            raise config_error(f"a decoder of type {kind!r} is not served here; served: {', '.join(self.kinds)}.")
        decoder = _KINDS[kind]
        fields = {**_USUAL, **decoder.defaults, **text, "architectures": [decoder.architecture]}
        for name in ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id"):
            if config.get(name) is not None:
                fields[name] = config[name]
        description = decoder.family.describe(fields)
        tied = (f"{self.head}.weight",) if description.tied_embeddings else ()
        context = min(description.max_positions, _unscaled_context(fields) or description.max_positions)
        description = replace(description, max_positions=context, other_parts=(*self.others, *tied))
        return description if self.images is None else self.images(config, fields, description)

    def layout(self, description: DecoderDescription, /) -> tuple[Parameter, ...]:
        """See `Family`."""
        return tuple(map(self._renamed, _LAYOUTS[description.family].layout(description)))

    def _renamed(self, parameter: Parameter) -> Parameter:
        return replace(parameter, sources=tuple(replace(x, name=self._name(x.name)) for x in parameter.sources))

    def _name(self, name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{self.body if first == 'model' else self.head}.{rest}"


def _unscaled_context(fields: Mapping[str, Any]) -> int | None:
    """Returns up to which number of positions Ministral 3 does not scale queries by position; None: it never does."""
    scaling = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    if not scaling.get("llama_4_scaling_beta"):
        return None
    return integer(scaling, "original_max_position_embeddings")


def _gemma3_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    return replace(text, mutual_images=True)


def _qwen3_vl_images(config: Config, fields: Mapping[str, Any], text: DecoderDescription) -> DecoderDescription:
    """Adds the alternating sections of rotary positions, and the number of layers that images add embeddings to."""
    rope = replace(_in_sections(text, fields, _QWEN3_VL_SECTIONS), interleaved_sections=True)
    levels = (config.get("vision_config") or {}).get("deepstack_visual_indexes", _QWEN3_VL_LEVELS)
    return replace(text, rope=rope, image_layers=len(levels))


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
_LLAVA_LIKE = partial(TextPart, body="language_model.model", head="language_model.lm_head")
_IN_MODEL = partial(TextPart, body="model.language_model", head="lm_head", others=("model.visual.",))
_LLAVA_PARTS = ("vision_tower.", "multi_modal_projector.")
TEXT_PARTS = (
    _LLAVA_LIKE(
        ARCHITECTURES=("Gemma3ForConditionalGeneration",), others=_LLAVA_PARTS, kinds=("gemma3_text",),
        images=_gemma3_images,
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("Mistral3ForConditionalGeneration",), others=_LLAVA_PARTS, kinds=("mistral", "ministral3"),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("InternVLForConditionalGeneration",), others=_LLAVA_PARTS, kinds=("qwen2", "qwen3", "llama"),
    ),
    _LLAVA_LIKE(
        ARCHITECTURES=("LlavaOnevisionForConditionalGeneration",), others=(*_LLAVA_PARTS, "image_newline"),
        kinds=("qwen2",),
    ),
    _IN_MODEL(
        ARCHITECTURES=("Qwen3VLForConditionalGeneration",), kinds=("qwen3_vl_text",), images=_qwen3_vl_images,
    ),
    _IN_MODEL(ARCHITECTURES=("Glm4vForConditionalGeneration",), kinds=("glm4v_text",), images=_glm4v_images),
    TextPart(
        ARCHITECTURES=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        body="model.text_model", head="lm_head", others=("model.vision_model.", "model.connector."), kinds=("llama",),
    ),
)  # fmt: skip
