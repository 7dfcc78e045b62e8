"""Qwen2-VL and Qwen2.5-VL: pictures of any size, of which each 2 x 2 patches are one token with a row and a column."""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from services.vision.families.family import Embedded, PictureFamily

_ENCODERS: dict[str, Any] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
}
_PREFIXES = ("visual.", "model.visual.")


class QwenVlPictures(PictureFamily):
    """See PictureFamily."""

    FIXED = frozenset({"patch_size", "temporal_patch_size", "merge_size"})

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, fields, dtype)
        self._processor: Any = Qwen2VLImageProcessorPil(**fields)
        self.module = _ENCODERS[config.model_type]._from_config(config.vision_config, dtype=dtype)
        self._merge: int = config.vision_config.spatial_merge_size
        self.token_id = config.image_token_id

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See PictureFamily."""
        return Qwen2VLImageProcessorPil

    @staticmethod
    def parameter(name: str) -> str | None:
        """See PictureFamily."""
        prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
        return None if prefix is None else name.removeprefix(prefix)

    def embed(self, picture: Image.Image, device: str) -> Embedded:
        """See PictureFamily."""
        found = self._processor(picture, return_tensors="pt")
        grid = found["image_grid_thw"]
        patches = found["pixel_values"].to(device=device, dtype=self.dtype)
        output = self.module(patches, grid_thw=grid.to(device)).pooler_output
        rows, columns = (int(side) // self._merge for side in grid[0, 1:])
        return Embedded(rows, columns, output)
