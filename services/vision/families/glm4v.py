"""GLM-4.1V and GLM-4V: pictures of any size, each 2 x 2 patches one token with a row and a column.

The model's chat template writes `<|begin_of_image|>` and `<|end_of_image|>` around the token for a picture.
"""

from collections.abc import Mapping
from typing import Any

from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

from services.vision.families.grid import GridPictures


class Glm4vPictures(GridPictures):
    """See PictureFamily."""

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See PictureFamily."""
        return Glm4vImageProcessorPil

    @staticmethod
    def encoder(config: Any) -> Any:
        """See GridPictures."""
        return Glm4vVisionModel
