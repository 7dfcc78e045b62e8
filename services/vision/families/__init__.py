"""The vision encoders of the supported model families. `family_of` selects the family of a config.

A new family is a module with a subclass of `PictureFamily`; it is registered here and in
`shared.models.picture_models.MODEL_TYPES`; its decoder is a module of `services/engine/models`.
"""

from typing import Any

from services.vision.families import gemma3, glm4v, idefics3, internvl, llava, mistral3, qwen_vl
from services.vision.families.family import PictureFamily
from shared.flags import SettingsError
from shared.models.picture_models import TEXT_ONLY

_BY_TYPE: dict[str, type[PictureFamily]] = {
    "qwen2_vl": qwen_vl.QwenVlPictures,
    "qwen2_5_vl": qwen_vl.QwenVlPictures,
    "qwen3_vl": qwen_vl.QwenVlPictures,
    "gemma3": gemma3.Gemma3Pictures,
    "glm4v": glm4v.Glm4vPictures,
    "idefics3": idefics3.Idefics3Pictures,
    "smolvlm": idefics3.Idefics3Pictures,
    "internvl": internvl.InternVlPictures,
    "mistral3": mistral3.Mistral3Pictures,
    "llava": llava.LlavaPictures,
    "llava_next": llava.LlavaPictures,
    "llava_onevision": llava.LlavaPictures,
}


def family_of(config: Any) -> type[PictureFamily]:
    """Returns the family of a model's config (a transformers object). Raises SettingsError for a text model."""
    found = _BY_TYPE.get(config.model_type)
    if found is None:
        raise SettingsError(TEXT_ONLY)
    return found
