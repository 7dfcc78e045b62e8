"""Models that several ranks compute, against one process: every family, divided by heads, by layers and by both."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.offline.adapters import with_adapters
from antiphon.services.engine.adapters.delta import AdapterWeights, LoadedAdapter
from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.adapters.shards import local_adapter
from antiphon.services.engine.backends.torch.staged_worker import StagedWorker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine as ProductEngine
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.services.engine.parallel.shard import Shard, local_description
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.pooling import POOLING_KINDS, PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams
from tests.adapters import make_adapter, make_prompt_adapter
from tests.model.harness import VARIANTS, Engine, Models, Reference, make_prompt, make_worker, quick_or_slow, settings
from tests.model.looped import Output, run
from tests.model.test_adapters import TARGETS
from tests.model_variants import FOREIGN_VARIANTS
from tests.support.ranks import RankThreads, StagedRanks

pytestmark = pytest.mark.model
LIMITS = CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False)
CPU = torch.device("cpu")
SHAPES = ((2, 1), (1, 2), (2, 2))
TP_ONLY = ("gemma3n", "gemma3n with two streams and dense gates", "gemma4 with layers that share keys")
STAGES_ONLY = (
    "olmo2",
    "olmo3",
    "olmo3 with stretched positions",
    "minimax_m2",
    "olmoe",
    "flex_olmo",
    "qwen3_5 with wide heads",
    "bamba with wide heads",
    "kimi_linear",
    "kimi_linear with wide heads",
)
"""Variants whose heads are normed together, one with a single key head of linear attention, one whose layers have
different numbers of heads, and those whose decays are made of vectors that are not divided."""
TOLERANCE = 1e-4
"""Of log probabilities: sums in another order."""


def ranks_of(directory: Path, tp_size: int, pp_size: int, **overrides: Any) -> RankThreads:
    chosen = settings(directory, max_num_seqs=LIMITS.max_num_seqs, **overrides)

    def make(ranks: Communicator) -> ModelWorker:
        if ranks.stage is not None:
            return StagedWorker(chosen, directory, CPU, ranks)
        return TorchWorker(chosen, directory, CPU, ranks)

    return (RankThreads if pp_size == 1 else StagedRanks)(make, tp_size, pp_size)


def engine(directory: Path, tp_size: int, pp_size: int, **overrides: Any) -> Engine:
    return Engine.around(ranks_of(directory, tp_size, pp_size, **overrides), LIMITS)


@pytest.mark.spec("S-SRV-070", "S-SRV-071")
@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
@pytest.mark.parametrize(
    "variant", quick_or_slow(v for v in VARIANTS if v not in (*FOREIGN_VARIANTS, *STAGES_ONLY, *TP_ONLY))
)
def test_ranks_compute_what_one_process_computes(variant: str, tp_size: int, pp_size: int, models: Models) -> None:
    directory = models(variant)
    prompts = [make_prompt(length) for length in (5, 40)]
    alone = Engine(directory, LIMITS, "torch")
    together = engine(directory, tp_size, pp_size)
    for ours, theirs in zip(together.log_probabilities(prompts, 4), alone.log_probabilities(prompts, 4), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


def test_a_norm_over_all_heads_runs_in_stages_and_is_not_divided(models: Models) -> None:
    directory, prompts = models("olmo3"), [make_prompt(length) for length in (5, 40)]
    alone, stages = Engine(directory, LIMITS, "torch"), engine(directory, 1, 2)
    for ours, theirs in zip(stages.log_probabilities(prompts, 4), alone.log_probabilities(prompts, 4), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    with pytest.raises(SettingsError, match="--tensor-parallel-size: this model norms all heads together"):
        local_description(describe_model(directory), Shard(0, 2))


@pytest.mark.parametrize("variant", TP_ONLY)
def test_layers_that_read_what_others_computed_are_divided_and_do_not_run_in_stages(
    variant: str, models: Models
) -> None:
    directory, prompts = models(variant), [make_prompt(length) for length in (5, 40)]
    alone, divided = Engine(directory, LIMITS, "torch"), engine(directory, 2, 1)
    for ours, theirs in zip(divided.log_probabilities(prompts, 4), alone.log_probabilities(prompts, 4), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    with pytest.raises(SettingsError, match="--pipeline-parallel-size: the last layers of this model read"):
        local_description(describe_model(directory), Shard(pp_size=2))


@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
def test_preemption_swapping_sampling_and_pooling_work_on_ranks(
    tp_size: int, pp_size: int, models: Models, reference: Reference
) -> None:
    variant = "llama"
    prompts = [make_prompt(length) for length in (30, 31, 32, 33)]
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    few = engine(models(variant), tp_size, pp_size, num_gpu_blocks_override=11)
    few._start(few.worker, limits)
    answers = few.generate(prompts)
    assert answers == reference(variant, prompts, answers)
    assert any(plan.swap_out for plan in few.plans)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, top_p=0.9, repetition_penalty=1.1)
    alone = Engine(models(variant), limits, "torch")
    assert few.generate(prompts, params) == alone.generate(prompts, params)


def test_quantized_weights_are_divided_like_plain_ones(models: Models) -> None:
    directory = models("qwen2")
    prompts = [make_prompt(length) for length in (5, 40)]
    for mode in ("ifq", "ifq_nf4"):
        alone = Engine(directory, LIMITS, "torch", quantization=mode)
        together = engine(directory, 2, 2, quantization=mode)
        for ours, theirs in zip(
            together.log_probabilities(prompts, 4), alone.log_probabilities(prompts, 4), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
@pytest.mark.parametrize("variant", ["llama with biases", "phi3", "gpt2", "gpt_neox"])
def test_adapters_are_divided_like_the_matrices(
    variant: str, tp_size: int, pp_size: int, models: Models, tmp_path: Path
) -> None:
    directory, prompts = models(variant), [make_prompt(length) for length in (5, 40)]
    lora = make_adapter(tmp_path / "lora", directory, targets=TARGETS[variant])
    soft = make_prompt_adapter(tmp_path / "soft", directory, num_tokens=7)
    extra: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
    extra |= {"enable_prompt_adapter": True, "max_prompt_adapters": 2}
    limits = CoreLimits(
        max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False, max_loras=2, max_prompt_adapters=2
    )
    alone, together = Engine(directory, limits, "torch", **extra), engine(directory, tp_size, pp_size, **extra)
    together._start(together.worker, limits)
    assert isinstance(together.worker, RankThreads)
    libraries = [worker.adapters for worker in together.worker.workers if isinstance(worker, TorchWorker)]
    whole = describe_model(directory)

    def share(_: LoadedAdapter, weights: AdapterWeights) -> None:
        for rank, library in enumerate(libraries[1:], 1):
            assert library is not None
            library.accept(local_adapter(weights, whole, Shard.of_rank(rank, tp_size, pp_size)))

    assert libraries[0] is not None
    libraries[0].share = share
    assert isinstance(alone.worker, TorchWorker)
    assert alone.worker.adapters is not None
    for asked in ((), (lora,), (soft,), (lora, soft)):
        theirs, ours = (
            _with_adapters(each, library, prompts, asked)
            for each, library in ((alone, alone.worker.adapters), (together, libraries[0]))
        )
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=TOLERANCE)


def _with_adapters(
    each: Engine, library: AdapterLibrary, prompts: list[list[int]], asked: tuple[Path, ...]
) -> list[list[float]]:
    """Returns the log probabilities of the greedy tokens of each prompt, with its adapters."""
    loaded = [library.load(path.name, str(path)) for path in asked]
    found: dict[str, list[float]] = {}
    for number, prompt in enumerate(prompts):
        name = f"{len(each.plans)}-{number}"
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
        spec = with_adapters(
            SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompt), params=params), tuple(loaded)
        )
        each.core.add(spec)
        found[name] = []
    while any(name in each.core for name in found):
        for outcome in each.step():
            found[outcome.sequence_id] += [one.logprob for one in outcome.logprobs]
    return list(found.values())


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "said"),
    [
        (3, 1, "--tensor-parallel-size: 3 does not divide the model's 4 attention heads"),
        (8, 1, "--tensor-parallel-size: 8 does not divide the model's 4 attention heads"),
        (1, 3, "--pipeline-parallel-size: 3 is more than the model's 2 layers"),
    ],
)
@pytest.mark.spec("S-SRV-070")
def test_a_model_that_cannot_be_divided_is_refused(tp_size: int, pp_size: int, said: str, models: Models) -> None:
    with pytest.raises(SettingsError) as refused:
        local_description(describe_model(models("llama")), Shard(0, tp_size, 0, pp_size))
    assert str(refused.value) == said


def test_a_stage_without_attention_is_refused(models: Models) -> None:
    whole = describe_model(models("lfm2"))
    assert whole.recurrent is not None
    recurrent = replace(whole.recurrent, layers=frozenset({0, 2}))
    three = replace(whole, num_layers=3, sliding_windows=(None,) * 3, recurrent=recurrent)
    with pytest.raises(SettingsError, match="--pipeline-parallel-size: each stage of this model needs a layer with"):
        local_description(three, Shard(pp_size=2))


def test_recurrent_layers_are_divided_by_channels_and_numbered_by_stage(models: Models) -> None:
    whole = describe_model(models("lfm2"))
    parts = [local_description(whole, Shard.of_rank(rank, 2, 2)).recurrent for rank in range(4)]
    assert whole.recurrent is not None
    half = whole.recurrent.channels // 2
    assert [part and (set(part.layers), part.channels) for part in parts] == [({0}, half)] * 2 + [({1}, half)] * 2


def test_ranks_hold_their_part_only(models: Models) -> None:
    whole = describe_model(models("llama"))
    for tp_size, pp_size in SHAPES:
        parts = [local_description(whole, Shard.of_rank(r, tp_size, pp_size)) for r in range(tp_size * pp_size)]
        layers = sum(part.num_layers for part in parts) / tp_size
        assert layers == whole.num_layers
        assert {part.num_heads for part in parts} == {whole.num_heads // tp_size}
        assert {part.intermediate_size for part in parts} == {whole.intermediate_size // tp_size}


MIXED: list[tuple[int, dict[str, Any]]] = [
    (17, {"temperature": 0.0}),
    (3, {"seed": 2**64 - 3, "top_p": 0.9, "top_k": 50}),
    (4, {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "seed": 4, "logprobs": 3}),
    (6, {"temperature": 0.0, "prompt_logprobs": 2}),
    (5, {"temperature": 0.0, "min_tokens": 2, "ignore_eos": False}),
]
"""(prompt, parameters): in chunks, drawn, with penalties and log probabilities, of the prompt too, with bans."""


@pytest.mark.spec("S-SRV-071")
@pytest.mark.parametrize(("variant", "tp_size"), [("llama", 1), ("llama", 2), ("lfm2", 1)])
def test_plans_in_flight_in_different_stages_give_the_tokens_of_one_process(
    variant: str, tp_size: int, models: Models
) -> None:
    directory = models(variant)
    requests = [(make_prompt(length, number), params) for number, (length, params) in enumerate(MIXED)]
    staged = ranks_of(directory, tp_size, 2)
    assert isinstance(staged, StagedRanks)
    ours, theirs = run(staged, requests, 6), run(make_worker("torch", directory, max_num_seqs=8), requests, 6)
    assert ours.tokens == theirs.tokens
    assert staged.most_in_flight == 2
    for mine, other in zip(ours.logprobs["r2"], theirs.logprobs["r2"], strict=True):
        assert mine.top_token_ids == other.top_token_ids
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=TOLERANCE)
    mine, other = (b"".join(part.token_ids for part in found.prompts["r3"]) for found in (ours, theirs))
    assert mine == other


@pytest.mark.parametrize("variant", ["llama", "lfm2"])
def test_draft_tokens_are_accepted_alike_with_plans_in_flight(models: Models, variant: str) -> None:
    directory = models(variant)
    repeating: dict[str, Any] = {"repetition_penalty": 1.1, "seed": 5, "temperature": 0.4}
    requests = [(make_prompt(5), {"temperature": 0.0}), (make_prompt(3), repeating)]
    staged, alone = ranks_of(directory, 1, 2), make_worker("torch", directory, max_num_seqs=8)
    ours, theirs = (run(worker, requests, 8, num_speculative_tokens=3) for worker in (staged, alone))
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize(("variant", "seed"), [("llama", 0), ("llama", 1), ("llama", 2), ("lfm2", 0), ("lfm2", 1)])
def test_whatever_comes_and_goes_with_plans_in_flight_the_tokens_stay_the_same(
    models: Models, variant: str, seed: int
) -> None:
    draw = random.Random(seed)
    directory, params = models(variant), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    flags = {"block_size": 4, "num_gpu_blocks_override": 14, "max_model_len": 40, "swap_space": draw.choice([0, 0.01])}
    staged = ranks_of(directory, 1, 2, **flags)
    prompts = {f"s{i}": make_prompt(draw.randint(1, 20), i) for i in range(10)}
    output = Output()
    product = ProductEngine.of_worker(staged, CoreLimits(max_num_seqs=4, max_num_batched_tokens=12), output.report)
    waiting, aborted = list(prompts), set[str]()
    while waiting or product._core.sequences:
        if waiting and draw.random() < 0.4:
            name = waiting.pop()
            product.add(SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompts[name]), params=params))
        if product._core.sequences and draw.random() < 0.1:
            aborted.add(name := draw.choice(sorted(product._core.sequences)))
            product.abort(name)
        product.step()
    while product.step():
        pass
    product.check_idle()
    assert any(len(output.tokens[name]) == 9 for name in prompts)
    alone = make_worker("torch", directory, max_num_seqs=8)
    whole = run(alone, [(prompt, {"temperature": 0.0}) for prompt in prompts.values()], 9).tokens
    for number, name in enumerate(prompts):
        given = output.tokens[name]
        assert given == whole[f"r{number}"][: len(given)]
        assert len(given) == 9 or name in aborted


def test_pooling_works_with_plans_in_flight(models: Models) -> None:
    directory = models("llama")
    vectors: list[dict[str, bytes]] = []
    for worker in (ranks_of(directory, 1, 2), make_worker("torch", directory, max_num_seqs=8)):
        found: dict[str, bytes] = {}

        def keep(report: StepReport, found: dict[str, bytes] = found) -> None:
            found.update({outcome.sequence_id: outcome.vector for outcome in report.outcomes if outcome.vector})

        product = ProductEngine.of_worker(worker, CoreLimits(max_num_seqs=4, max_num_batched_tokens=12), keep)
        for number, kind in enumerate(POOLING_KINDS):
            spec = SequenceSpec(
                sequence_id=kind,
                prompt_token_ids=tuple(make_prompt(20, number)),
                params=SamplingParams(),
                pooling=PoolingParams(kind=kind),
            )
            product.add(spec)
        while product.step():
            pass
        vectors.append(found)
    assert vectors[0].keys() == set(POOLING_KINDS)
    for name, vector in vectors[0].items():
        ours, theirs = (np.frombuffer(each, dtype=np.float32) for each in (vector, vectors[1][name]))
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
