"""Counts the weights of a model's vision encoder without reading them. Called by `antiphon plan` and `doctor`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from services.vision.encoder import encoder_dtype
from services.vision.families import family_of
from shared.models.picture_models import check_takes_pictures, processor_fields, read_model_fields


def encoder_bytes(directory: Path, processor_kwargs: Mapping[str, Any], device: str) -> int:
    """Returns the bytes of the weights that an image service keeps on its device, `cpu` or `cuda`.

    Only the model's small files are read. Raises SettingsError for a model that takes no pictures.
    """
    check_takes_pictures(read_model_fields(directory))
    config: Any = AutoConfig.from_pretrained(directory)
    kind = family_of(config)
    fields = {**processor_fields(directory), **kind.DEFAULTS, **processor_kwargs}
    with torch.device("meta"):
        module = kind(config, fields, encoder_dtype(config, device), directory).module
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
