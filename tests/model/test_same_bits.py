"""`--deterministic` with the kernels for GPUs: the same bits alone, in a batch, in chunks, after hits of the cache."""

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.shared.flags import SettingsError
from tests.model.harness import Engine, Models, make_kernel_worker, make_prompt
from tests.support.kernels_on_gpu import COMPILED
from tests.support.slow import slow_but

pytestmark = pytest.mark.model
VARIANTS = ("qwen3", "mistral with a window", "qwen3 with experts", "gpt_oss", "qwen3_5")


def same(ours: list[NDArray[np.float64]], theirs: list[NDArray[np.float64]]) -> bool:
    """Whether log probabilities have the same bits.

    Under the interpreter NumPy multiplies, on some processors in another order at another place of a tile.
    """
    tolerance = 0.0 if COMPILED else 1e-5
    return all(np.allclose(one, other, rtol=0, atol=tolerance) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("variant", slow_but(["qwen3", "qwen3 with experts"], VARIANTS))
def test_a_sequence_has_the_same_bits_however_it_is_computed(variant: str, models: Models) -> None:
    prompts = [make_prompt(length) for length in (37, 3, 20)]

    def engine(max_num_batched_tokens: int) -> Engine:
        limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens)
        return Engine.around(make_kernel_worker(models(variant), max_num_seqs=4, deterministic=True), limits)

    alone = [engine(64).log_probabilities([prompt], 3)[0] for prompt in prompts]
    chunked = engine(18)
    assert not chunked.worker.facts().variant_because
    assert same(chunked.log_probabilities(prompts, 3), alone)
    num_tokens = sum(plan.num_tokens for plan in chunked.plans)
    assert same(chunked.log_probabilities(prompts, 3), alone)
    assert sum(plan.num_tokens for plan in chunked.plans) < 2 * num_tokens, "nothing was found in the prefix cache"


def test_what_has_no_such_form_says_why(models: Models) -> None:
    worker = make_kernel_worker(models("deepseek_v2"), max_num_seqs=2, deterministic=True)
    assert "latent attention has no other products" in worker.facts().variant_because
    assert "library" in make_kernel_worker(models("qwen3"), max_num_seqs=2).facts().variant_because
    with pytest.raises(SettingsError, match="--gpu-kernels: --deterministic names the kernels"):
        make_kernel_worker(models("qwen3"), max_num_seqs=2, deterministic=True, gpu_kernels="measure")
