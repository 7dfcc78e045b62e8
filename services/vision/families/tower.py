"""Base class of models built like LLaVA: an encoder (`vision_tower`) and a projection to the decoder's tokens."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import AutoModel, LlamaConfig

from antiphon.services.vision.families.family import Embedded, ImageFamily


class TowerImages(ImageFamily):
    """See ImageFamily. A subclass defines the processor."""

    PARTS: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    """Beginnings of the names of the encoder's tensors, after the prefix `model.`."""
    DECODER: ClassVar[str] = "language_model"
    """The name of the decoder in the model of transformers."""

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, fields, dtype, directory)
        self._processor = self.processor(config, fields)(**fields)
        # The transformers model with a decoder without layers; encoder and projection remain.
        small = copy.deepcopy(config)
        small.text_config = LlamaConfig(
            hidden_size=config.text_config.hidden_size,
            num_hidden_layers=0,
            vocab_size=1,
            intermediate_size=1,
            num_attention_heads=1,
            pad_token_id=None,
            # Some projections use the decoder's normalisation.
            rms_norm_eps=getattr(config.text_config, "rms_norm_eps", 1e-6),
        )
        self.module = AutoModel.from_config(small, dtype=dtype)
        delattr(self.module, self.DECODER)
        self.token_id = config.image_token_id

    def parameter(self, name: str) -> str | None:
        """See ImageFamily."""
        name = name.removeprefix("model.")
        if not name.startswith(self.PARTS):
            return None
        return name.replace("vision_tower.vision_model.", "vision_tower.", 1)

    def tiles_max(self) -> int:
        """Returns how many tiles of the encoder's size the largest image becomes."""
        return 1

    def patches_max(self) -> int:
        """See ImageFamily."""
        vision = self._config.vision_config
        side, patch = (each if isinstance(each, int) else each[0] for each in (vision.image_size, vision.patch_size))
        return self.tiles_max() * (side // patch) ** 2

    def embed(self, image: Image.Image, device: str) -> Embedded:
        """See ImageFamily."""
        found = self._processor(image, return_tensors="pt")
        pixels = found["pixel_values"].to(device=device, dtype=self.dtype)
        sizes = {"image_sizes": found["image_sizes"]} if "image_sizes" in found else {}
        model: Any = self.module
        output = model.get_image_features(pixels, **sizes, return_dict=True).pooler_output[0]
        return Embedded(1, len(output), output)
