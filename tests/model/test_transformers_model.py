"""Decoders without a family run through transformers with the engine's cache, or are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import load_model
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams
from tests.foreign_models import FOREIGN_FAMILIES
from tests.model.harness import Engine as Stepped
from tests.model.harness import greedy, make_prompt
from tests.models import greedy_reference, make_model

pytestmark = pytest.mark.model

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CPU = torch.device("cpu")
CLASSES = {"AutoConfig": "Config", "AutoModelForCausalLM": "ForCausalLM"}
OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class ChoralConfig(LlamaConfig):
    model_type = "choral"

class ChoralForCausalLM(LlamaForCausalLM):
    config_class = ChoralConfig
"""


LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, enable_prefix_caching=False)
NUM_TOKENS = 8


@pytest.mark.parametrize("family", FOREIGN_FAMILIES)
def test_greedy_text_is_that_of_transformers_in_chunks_and_a_mixed_batch(family: str, tmp_path: Path) -> None:
    prompts = [make_prompt(length) for length in (1, 15, 40)]
    answers = Stepped(make_model(tmp_path, family), LIMITS).generate(prompts, greedy(NUM_TOKENS))
    assert answers == [greedy_reference(tmp_path, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("bloom", {}, "its attention cannot be replaced"),
        ("cohere", {"intermediate_size": 48, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("t5", {}, "no decoder that generates text"),
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


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama under another name, with its code beside it; what runs of it is copied below `tmp_path`."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = make_model(tmp_path / "model", num_hidden_layers=1)
    config = {**read_config(directory), "model_type": "choral", "architectures": ["ChoralForCausalLM"]}
    config["auto_map"] = {name: f"choral.Choral{kind}" for name, kind in CLASSES.items()}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "choral.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n" + OWN_CODE)
    return directory


@pytest.mark.spec("S-SRV-025")
def test_a_models_own_code_runs_when_it_is_trusted(own_code: Path) -> None:
    prompt = [5, 6, 7, 8, 9]
    given = {"device": "cpu", "threads": 1, "kv_cache_memory_gb": 0.01, "trust_remote_code": True}
    tokens: list[int] = []
    engine = Engine.build(
        EngineSettings(model=str(own_code), **given),
        lambda report: tokens.extend(token for outcome in report.outcomes for token in outcome.token_ids),
    )
    engine.add(
        SequenceSpec(
            sequence_id="r",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
    )
    while engine.has_work:
        engine.step()
    plain = {**read_config(own_code), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    del plain["auto_map"]
    (own_code / "config.json").write_text(json.dumps(plain))
    assert tokens == greedy_reference(own_code, prompt, 8)


@pytest.mark.spec("S-SRV-025")
def test_a_models_own_code_does_not_run_unless_it_is_trusted(own_code: Path) -> None:
    with pytest.raises(ServiceError, match=r"ChoralForCausalLM is not supported.*is run with --trust-remote-code only"):
        load_worker(EngineSettings(model=str(own_code), device="cpu"))
    assert not (own_code.parent / "ran").exists()


def test_an_architecture_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["WhateverForCausalLM"], "model_type": "whatever"}')
    with pytest.raises(ServiceError, match="WhateverForCausalLM is not supported"):
        load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
