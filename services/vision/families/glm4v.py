"""GLM-4.1V and GLM-4V: pictures of any size; each 2 x 2 patches form one token with a row and a column.

The model's chat template writes `<|begin_of_image|>` and `<|end_of_image|>` around the token for a picture.
"""

from collections.abc import Mapping
from typing import Any

from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

from services.vision.families.grid import GridPictures


class Glm4vPictures(GridPictures):
    """See PictureFamily."""

    def pixels_max(self) -> int:
        """See GridPictures. The processor counts a picture as `temporal_patch_size` frames of a video."""
        return super().pixels_max() // self._processor.temporal_patch_size

    def mlp_width(self) -> int:
        """See PictureFamily."""
        return self._config.vision_config.out_hidden_size

    def projected_width(self) -> int:
        """See PictureFamily. The MLP after the encoder has the width `intermediate_size` of the config."""
        return self._config.vision_config.intermediate_size

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See PictureFamily."""
        return Glm4vImageProcessorPil

    @staticmethod
    def encoder(config: Any) -> Any:
        """See GridPictures."""
        return Glm4vVisionModel
