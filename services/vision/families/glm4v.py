"""GLM-4.1V, GLM-4.5V and GLM-4.6V: images of any size; each 2 x 2 patches form one token with a row and a column.

The model's chat template writes `<|begin_of_image|>` and `<|end_of_image|>` around the token for an image.
"""

from collections.abc import Mapping
from typing import Any

from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from antiphon.services.vision.families.grid import GridImages


class Glm4vImages(GridImages):
    """See ImageFamily."""

    def pixels_max(self) -> int:
        """See GridImages. The processor counts an image as `temporal_patch_size` frames of a video."""
        return super().pixels_max() // self._processor.temporal_patch_size

    def mlp_width(self) -> int:
        """See ImageFamily."""
        return self._config.vision_config.out_hidden_size

    def projected_width(self) -> int:
        """See ImageFamily. The MLP after the encoder has the width `intermediate_size` of the config."""
        return self._config.vision_config.intermediate_size

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return Glm46VImageProcessorPil if config.model_type == "glm46v" else Glm4vImageProcessorPil

    @staticmethod
    def encoder(config: Any) -> Any:
        """See GridImages."""
        return Glm4vMoeVisionModel if config.model_type == "glm4v_moe" else Glm4vVisionModel
