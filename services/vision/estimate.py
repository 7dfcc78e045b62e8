"""Predicts the memory of an image service without reading weights. Called by `antiphon plan` and `doctor`.

    weights    those of the encoder, counted with tensors that have a shape and no memory
    reading    a file becomes pixels: the decoded image, its copies, and the processor's arrays
    encoding   the activations of one layer for the largest image; the layers use the same memory in turn

A service encodes one image at a time, and has the file of a second one meanwhile. How many rows of numbers a layer
keeps for each patch at its peak follows from the modules of transformers (`_layer_bytes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from antiphon.services.vision.encoder import encoder_dtype, processor_arguments, wrong_arguments
from antiphon.services.vision.families import family_of
from antiphon.services.vision.families.family import ImageFamily
from antiphon.shared import limits
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.image_models import check_takes_images, read_model_fields

_COLOURS = 3
_READING_BYTES, _KEPT_BYTES = 15, 4
"""Bytes for each pixel of the file. While the image is made smaller, which needs more than decoding: two copies with
4 bytes a pixel, two with 3, and a margin. Then, until the image is encoded: one copy with 4 bytes a pixel."""
_SCALING_BYTES, _SCALED_BYTES = 20, 4
"""Bytes for each colour of each pixel that the encoder sees. While the processor scales the pixels: two copies in
float64 and one in float32. Then: one copy in float32."""
_MAPPED_BYTES, _FREED_ROWS = 32 * 2**20, 8
"""The C library takes arrays below the first number, in bytes, from its heap. The heap keeps pieces of freed arrays:
for each patch, about the second number of rows that are as wide as the encoder. Larger arrays have pages of their
own."""


@dataclass(frozen=True, slots=True)
class VisionNeeds:
    """What one image service needs, in bytes. `weights`, and `step` for one image: memory of the service's device.

    `reading`: main memory in which an image is decoded and processed. On a CPU this is the same memory, so `step` is
    the larger of the needs of reading and encoding. `kept`: main memory for the embeddings of the last images.
    """

    weights: int
    step: int
    reading: int
    kept: int = limits.VISION_CACHE_BYTES


def vision_needs(directory: Path, processor_kwargs: Mapping[str, Any], device: str) -> VisionNeeds:
    """Returns what a service on a device, `cpu` or `cuda`, needs for an image of the largest size.

    Only the model's small files are read. Raises SettingsError for a model without image input.
    """
    check_takes_images(read_model_fields(directory))
    config: Any = AutoConfig.from_pretrained(directory)
    fields, dtype = processor_arguments(directory, config, processor_kwargs), encoder_dtype(config, device)
    try:
        with torch.device("meta"):
            family = family_of(config)(config, fields, dtype, directory)
        patches = family.patches_max()
        encoding = patches * _layer_bytes(family, config.vision_config) + family.mask_bytes()
    except SettingsError:
        raise
    except Exception as error:  # wrong arguments may lead to any exception
        raise wrong_arguments(error) from error
    weights = sum(tensor.nbytes for tensor in (*family.module.parameters(), *family.module.buffers()))
    files, pixels = limits.VISION_FILES_MAX * limits.IMAGE_BYTES_MAX, limits.IMAGE_PIXELS_MAX
    values = _values(config.vision_config, patches)
    reading = files + _READING_BYTES * pixels + _SCALING_BYTES * values
    if device != "cpu":
        return VisionNeeds(weights, encoding + values * dtype.itemsize, reading)
    row = patches * family.width * dtype.itemsize
    encoding += _FREED_ROWS * row if row < _MAPPED_BYTES else 0
    step = max(reading, files + _KEPT_BYTES * pixels + _SCALED_BYTES * values + encoding)
    return VisionNeeds(weights, step, reading)


def _values(vision: Any, patches: int) -> int:
    """Returns how many numbers the encoder gets for an image with this number of patches."""
    side = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    return patches * side * side * _COLOURS * getattr(vision, "temporal_patch_size", 1)


def _layer_bytes(family: ImageFamily, vision: Any) -> int:
    """Returns the bytes for each patch at the peak of a layer, or of the projection after the layers if that is more.

    The encoder's input stays until its end, and a layer's input until the layer's end. Attention adds the norm,
    queries, keys, values, the attended values and the output: 8 rows as wide as the encoder. Rotation adds 4. An MLP
    adds the residual, the norm and 2 rows of its own width, before and after the activation; 3 if it is gated, or if
    the activation is computed in steps (quick_gelu).
    """
    module = family.module
    hidden, inner = family.width, family.mlp_width()
    rotates = any("Rotary" in type(part).__name__ for part in module.modules())
    gated = any(name.endswith("gate_proj.weight") for name, _ in module.named_parameters())
    in_steps = getattr(vision, "hidden_act", "") == "quick_gelu"
    attention = (12 if rotates else 8) * hidden
    mlp = 4 * hidden + (3 if gated or in_steps else 2) * inner
    # Three widths of the encoder, and three of the decoder for each token.
    projection = 3 * hidden + 3 * family.projected_width() * family.tokens_max() // family.patches_max()
    return max(attention, mlp, projection) * family.dtype.itemsize
