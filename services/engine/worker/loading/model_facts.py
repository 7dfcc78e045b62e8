"""What the files of a model say about it, for lists of models: sizes, format, architecture. Called by the service."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.worker.configuration import weights_digest
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.messages import ModelFacts
from antiphon.shared.settings.quantization import quantization_settings

_FORMATS = {"safetensors": "*.safetensors", "pytorch": "pytorch_model*.bin", "gguf": "*.gguf"}
"""Patterns of the weight files. If a directory has several formats, the first one is read."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def model_facts(model_dir: Path, *, on_device: bool) -> ModelFacts:
    """Returns the facts of a model that has been loaded. `on_device`: whether its weights are in a GPU's memory."""
    config = read_config(model_dir)
    found = {form: sorted(model_dir.glob(pattern)) for form, pattern in _FORMATS.items()}
    form = next((one for one in found if found[one]), "")
    files = found.get(form, [])
    types = _gguf_types(files[0]) if form == "gguf" else None
    return ModelFacts(
        architecture=str(config.get("model_type") or ""),
        num_parameters=_num_parameters(config) if types is None else types.total(),
        weight_bytes=sum(path.stat().st_size for path in files),
        file_format=form,
        quantization=_weight_type(config) if types is None else types.most_common(1)[0][0],
        on_device=on_device,
        digest=weights_digest(model_dir),
    )


def _num_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters; 0 for an architecture that transformers runs."""
    if not has_family(config):
        return 0
    family = find_family(config)
    layout = family.layout(family.describe(config))
    return sum(math.prod(source.shape) for parameter in layout for source in parameter.sources)


def _gguf_types(path: Path) -> Counter[str]:
    """Returns the number of parameters of each type in a GGUF file and its further parts."""
    # Imported here because the package gguf is needed for such files only.
    from antiphon.shared.models.gguf_model.reader import GgufModel

    types: Counter[str] = Counter()
    for tensor in GgufModel(path).tensors.values():
        types[tensor.type] += math.prod(tensor.shape)
    return types


def _weight_type(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    return str(quantization_settings(config).get("quant_method") or _DTYPES.get(dtype, dtype)).upper()
