"""LLaVA 1.5 and LLaVA-NeXT: a CLIP or SigLIP encoder, and a projection of its patches to tokens of the decoder.

A picture of LLaVA 1.5 has one size, that of the encoder, and so always the same number of tokens. LLaVA-NeXT also cuts
a large picture into tiles of that size (`image_grid_pinpoints`), with a learned token at the end of each row.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from transformers import AutoModel, LlamaConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from services.vision.families.family import Embedded, PictureFamily
from shared.config import SettingsError

_PROCESSORS: dict[str, Any] = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "CLIPFeatureExtractor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
    "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
}
_USUAL = {"llava": "CLIPImageProcessor", "llava_next": "LlavaNextImageProcessor"}
_PARTS = ("vision_tower.", "multi_modal_projector.", "image_newline")


class LlavaPictures(PictureFamily):
    """See PictureFamily."""

    FIXED = frozenset({"size", "crop_size", "do_resize", "do_center_crop", "image_grid_pinpoints"})

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, fields, dtype)
        self._processor = self.processor(config, fields)(**fields)
        # The model of transformers with a decoder without layers: what is left is encoder and projection.
        small = copy.deepcopy(config)
        small.text_config = LlamaConfig(
            hidden_size=config.text_config.hidden_size,
            num_hidden_layers=0,
            vocab_size=1,
            intermediate_size=1,
            num_attention_heads=1,
            pad_token_id=None,
        )
        self.module = AutoModel.from_config(small, dtype=dtype)
        del self.module.language_model
        self.token_id = config.image_token_index

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See PictureFamily. Raises SettingsError for a processor that these models do not have."""
        named = fields.get("image_processor_type") or fields.get("feature_extractor_type") or _USUAL[config.model_type]
        found = _PROCESSORS.get(str(named).removesuffix("Fast").removesuffix("Pil"))
        if found is None:
            known = ", ".join(_PROCESSORS)
            raise SettingsError(f"--enable-mm: the model's image processor {named} is not served; served are {known}")
        return found

    @staticmethod
    def parameter(name: str) -> str | None:
        """See PictureFamily."""
        name = name.removeprefix("model.")
        if not name.startswith(_PARTS):
            return None
        return name.replace("vision_tower.vision_model.", "vision_tower.", 1)

    def embed(self, picture: Image.Image, device: str) -> Embedded:
        """See PictureFamily."""
        found = self._processor(picture, return_tensors="pt")
        pixels = found["pixel_values"].to(device=device, dtype=self.dtype)
        sizes = {"image_sizes": found["image_sizes"]} if "image_sizes" in found else {}
        model: Any = self.module
        output = model.get_image_features(pixels, **sizes, return_dict=True).pooler_output[0]
        return Embedded(1, len(output), output)
