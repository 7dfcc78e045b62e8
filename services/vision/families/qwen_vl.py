"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, each 2 x 2 patches one token with a row and a column.

With Qwen3-VL some layers of the encoder give further embeddings of the tokens (deepstack). They follow a token's own
embedding, in the order of the decoder's layers to whose outputs they are added.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from services.vision.families.family import Embedded, PictureFamily

_ENCODERS: dict[str, Any] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
}
_PREFIXES = ("visual.", "model.visual.")


class QwenVlPictures(PictureFamily):
    """See PictureFamily."""

    FIXED = frozenset({"patch_size", "temporal_patch_size", "merge_size"})

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, fields, dtype, directory)
        self._processor: Any = Qwen2VLImageProcessorPil(**fields)
        self.module = _ENCODERS[config.model_type]._from_config(config.vision_config, dtype=dtype)
        self._merge: int = config.vision_config.spatial_merge_size
        self.token_id = config.image_token_id

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See PictureFamily."""
        return Qwen2VLImageProcessorPil

    def parameter(self, name: str) -> str | None:
        """See PictureFamily."""
        prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
        return None if prefix is None else name.removeprefix(prefix)

    def embed(self, picture: Image.Image, device: str) -> Embedded:
        """See PictureFamily."""
        found = self._processor(picture, return_tensors="pt")
        grid = found["image_grid_thw"]
        patches = found["pixel_values"].to(device=device, dtype=self.dtype)
        output = self.module(patches, grid_thw=grid.to(device))
        rows, columns = (int(side) // self._merge for side in grid[0, 1:])
        further = getattr(output, "deepstack_features", None) or ()
        return Embedded(rows, columns, torch.cat((output.pooler_output, *further), dim=-1))
