"""Models with a cache of their own (state spaces, linear attention and others) against transformers without a cache."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.own_cache.memory import CacheBytes, plan_caches
from antiphon.services.engine.backends.torch.own_cache.model import load_own_cache_model
from antiphon.services.engine.backends.torch.own_cache.worker import OwnCacheWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine as ProductEngine
from antiphon.services.engine.worker.capacity.kv_cache import Budget
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import Engine, make_prompt, settings
from tests.models import make_model
from tests.own_cache_models import OWN_CACHE_FAMILIES

pytestmark = pytest.mark.model
NUM_TOKENS = 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))


@functools.lru_cache(maxsize=2)
def _module(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _without_cache(path: Path, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """What transformers generates greedily when it computes all tokens again for each one."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(_module(path)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _engine(path: Path, limits: CoreLimits, **overrides: Any) -> Engine:
    chosen = settings(path, **{"max_num_seqs": limits.max_num_seqs, **overrides})
    return Engine.around(OwnCacheWorker(chosen, path, CPU), limits)


def _greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", OWN_CACHE_FAMILIES)
def test_greedy_text_is_that_of_transformers_in_chunks_and_a_mixed_batch(
    family: str, directory: Callable[[str], Path]
) -> None:
    path, prompts = directory(family), [make_prompt(length) for length in (1, 15, 40)]
    engine = _engine(path, CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, enable_prefix_caching=False))
    assert engine.generate(prompts, _greedy()) == [_without_cache(path, prompt) for prompt in prompts]
    assert max(share.start for plan in engine.plans for share in plan.scheduled if share.num_tokens > 1) > 0


@pytest.mark.parametrize("family", ["olmo_hybrid", "zamba"])
def test_a_preempted_sequence_computes_its_state_again(family: str, directory: Callable[[str], Path]) -> None:
    path, prompts = directory(family), [make_prompt(length) for length in (30, 31, 32)]
    limits = CoreLimits(max_num_seqs=3, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine = _engine(path, limits, num_gpu_blocks_override=8, max_model_len=128)
    assert engine.generate(prompts, _greedy(24)) == [_without_cache(path, prompt, 24) for prompt in prompts]
    assert engine.core.counters().preemptions > 0


def test_log_probabilities_of_a_prompt_are_those_of_transformers(directory: Callable[[str], Path]) -> None:
    path, prompt = directory("olmo_hybrid"), make_prompt(30)
    engine = _engine(path, CoreLimits(max_num_seqs=1, max_num_batched_tokens=64, enable_prefix_caching=False))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.core.add(SequenceSpec(sequence_id="a", prompt_token_ids=tuple(prompt), params=params))
    (outcome,) = engine.step()
    with torch.inference_mode():
        expected = _module(path)(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    _, *parts = outcome.prompt_logprobs
    values = np.concatenate([np.frombuffer(part.logprobs, "<f4") for part in parts]).tolist()
    assert values == pytest.approx([float(expected[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-3)


def test_the_engine_reuses_no_prefix_and_drafts_no_tokens(directory: Callable[[str], Path]) -> None:
    path, prompt = directory("olmo_hybrid"), make_prompt(20) * 3
    cached: list[int] = []
    tokens: list[int] = []

    def report(step: Any) -> None:
        for outcome in step.outcomes:
            tokens.extend(outcome.token_ids)
            cached.append(outcome.num_cached_tokens)

    engine = ProductEngine.build(settings(path, use_lookahead=True, use_v2_block_manager=True, max_num_seqs=4), report)
    try:
        assert engine.limits.num_speculative_tokens == 0
        assert not engine.limits.enable_prefix_caching
        for name in ("first", "second"):
            tokens.clear()
            engine.add(SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompt), params=_greedy()))
            while engine.has_work:
                engine.step()
            assert tokens == _without_cache(path, prompt)
        assert set(cached) == {0}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("option", "chosen"),
    [
        ("--quantization", {"quantization": "ifq"}),
        ("--kv-cache-dtype", {"kv_cache_dtype": "fp8"}),
        ("--enable-lora", {"enable_lora": True}),
        ("--role", {"role": "prefill"}),
    ],
)
def test_options_that_such_a_model_cannot_follow_are_refused_by_name(
    option: str, chosen: dict[str, Any], directory: Callable[[str], Path]
) -> None:
    path = directory("bloom")
    with pytest.raises(SettingsError, match=f"{option}.*leave it out"):
        load_worker(EngineSettings(model=str(path), device="cpu", **chosen))


def test_states_leave_memory_for_tokens_and_limit_the_running_sequences(directory: Callable[[str], Path]) -> None:
    path = directory("olmo_hybrid")
    model = load_own_cache_model(path, read_config(path), torch.float32, CPU)
    size = model.cache_bytes(CPU)
    # One layer has a state of 4 heads, 16 by 16, and 128 channels of the last 4 tokens; the other 2 heads of 16.
    assert size == CacheBytes(4 * (4 * 16 * 16 + 128 * 4), 4 * 2 * 2 * 16)
    chosen, large = settings(path, max_num_seqs=64), CacheBytes(2**20, 2**10)
    plan = plan_caches(chosen, model.description, large, Budget(2**24, 2**24), on_cpu=True)
    assert plan.num_sequences == 7
    assert plan.kv.num_blocks * 16 * 2**10 + 8 * 2**20 <= 2**24
    assert plan.kv.max_model_len == 512
    with pytest.raises(ServiceError, match="two sequences"):
        plan_caches(chosen, model.description, large, Budget(2**20, 2**20), on_cpu=True)


def test_a_checkpoint_with_missing_tensors_is_refused(directory: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = directory("zamba")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mamba.conv1d.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "zamba"
    with pytest.raises(ServiceError, match=r"lacks model\.layers\.0\.mamba\.conv1d\.weight"):
        load_worker(settings(tmp_path))
