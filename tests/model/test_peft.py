"""Adapters that peft itself has written, compared with transformers after peft has merged them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.harness import NUM_TOKENS, Models, make_prompt
from tests.model.test_adapters import BACKENDS, LLAMA_TARGETS, Adapted
from tests.models import greedy_reference

# peft reads attributes that transformers calls deprecated.
pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore::FutureWarning")]


def save(model: Path, seed: int, adapter: Path, merged: Path, **config: Any) -> None:
    """Writes a random adapter of peft, and the model with it merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    adapted.save_pretrained(adapter)
    adapted.merge_and_unload().save_pretrained(merged)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "configs",
    [
        [{"r": 4, "lora_alpha": 8}, {"r": 16, "lora_alpha": 4, "target_modules": list(LLAMA_TARGETS)}],
        [{"r": 8, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "target_modules": "all-linear"}],
    ],
    ids=["usual", "rslora, ranks by name"],
)
def test_adapters_of_peft_give_the_tokens_of_the_weights_that_peft_merged(
    configs: list[dict[str, Any]], backend: str, models: Models, tmp_path: Path
) -> None:
    model, adapted = models("llama"), None
    prompts = [make_prompt(17 + 4 * number) for number in range(len(configs))]
    for number, config in enumerate(configs):
        save(model, number, tmp_path / f"adapter-{number}", tmp_path / f"merged-{number}", **config)
    adapted = Adapted(model, backend=backend)
    loaded = [adapted.load(tmp_path / f"adapter-{number}") for number in range(len(configs))]
    asked = [*zip(prompts, loaded, strict=True), *((prompt, None) for prompt in prompts)]
    merged = [tmp_path / f"merged-{number}" for number in range(len(configs))]
    expected = [
        greedy_reference(directory, prompt, NUM_TOKENS)
        for directory, prompt in zip([*merged, *[model] * len(prompts)], [*prompts, *prompts], strict=True)
    ]
    assert adapted.generate(asked) == expected
    assert expected[0] != expected[len(prompts)]
