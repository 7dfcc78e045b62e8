"""Blocks of layers with a window are given away when the window has passed them, and Triton's kernels see no other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import work_kinds
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import StepResult
from antiphon.services.engine.models.kv_groups import freeing_windows
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import Models, make_kernel_worker, make_prompt
from tests.model.recomputed import Recomputed, graphs_of
from tests.models import VOCAB_SIZE
from tests.support.window_plans import Share, WindowPlans

pytestmark = pytest.mark.model

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "block_size": 4,
    "max_model_len": 90,
    "num_gpu_blocks_override": 160,
    "swap_space": 0.01,
}
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=VOCAB_SIZE)


def make_both(directory: Path, **overrides: Any) -> tuple[TritonWorker, TritonWorker]:
    """Without further groups of block tables, and with them."""
    whole, groups = (
        make_kernel_worker(directory, **SIZES, disable_hybrid_kv_cache_manager=disabled, **overrides)
        for disabled in (True, False)
    )
    assert (whole.facts().num_windowed_groups, whole.facts().window) == (0, 0)
    assert (groups.facts().num_windowed_groups > 0, groups.facts().window) == (True, 20)
    return whole, groups


class Planned:
    """A worker that computes plans made by hand. What no sequence sees any longer becomes large numbers."""

    def __init__(self, worker: TritonWorker) -> None:
        self.plans, self.results = WindowPlans(worker.facts()), list[StepResult]()
        self._worker = worker

    def add(self, row: int, length: int) -> None:
        self.plans.add(row, make_prompt(length), PARAMS)

    def tokens(self, row: int) -> list[int]:
        return self.plans.rows[row].token_ids

    @torch.inference_mode()
    def step(self, *shares: Share) -> StepResult:
        plan = self.plans.plan(*shares)
        if not plan.swap_out:
            for part in self._worker._blocks.kv.parts:
                part[self.plans._free] = 300.0
        result = self._worker.run(plan)
        self.results.append(result)
        self.plans.take(plan, result)
        return result


def run_mixed(worker: TritonWorker) -> list[StepResult]:
    """Chunks of prompts beside sequences that decode, drafts, and a sequence that goes through the host's memory."""
    planned = Planned(worker)
    planned.add(0, 70)
    planned.add(1, 70)
    planned.add(2, 33)
    planned.step(Share(0, 41))
    planned.step(Share(0, 29), Share(2, 20))
    planned.step(Share(0), Share(2, 13), Share(1, 40))
    planned.step(Share(0, 3, (5, 6)), Share(2), Share(1, 30))
    first = len(planned.tokens(1))
    assert planned.tokens(1) == planned.tokens(0)[:first]
    guess = planned.tokens(0)[first]
    planned.plans.move(2, 3)
    assert planned.step(Share(3), Share(1, 3, (guess, 7)), Share(0)).token_ids[1][0] == guess
    planned.step(Share(0), Share(1), Share(3))
    assert bool(planned.plans.num_reused) == bool(worker.facts().num_windowed_groups)
    return planned.results


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("gpt_oss", {}),
        pytest.param("llama4", {}, marks=pytest.mark.slow),
        pytest.param("mellum with stretched positions", {}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_without_groups_of_block_tables(
    models: Models, variant: str, overrides: dict[str, Any]
) -> None:
    whole, groups = make_both(models(variant), **overrides)
    assert run_mixed(groups) == run_mixed(whole)


@pytest.mark.slow
def test_layers_that_borrow_keys_read_the_blocks_of_their_source(models: Models) -> None:
    directory = models("gemma3n")
    kinds = work_kinds(freeing_windows(describe_model(directory)), 4, 4)
    assert list(kinds.values()) == [{1: [0, 2]}, {0: [1, 3]}]
    whole, groups = make_both(directory)
    assert run_mixed(groups) == run_mixed(whole)


def run_together(worker: TritonWorker) -> list[StepResult]:
    """Sequences that decode together, two of them and then three, which take places for four."""
    planned = Planned(worker)
    planned.add(3, 41)
    planned.add(0, 30)
    planned.add(1, 26)
    planned.step(Share(3, 41))
    planned.step(Share(3), Share(0, 30))
    for _ in range(3):
        planned.step(Share(0), Share(3))
    planned.step(Share(3), Share(1, 26))
    planned.step(Share(3), Share(0), Share(1))
    planned.step(Share(1), Share(3), Share(0))
    return planned.results


@pytest.mark.slow
def test_captured_graphs_find_tables_and_slots_of_every_group(models: Models) -> None:
    (whole, groups), recomputed = make_both(models("gemma2")), Recomputed()
    expected = run_together(whole)
    with torch.inference_mode():
        groups._graphs = groups._capture(graphs_of(groups), recomputed)
    assert run_together(groups) == expected
    assert set(recomputed.replayed) == {1, 2}
