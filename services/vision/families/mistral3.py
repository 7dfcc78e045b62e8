"""Mistral Small 3.1 and later: a Pixtral encoder for images of any size, with an additional token after each row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from antiphon.services.vision.families.family import Embedded, read_object, token_ids
from antiphon.services.vision.families.tower import TowerImages


class Mistral3Images(TowerImages):
    """See ImageFamily."""

    FIXED = frozenset({"patch_size"})

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        self._side: int = config.vision_config.patch_size * config.spatial_merge_size
        """Height and width of a token in pixels."""
        super().__init__(config, {**fields, "patch_size": self._side}, dtype, directory)
        path = directory / "processor_config.json"
        named = read_object(path) if path.is_file() else {}
        break_token = named.get("image_break_token", "[IMG_BREAK]")
        self._break_id, self._end_id = token_ids(directory, break_token, named.get("image_end_token", "[IMG_END]"))

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return PixtralImageProcessorPil

    def patches_max(self) -> int:
        """See ImageFamily."""
        size, patch = self._processor.size, self._config.vision_config.patch_size
        sides = [size["longest_edge"]] * 2 if size.get("longest_edge") else [size["height"], size["width"]]
        rows, columns = (-(-side // self._side) * self._side // patch for side in sides)
        return rows * columns

    def tokens_max(self) -> int:
        """See ImageFamily."""
        return self.patches_max() // self._config.spatial_merge_size**2

    def mask_bytes(self) -> int:
        """See ImageFamily. The mask says for each pair of patches whether one sees the other."""
        return self.patches_max() ** 2 * self.dtype.itemsize

    def embed(self, image: Image.Image, device: str) -> Embedded:
        """See ImageFamily."""
        found = self._processor(image, return_tensors="pt")
        pixels, sizes = found["pixel_values"].to(device=device, dtype=self.dtype), found["image_sizes"]
        model: Any = self.module
        output = model.get_image_features(pixels, image_sizes=sizes, return_dict=True).pooler_output[0]
        rows, columns = (int(side) // self._side for side in sizes[0])
        layout = [*[self.token_id] * columns, self._break_id] * rows
        return Embedded(rows, columns, output, (*layout[:-1], self._end_id))
