"""Triton's kernels while blocks behind a window are freed: what they compute is what they do with all blocks kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.triton import worker as module
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import work_kinds
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import StepResult
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.graphs import Reach
from antiphon.services.engine.worker.loading.model_files import describe_model
from tests.model.harness import Models, make_kernel_worker, make_prompt
from tests.model.recomputed import Recomputed
from tests.model.window_plans import WindowPlans

pytestmark = pytest.mark.model

SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 160, "swap_space": 0.01,
}  # fmt: skip


def make_both(directory: Path, **overrides: Any) -> tuple[TritonWorker, TritonWorker]:
    """A worker that keeps all blocks, and one whose blocks behind the window are freed."""
    kept, freed = (
        make_kernel_worker(directory, **SIZES, disable_hybrid_kv_cache_manager=disabled, **overrides)
        for disabled in (True, False)
    )
    assert (kept.facts().num_windowed_groups, kept.facts().window) == (0, 0)
    assert freed.facts().num_windowed_groups > 0
    assert freed.facts().window == 20
    return kept, freed


def plans_of(worker: TritonWorker) -> WindowPlans:
    """Plans for a worker, with large numbers in the blocks that a window has passed until others write to them."""

    @torch.inference_mode()
    def spoil(blocks: list[int]) -> None:
        for part in worker._blocks.kv.parts:
            part[blocks] = 300.0

    return WindowPlans(worker, spoil)


def run_mixed(plans: WindowPlans) -> list[StepResult]:
    """Chunks of prompts beside sequences that decode, drafts, and a sequence that is swapped out and in."""
    plans.add("a", 0, make_prompt(70))
    plans.add("b", 2, make_prompt(45))
    plans.add("c", 1, make_prompt(70))
    plans.step(a=11)
    plans.step(a=30, b=9)
    plans.step(a=29, b=20)
    plans.step(a=1, b=16)
    plans.step(a=[5, 6], b=1, c=40)
    plans.step(a=1, b=[7, 8, 9], c=30)
    first = len(plans.tokens("c"))
    assert plans.tokens("c") == plans.tokens("a")[:first]
    guesses = plans.tokens("a")[first : first + 2]
    assert plans.step(a=1, c=guesses).token_ids[1][:2] == tuple(guesses)
    plans.swap_out("b", 3)
    plans.step(a=1, c=1)
    plans.step(b=1, a=1)
    plans.step(c=1, b=1)
    assert plans.num_reused > 0 or not plans.facts.window
    return plans.results


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("gemma3", {}),
        ("gpt_oss", {}),
        ("cohere2", {}),
        ("llama4", {}),
        ("mellum with stretched positions", {}),
        ("gemma2", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    ],
)
def test_a_worker_computes_the_same_without_the_blocks_behind_the_window(
    models: Models, variant: str, overrides: dict[str, Any]
) -> None:
    kept, freed = (run_mixed(plans_of(worker)) for worker in make_both(models(variant), **overrides))
    assert freed == kept


def alike(description: DecoderDescription) -> DecoderDescription:
    """A description without heads of layers' own, which are the model's in this case."""
    assert set(description.layer_kv_heads) == {(description.num_kv_heads, description.head_dim)}
    return replace(description, layer_kv_heads=(), kv_slabs=())


def test_layers_that_borrow_keys_read_the_blocks_of_their_source(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = models("gemma3n")
    assert list(work_kinds(alike(describe_model(directory)).freeing_windows(), 4, 4).values()) == [
        {1: [0, 2]},
        {0: [1, 3]},
    ]
    served = module.served_description

    def of(settings: Any, config: Any) -> DecoderDescription:
        found = alike(served(settings, config))
        return found if settings.cache.disable_hybrid_kv_cache_manager else found.freeing_windows()

    monkeypatch.setattr(module, "served_description", of)
    kept, freed = (run_mixed(plans_of(worker)) for worker in make_both(directory))
    assert freed == kept


def run_together(plans: WindowPlans) -> list[StepResult]:
    """Sequences that decode together, two of them and then three."""
    plans.add("a", 3, make_prompt(41))
    plans.add("b", 0, make_prompt(30))
    plans.add("c", 1, make_prompt(26))
    plans.step(a=41)
    plans.step(a=1, b=30)
    for _ in range(5):
        plans.step(b=1, a=1)
    plans.step(a=1, c=26)
    plans.step(a=1, b=1, c=1)
    plans.step(c=1, a=1, b=1)
    return plans.results


@pytest.mark.parametrize("variant", ["gpt_oss", "llama4"])
def test_captured_graphs_find_the_tables_and_slots_of_every_group(models: Models, variant: str) -> None:
    (kept, freed), recomputed = make_both(models(variant)), Recomputed()
    results = [run_together(plans_of(worker)) for worker in (kept, freed)]
    with torch.inference_mode():
        freed._graphs = freed._capture(Reach(128, 128), 0, recomputed)
    assert run_together(plans_of(freed)) == results[1] == results[0]
    assert set(recomputed.replayed) == {0, 1}
