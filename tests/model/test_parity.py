"""The engine's core and torch worker against transformers: the same tokens, however the work is cut up."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.models.config_fields import rope_parameters
from antiphon.services.engine.models.layers.rope import inverse_frequencies
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import (
    BACKENDS,
    CACHE_VARIANTS,
    FAMILY_VARIANTS,
    NUM_TOKENS,
    RECURRENT_VARIANTS,
    VARIANTS,
    Engine,
    Models,
    Reference,
    few_blocks,
    make_prompt,
    on_both,
)
from tests.models import greedy_reference, make_model

pytestmark = pytest.mark.model


@pytest.mark.parametrize(("backend", "variant"), on_both(VARIANTS, every=True))
def test_greedy_output_is_that_of_transformers_in_chunks_and_a_mixed_batch(
    backend: str, variant: str, models: Models, reference: Reference
) -> None:
    prompts = [make_prompt(length) for length in (1, 15, 16, 33, 90)]
    engine = Engine(
        models(variant), CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False), backend
    )
    answers = engine.generate(prompts)
    assert answers == reference(variant, prompts, answers)
    mixed = [plan for plan in engine.plans if {share.num_tokens == 1 for share in plan.scheduled} == {True, False}]
    assert mixed, "no step had both a chunk and a decode"


@pytest.mark.parametrize("variant", ["llama", "mixtral", "qwen"])
def test_a_draft_changes_nothing_in_the_reference(variant: str, models: Models) -> None:
    prompt = make_prompt(20)
    right = greedy_reference(models(variant), prompt, 8)
    for draft in (right, right[:7], [*right[:7], right[7] ^ 1], [right[0] ^ 1, *right[1:]], [*right, right[0]]):
        assert greedy_reference(models(variant), prompt, 8, draft) == right


@pytest.mark.parametrize(("backend", "variant"), on_both(CACHE_VARIANTS))
def test_a_prompt_in_one_step_gives_the_same_tokens(
    backend: str, variant: str, models: Models, reference: Reference
) -> None:
    prompt = make_prompt(90)
    engine = Engine(
        models(variant), CoreLimits(max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False), backend
    )
    answers = engine.generate([prompt])
    assert answers == reference(variant, [prompt], answers)
    assert engine.plans[0].num_tokens == len(prompt)


@pytest.mark.parametrize(("backend", "variant"), on_both(CACHE_VARIANTS))
def test_a_prefix_hit_gives_the_same_tokens(backend: str, variant: str, models: Models, reference: Reference) -> None:
    shared, tails = make_prompt(70), [make_prompt(5, seed=1), make_prompt(30, seed=2), []]
    engine = Engine(models(variant), CoreLimits(max_num_seqs=8, max_num_batched_tokens=64), backend)
    engine.generate([shared])
    prompts = [shared + tail for tail in tails]
    answers = engine.generate(prompts)
    assert answers == reference(variant, prompts, answers)
    assert sorted(engine.cached.values())[-3:] == [64, 64, 64]


@pytest.mark.matrix("R-12")
@pytest.mark.parametrize(("backend", "variant"), on_both(CACHE_VARIANTS))
def test_preemption_gives_the_same_tokens(backend: str, variant: str, models: Models, reference: Reference) -> None:
    prompts = [make_prompt(length) for length in (30, 31, 32, 33)]
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine = Engine(
        models(variant), limits, backend, num_gpu_blocks_override=few_blocks(models(variant), 11), swap_space=0.0
    )
    answers = engine.generate(prompts)
    assert answers == reference(variant, prompts, answers)
    joined = [sequence.sequence_id for plan in engine.plans for sequence in plan.new]
    assert len(joined) > len(prompts), "nothing was preempted"


@pytest.mark.spec("S-SRV-044")
@pytest.mark.parametrize(
    ("backend", "variant"), on_both(one for one in CACHE_VARIANTS if one not in RECURRENT_VARIANTS)
)
def test_swapping_to_the_host_gives_the_same_tokens_and_computes_none_twice(
    backend: str, variant: str, models: Models, reference: Reference
) -> None:
    prompts = [make_prompt(length) for length in (30, 31, 32, 33)]
    engine = Engine(
        models(variant),
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False),
        backend,
        num_gpu_blocks_override=few_blocks(models(variant), 11),
    )
    answers = engine.generate(prompts)
    assert answers == reference(variant, prompts, answers)
    assert sum(len(plan.swap_in) for plan in engine.plans) > 0
    assert engine.core.counters().preemptions > 0
    computed = sum(plan.num_tokens for plan in engine.plans)
    assert computed == sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts)


@pytest.mark.spec("S-SRV-036")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_an_8_bit_cache_gives_the_same_tokens_however_the_work_is_cut_up(
    kind: str, backend: str, models: Models
) -> None:
    prompts = [make_prompt(length) for length in (15, 31, 64)]
    whole = Engine(
        models("llama"),
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=512, enable_prefix_caching=False),
        backend,
        kv_cache_dtype=kind,
    )
    expected = whole.generate(prompts)
    chunked = Engine(
        models("llama"),
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=20),
        backend,
        kv_cache_dtype=kind,
        num_gpu_blocks_override=9,
        max_model_len=120,
    )
    assert chunked.generate(prompts) == expected
    assert chunked.generate(prompts) == expected
    assert chunked.core.counters().preemptions > 0


@pytest.mark.spec("S-SRV-036")
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("variant", ["llama with its own head size", "mistral with a window", "qwen3"])
def test_an_8_bit_cache_of_the_compiled_backend_holds_the_numbers_of_torch(
    variant: str, kind: str, models: Models
) -> None:
    """Numbers that lie between two of 8 bits may be rounded to the other one where the last bit of a sum differs."""
    prompts, answers = [make_prompt(length) for length in (1, 31, 90)], list[list[NDArray[np.float64]]]()
    for backend in BACKENDS:
        engine = Engine(
            models(variant), CoreLimits(max_num_seqs=4, max_num_batched_tokens=40), backend, kv_cache_dtype=kind
        )
        answers.append(engine.log_probabilities(prompts, 6))
    for theirs, ours in zip(*answers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.spec("S-SRV-036")
def test_an_8_bit_cache_moves_log_probabilities_a_little(models: Models) -> None:
    prompt, reports = make_prompt(60), {}
    for kind in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
        engine = Engine(models("llama"), CoreLimits(max_num_seqs=1, max_num_batched_tokens=64), kv_cache_dtype=kind)
        engine.core.add(
            SequenceSpec(
                sequence_id="a",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=0),
            )
        )
        (outcome,) = engine.step()
        reports[kind] = outcome.logprobs[0].logprob
    assert reports["fp8"] == reports["fp8_e4m3"]
    errors = [abs(reports[kind] - reports["auto"]) for kind in ("fp8_e4m3", "fp8_e5m2")]
    assert 0.0 < errors[0] < 0.2
    assert 0.0 < errors[1] < 0.4


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_of_a_running_sequence_give_what_they_give_alone(backend: str, models: Models) -> None:
    prompt = make_prompt(37)
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True) for seed in range(4)]
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    alone = [Engine(models("qwen3"), limits, backend).generate([prompt], each)[0] for each in params]
    engine = Engine(models("qwen3"), limits, backend)
    output: dict[str, list[int]] = {str(number): [] for number in range(4)}
    engine.core.add(SequenceSpec(sequence_id="0", prompt_token_ids=tuple(prompt), params=params[0]))
    while engine.core.sequences or not output["3"]:
        for outcome in engine.step():
            output[outcome.sequence_id] += outcome.token_ids
        if len(engine.plans) == 2:
            for number in (1, 2, 3):
                engine.core.fork(
                    "0", SequenceSpec(sequence_id=str(number), prompt_token_ids=tuple(prompt), params=params[number])
                )
    assert list(output.values()) == alone
    assert sum(plan.num_tokens for plan in engine.plans) == len(prompt) + 4 * NUM_TOKENS - 1
    assert len(engine.plans[2].copies) == 3


@pytest.mark.parametrize(("backend", "variant"), on_both(FAMILY_VARIANTS))
def test_thirty_two_sequences_at_once_give_the_same_tokens(
    backend: str, variant: str, models: Models, reference: Reference
) -> None:
    """Plain first; then everything at once: chunks, prefix hits and a pool so small that sequences are preempted."""
    prompts = [make_prompt(1 + 7 * i % 60, seed=i) for i in range(16)] * 2
    plain = Engine(
        models(variant), CoreLimits(max_num_seqs=32, max_num_batched_tokens=128, enable_prefix_caching=False), backend
    )
    answers = plain.generate(prompts)
    expected = reference(variant, prompts, answers)
    assert answers == expected
    assert max(len(plan.scheduled) for plan in plain.plans) == 32
    crowded = Engine(
        models(variant),
        CoreLimits(max_num_seqs=32, max_num_batched_tokens=48),
        backend,
        num_gpu_blocks_override=few_blocks(models(variant), 60),
    )
    assert crowded.generate(prompts) == expected
    assert crowded.core.counters().preemptions > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeded_sequences_give_the_same_tokens_alone_in_a_batch_and_under_preemption(
    backend: str, models: Models
) -> None:
    prompts = [make_prompt(length) for length in (30, 31, 32, 33)]
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=7, top_p=0.9, top_k=40, ignore_eos=True)
    alone = [
        Engine(models("qwen3"), CoreLimits(max_num_seqs=1, max_num_batched_tokens=512), backend).generate(
            [prompt], params
        )[0]
        for prompt in prompts
    ]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    together = Engine(
        models("qwen3"),
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=40, enable_prefix_caching=False),
        backend,
        num_gpu_blocks_override=11,
    )
    assert together.generate(prompts, params) == alone


@pytest.mark.spec("S-DEP-010")
def test_a_sharded_checkpoint_gives_the_same_tokens(tmp_path: Path) -> None:
    single = make_model(tmp_path / "single", "qwen3")
    sharded = make_model(tmp_path / "sharded", "qwen3", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    limits, prompt = CoreLimits(max_num_seqs=1, max_num_batched_tokens=64), make_prompt(20)
    assert Engine(sharded, limits).generate([prompt]) == Engine(single, limits).generate([prompt])


@pytest.mark.spec("S-DEP-010")
@pytest.mark.parametrize("shards", [1, 3])
def test_pytorchs_own_files_give_the_same_tokens(tmp_path: Path, shards: int) -> None:
    directory = make_model(tmp_path, "qwen3")
    limits, prompt = CoreLimits(max_num_seqs=1, max_num_batched_tokens=64), make_prompt(20)
    expected = Engine(directory, limits).generate([prompt])
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{number % shards + 1:05}-of-{shards:05}.bin" for number, name in enumerate(sorted(tensors))}
    if shards == 1:
        files = dict.fromkeys(tensors, "pytorch_model.bin")
    else:
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        torch.save({name: tensors[name].clone() for name in tensors if files[name] == file}, directory / file)
    assert Engine(directory, limits).generate([prompt]) == expected


@pytest.mark.parametrize(
    "variant",
    [name for name, (_, fields) in VARIANTS.items() if name.startswith("llama") and "rope_parameters" in fields],
)
def test_rotary_frequencies_are_those_of_transformers_to_the_last_bit(variant: str) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    family, overrides = VARIANTS[variant]
    config = AutoConfig.for_model(family, hidden_size=256, num_attention_heads=4, **overrides)
    kind = overrides["rope_parameters"]["rope_type"]
    expected, scale = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    rope, _ = rope_parameters(config.to_dict(), getattr(config, "head_dim", None) or 64)
    assert torch.equal(inverse_frequencies(rope), expected)
    assert rope.attention_factor == scale
