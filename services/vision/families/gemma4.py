"""Gemma 4: images of any shape become at most `max_soft_tokens` tokens, each of 3 x 3 patches, in one row.

The chat template writes the image token alone; the model wants the tokens of an image between two special ones. The
12B model, which has no encoder, is served for text: transformers reads its images with torchvision only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import AutoModel
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

from antiphon.services.vision.families.family import Embedded, ImageFamily, token_texts

_PARTS = ("vision_tower.", "embed_vision.")


class Gemma4Images(ImageFamily):
    """See ImageFamily."""

    FIXED = frozenset({"patch_size", "pooling_kernel_size"})

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, fields, dtype, directory)
        self._processor: Any = self.processor(config, fields)(**fields)
        self._tower: Any = AutoModel.from_config(config.vision_config, dtype=dtype)
        self._projection = Gemma4MultimodalEmbedder(config.vision_config, config.text_config).to(dtype)
        self.module = nn.ModuleDict({"vision_tower": self._tower, "embed_vision": self._projection})
        begin, token, end = token_texts(directory, config.boi_token_id, config.image_token_id, config.eoi_token_id)
        self.token_id, self.place, self.text = config.image_token_id, token, f"{begin}{token}{end}"

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return Gemma4ImageProcessorPil

    def parameter(self, name: str) -> str | None:
        """See ImageFamily."""
        name = name.removeprefix("model.")
        return name if name.startswith(_PARTS) else None

    def patches_max(self) -> int:
        """See ImageFamily."""
        return self.tokens_max() * self._processor.pooling_kernel_size**2

    def tokens_max(self) -> int:
        """See ImageFamily."""
        return self._processor.max_soft_tokens

    def embed(self, image: Image.Image, device: str) -> Embedded:
        """See ImageFamily."""
        found = self._processor(image, return_tensors="pt")
        pixels = found["pixel_values"].to(device=device, dtype=self.dtype)
        places = found["image_position_ids"].to(device)
        hidden = self._tower(pixel_values=pixels, pixel_position_ids=places).last_hidden_state
        output = self._projection(hidden)
        return Embedded(1, len(output), output)
