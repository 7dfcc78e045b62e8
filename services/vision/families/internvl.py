"""InternVL 3: an image is cut into tiles of the encoder's size with equal numbers of tokens between two special tokens.

Only checkpoints whose names end with `-hf` are supported: transformers reads them without remote code.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from antiphon.services.vision.families.family import Embedded, special_token, token_texts
from antiphon.services.vision.families.tower import TowerImages


class InternVlImages(TowerImages):
    """See ImageFamily."""

    FIXED = frozenset({"size", "do_resize"})
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, fields, dtype, directory)
        [self.place] = token_texts(directory, self.token_id)
        begin = special_token(directory, "start_image_token", "<img>")
        self.text = f"{begin}{self.place}{special_token(directory, 'end_image_token', '</img>')}"

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return GotOcr2ImageProcessorPil

    def tiles_max(self) -> int:
        """See TowerImages. If an image is cut, a small copy of the whole image is one more tile."""
        most = self._processor.max_patches
        return 1 + most if self._processor.crop_to_patches and most > 1 else 1

    def tokens_max(self) -> int:
        """See ImageFamily."""
        return self.tiles_max() * self._config.image_seq_length

    def embed(self, image: Image.Image, device: str) -> Embedded:
        """See ImageFamily."""
        found = self._processor(image, return_tensors="pt")
        pixels = found["pixel_values"].to(device=device, dtype=self.dtype)
        model: Any = self.module
        output = model.get_image_features(pixels, return_dict=True).pooler_output.flatten(0, 1)
        return Embedded(1, len(output), output)
