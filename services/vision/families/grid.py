"""Base class of models whose images have any size, and whose tokens have places in rows and columns.

The encoder is a module of its own (`visual`), and each 2 x 2 of its patches (`spatial_merge_size`) are one token.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from antiphon.services.vision.families.family import Embedded, ImageFamily

_PREFIXES = ("visual.", "model.visual.")


class GridImages(ImageFamily):
    """See ImageFamily. A subclass says which processor and which encoder the model has."""

    FIXED = frozenset({"patch_size", "temporal_patch_size", "merge_size"})

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, fields, dtype, directory)
        self._processor: Any = self.processor(config, fields)(**fields)
        self.module = self.encoder(config)._from_config(config.vision_config, dtype=dtype)
        self._merge: int = config.vision_config.spatial_merge_size
        self.token_id = config.image_token_id

    def pixels_max(self) -> int:
        """Returns how many pixels an image has at most for the encoder."""
        return self._processor.size["longest_edge"]

    def patches_max(self) -> int:
        """See ImageFamily."""
        return self.pixels_max() // self._processor.patch_size**2

    def tokens_max(self) -> int:
        """See ImageFamily."""
        return self.patches_max() // self._merge**2

    @staticmethod
    @abstractmethod
    def encoder(config: Any) -> Any:
        """Returns the class of the encoder."""

    def parameter(self, name: str) -> str | None:
        """See ImageFamily."""
        prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
        return None if prefix is None else name.removeprefix(prefix)

    def embed(self, image: Image.Image, device: str) -> Embedded:
        """See ImageFamily."""
        found = self._processor(image, return_tensors="pt")
        grid = found["image_grid_thw"]
        patches = found["pixel_values"].to(device=device, dtype=self.dtype)
        output = self.module(patches, grid_thw=grid.to(device))
        rows, columns = (int(side) // self._merge for side in grid[0, 1:])
        further = getattr(output, "deepstack_features", None) or ()
        return Embedded(rows, columns, torch.cat((output.pooler_output, *further), dim=-1))
