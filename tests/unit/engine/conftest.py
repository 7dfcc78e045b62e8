"""A checkpoint of random weights, written without any model library: its tensors follow from the layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from antiphon.services.engine.models.registry import find_family

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "eos_token_id": 1,
}

Checkpoint = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Writes a model directory; `change` edits the tensors before they are written, `fields` go into the config."""

    def write(
        change: Callable[[dict[str, Tensor]], None] | None = None, dtype: torch.dtype = torch.float32, **fields: Any
    ) -> Path:
        config = {**CONFIG, **fields}
        family = find_family(config)
        generator = torch.Generator().manual_seed(3)
        tensors = {
            source.name: (torch.randn(source.shape, generator=generator) * 0.3).to(dtype)
            for parameter in family.layout(family.describe(config))
            for source in parameter.sources
        }
        if change is not None:
            change(tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write
