"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5: images of any size; 2 x 2 patches form one token with row and column.

In Qwen3-VL some layers of the encoder also give embeddings of the tokens (deepstack). They are stored after a token's
own embedding, in the order of the decoder layers to whose outputs they are added.
"""

from collections.abc import Mapping
from typing import Any

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from antiphon.services.vision.families.grid import GridImages

_ENCODERS: dict[str, Any] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
    "qwen3_vl_moe": Qwen3VLMoeVisionModel,
    "qwen3_5": Qwen3_5VisionModel,
    "qwen3_5_moe": Qwen3_5MoeVisionModel,
}


class QwenVlImages(GridImages):
    """See ImageFamily."""

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return Qwen2VLImageProcessorPil

    @staticmethod
    def encoder(config: Any) -> Any:
        """See GridImages."""
        return _ENCODERS[config.model_type]
