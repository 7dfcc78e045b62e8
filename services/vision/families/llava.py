"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a CLIP or SigLIP encoder, and a projection of its patches to tokens.

An image of LLaVA 1.5 has one size, that of the encoder, and so always the same number of tokens. LLaVA-NeXT also cuts
a large image into tiles of that size (`image_grid_pinpoints`), with a learned token at the end of each row, and
LLaVA-OneVision reduces the number of patches by interpolation if an image would have many (`anyres_max_9`).
"""

from collections.abc import Mapping
from typing import Any

from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from antiphon.services.vision.families.tower import TowerImages
from antiphon.shared.flags import SettingsError

_PROCESSORS: dict[str, Any] = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "CLIPFeatureExtractor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
    "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
    "LlavaOnevisionImageProcessor": LlavaOnevisionImageProcessorPil,
}
_USUAL = {
    "llava": "CLIPImageProcessor",
    "llava_next": "LlavaNextImageProcessor",
    "llava_onevision": "LlavaOnevisionImageProcessor",
}


class LlavaImages(TowerImages):
    """See ImageFamily."""

    FIXED = frozenset({"size", "crop_size", "do_resize", "do_center_crop", "image_grid_pinpoints"})

    PARTS = (*TowerImages.PARTS, "image_newline")

    def tiles_max(self) -> int:
        """See TowerImages. If an image is cut, a small copy of the whole image is one more tile."""
        side = self._config.vision_config.image_size
        pinpoints = getattr(self._config, "image_grid_pinpoints", None) or ()
        tiles = [(height // side) * (width // side) for height, width in pinpoints]
        return 1 + max(tiles) if tiles else 1

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily. Raises SettingsError for an unsupported processor."""
        named = fields.get("image_processor_type") or fields.get("feature_extractor_type") or _USUAL[config.model_type]
        found = _PROCESSORS.get(str(named).removesuffix("Fast").removesuffix("Pil"))
        if found is None:
            known = ", ".join(_PROCESSORS)
            raise SettingsError(f"--enable-mm: the model's image processor {named} is not served; served are {known}")
        return found
