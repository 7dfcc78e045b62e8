"""Choices of one prompt in a batch: each backend reads in a step what another sequence writes in that very step."""

import pytest

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams
from tests.unit.engine.conftest import Checkpoint

PROMPT = tuple((7 * place) % 50 + 3 for place in range(45))
SEEDS = (0, 1, 2, 3)


def generate(worker: ModelWorker, together: bool, budget: int) -> tuple[list[list[int]], int]:
    """Each seed's tokens, and the tokens that were computed."""
    reports: list[StepReport] = []
    engine = Engine.of_worker(
        worker, CoreLimits(max_num_seqs=4, max_num_batched_tokens=budget, enable_prefix_caching=False), reports.append
    )
    given: dict[str, list[int]] = {}
    for seed in SEEDS:
        params = SamplingParams(max_tokens=8, temperature=float(seed > 0), seed=seed, ignore_eos=True)
        engine.add(
            SequenceSpec(
                sequence_id=f"{seed}", prompt_token_ids=PROMPT, params=params, sequence_group="r" if together else ""
            )
        )
        given[f"{seed}"] = []
    while engine.step():
        pass
    for outcome in (outcome for report in reports for outcome in report.outcomes):
        given[outcome.sequence_id] += outcome.token_ids
    return list(given.values()), sum(report.num_tokens for report in reports)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("budget", [512, 32])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_are_the_same_and_the_prompt_is_computed_once(
    checkpoint: Checkpoint, backend: str, budget: int, block_size: int
) -> None:
    settings = EngineSettings(
        model=str(checkpoint()),
        device="cpu",
        cpu_backend=backend,
        threads=1,
        max_num_seqs=4,
        kv_cache_memory_gb=0.01,
        block_size=block_size,
    )
    worker = load_worker(settings)
    apart, num_apart = generate(worker, False, budget)
    together, num_together = generate(worker, True, budget)
    worker.close()
    assert together == apart
    assert num_apart == 4 * 45 + 4 * 7
    rest = 1 if (block_size, budget) == (64, 512) else 45 - 32
    assert 45 + 3 + 4 * 7 <= num_together <= 45 + 3 * rest + 4 * 7
