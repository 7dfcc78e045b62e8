"""Models that several ranks compute, against one process: every family, divided by heads, by layers and by both."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.engine.core.plan import CoreLimits
from services.engine.parallel.communicator import Communicator
from services.engine.parallel.shard import Shard, local_description
from services.engine.worker.seam import ModelWorker
from services.engine.worker.torch_worker import TorchWorker, describe_model
from shared.config import SettingsError
from shared.sampling import SamplingParams
from tests.model.harness import VARIANTS, Engine, Models, Reference, make_prompt, settings
from tests.model_variants import FOREIGN_VARIANTS
from tests.support.ranks import RankThreads

pytestmark = pytest.mark.model
LIMITS = CoreLimits(8, 24, enable_prefix_caching=False)
SHAPES = ((2, 1), (1, 2), (2, 2))
TOLERANCE = 1e-4
"""Of log probabilities: sums in another order."""


def engine(directory: Path, tp_size: int, pp_size: int, **overrides: Any) -> Engine:
    chosen = settings(directory, max_num_seqs=LIMITS.max_num_seqs, **overrides)

    def make(ranks: Communicator) -> ModelWorker:
        return TorchWorker(chosen, directory, None, ranks)

    return Engine.around(RankThreads(make, tp_size, pp_size), LIMITS)


@pytest.mark.spec("S-SRV-070", "S-SRV-071")
@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in FOREIGN_VARIANTS])
def test_ranks_compute_what_one_process_computes(variant: str, tp_size: int, pp_size: int, models: Models) -> None:
    directory = models(variant)
    prompts = [make_prompt(length) for length in (5, 40)]
    alone = Engine(directory, LIMITS, "torch")
    together = engine(directory, tp_size, pp_size)
    for ours, theirs in zip(together.log_probabilities(prompts, 4), alone.log_probabilities(prompts, 4), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
def test_preemption_swapping_sampling_and_pooling_work_on_ranks(
    tp_size: int, pp_size: int, models: Models, reference: Reference
) -> None:
    variant = "llama"
    prompts = [make_prompt(length) for length in (30, 31, 32, 33)]
    limits = CoreLimits(4, 64, enable_prefix_caching=False)
    few = engine(models(variant), tp_size, pp_size, num_gpu_blocks_override=11)
    few._start(few.worker, limits)
    assert few.generate(prompts) == [reference(variant, prompt) for prompt in prompts]
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


def test_ranks_hold_their_part_only(models: Models) -> None:
    whole = describe_model(models("llama"))
    for tp_size, pp_size in SHAPES:
        parts = [local_description(whole, Shard.of_rank(r, tp_size, pp_size)) for r in range(tp_size * pp_size)]
        layers = sum(part.num_layers for part in parts) / tp_size
        assert layers == whole.num_layers
        assert {part.num_heads for part in parts} == {whole.num_heads // tp_size}
        assert {part.intermediate_size for part in parts} == {whole.intermediate_size // tp_size}
