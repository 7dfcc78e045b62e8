"""Models that the engine cannot run through transformers are refused, with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.worker.model_files import read_config
from services.engine.worker.torch_worker import load_model
from shared.errors import ServiceError

pytestmark = pytest.mark.model

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("bloom", {}, "its attention cannot be replaced"),
        ("cohere", {"intermediate_size": 48, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("t5", {}, "no decoder that generates text"),
        ("mamba", {}, "MambaForCausalLM is not supported"),
    ],
)
def test_an_architecture_that_cannot_work_is_refused_with_the_reason(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    names = {"bloom": "BloomForCausalLM", "cohere": "CohereForCausalLM", "t5": "T5ForConditionalGeneration"}
    config = AutoConfig.for_model(kind, **SIZES, **fields)
    config.architectures = [names.get(kind, "MambaForCausalLM")]
    config.save_pretrained(tmp_path)
    with pytest.raises(ServiceError, match=reason) as failure:
        load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
    assert "LlamaForCausalLM" in failure.value.message


def test_an_architecture_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["WhateverForCausalLM"], "model_type": "whatever"}')
    with pytest.raises(ServiceError, match="WhateverForCausalLM is not supported"):
        load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
