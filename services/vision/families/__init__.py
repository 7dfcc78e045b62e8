"""The vision encoders of the supported model families. `family_of` selects the family of a config.

A new family is a module with a subclass of `ImageFamily`; it is registered here and in
`antiphon.shared.models.image_models.MODEL_TYPES`; its decoder is a module of `services/engine/models`.
"""

from typing import Any

from antiphon.services.vision.families import gemma3, gemma4, glm4v, idefics3, internvl, llava, mistral3, qwen_vl
from antiphon.services.vision.families.family import ImageFamily
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.image_models import TEXT_ONLY

_BY_TYPE: dict[str, type[ImageFamily]] = {
    "qwen2_vl": qwen_vl.QwenVlImages,
    "qwen2_5_vl": qwen_vl.QwenVlImages,
    "qwen3_vl": qwen_vl.QwenVlImages,
    "qwen3_vl_moe": qwen_vl.QwenVlImages,
    "qwen3_5": qwen_vl.QwenVlImages,
    "qwen3_5_moe": qwen_vl.QwenVlImages,
    "gemma3": gemma3.Gemma3Images,
    "gemma4": gemma4.Gemma4Images,
    "glm4v": glm4v.Glm4vImages,
    "glm46v": glm4v.Glm4vImages,
    "glm4v_moe": glm4v.Glm4vImages,
    "idefics3": idefics3.Idefics3Images,
    "smolvlm": idefics3.Idefics3Images,
    "internvl": internvl.InternVlImages,
    "mistral3": mistral3.Mistral3Images,
    "llava": llava.LlavaImages,
    "llava_next": llava.LlavaImages,
    "llava_onevision": llava.LlavaImages,
}


def family_of(config: Any) -> type[ImageFamily]:
    """Returns the family of a model's config (a transformers object). Raises SettingsError for a text model."""
    found = _BY_TYPE.get(config.model_type)
    if found is None:
        raise SettingsError(TEXT_ONLY)
    return found
