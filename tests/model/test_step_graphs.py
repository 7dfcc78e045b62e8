"""Whole engines whose steps all run in graphs: prompts in chunks, draft tokens, reports, pooling and decoding together.

The graphs compute again instead of replaying, from the places where they were captured, and memory that a kernel has
not written has no numbers in it: what padding leaves there must reach no token.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits, StepPlan
from antiphon.services.engine.core.request import SequenceSpec
from tests.model.harness import Engine, Models, greedy, make_kernel_worker, make_prompt
from tests.model.looped import Output, run
from tests.model.recomputed import Recomputed, graphs_of
from tests.model.test_lookahead import ask_an_oracle
from tests.model.test_pooling import Pooled, spec
from tests.support.slow import slow_but

# NumPy, with which the interpreter computes, warns where a padding token's router has no numbers.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
GREEDY = {"temperature": 0.0}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (make_prompt(17), GREEDY),
    (make_prompt(4), {"seed": 2**64 - 3, "top_p": 0.9, "top_k": 50, "logprobs": 2}),
    (make_prompt(5), {"prompt_logprobs": 2, **GREEDY}),
]
VARIANTS = [
    "qwen3", "lfm2", "gpt_oss", "gemma2", "deepseek_v2", "qwen3 with experts", "qwen3_5", "granite with state spaces",
    "mamba", "laguna", "gemma4 with layers that share keys", "falcon with biases for positions",
]  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with what is not a number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def captured_steps(worker: TritonWorker, **sizes: int) -> tuple[Recomputed, list[StepPlan]]:
    """Captures a worker's graphs. Returns them, and the list that gets the plans of its steps."""
    recomputed, plans, launch = Recomputed(), list[StepPlan](), worker.launch
    with torch.inference_mode():
        worker._graphs = worker._capture(graphs_of(worker, **sizes), recomputed)

    def note(plan: StepPlan) -> None:
        if not plan.empty:
            plans.append(plan)
        launch(plan)

    worker.launch = note  # type: ignore[method-assign]
    return recomputed, plans


def outputs(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.prompts


@pytest.mark.parametrize("variant", slow_but(["qwen3", "lfm2"], VARIANTS))
def test_prompts_in_chunks_beside_decoding_sequences_give_the_tokens_of_steps_without_graphs(
    models: Models, variant: str
) -> None:
    worker = make_kernel_worker(models(variant), max_num_seqs=4, block_size=16)
    limits = {"max_num_batched_tokens": 8}
    plain = run(worker, REQUESTS, 5, **limits)
    recomputed, plans = captured_steps(worker, num_tokens=8)
    assert outputs(run(worker, REQUESTS, 5, **limits)) == outputs(plain)
    assert len(recomputed.replayed) == len(plans), "a step ran without a graph"
    assert 0 in recomputed.replayed, "no step ran in a mixed graph"
    assert max(recomputed.replayed) > 0, "no step ran in a decode graph"
    assert any({1} < {share.num_tokens for share in plan.scheduled} for plan in plans), "no chunk beside a decoding one"


@pytest.mark.parametrize("variant", slow_but(["qwen3"], ["qwen3", "youtu", "lfm2", "mamba", "gpt_oss"]))
def test_draft_tokens_are_checked_in_graphs(models: Models, variant: str) -> None:
    length, prompts = 12, [make_prompt(5), make_prompt(3)]
    limits = CoreLimits(max_num_seqs=2, max_num_batched_tokens=8, num_speculative_tokens=2)
    expected = Engine(models(variant), limits, "torch").generate(prompts, greedy(length))
    engine = Engine(models(variant), limits, "triton")
    assert isinstance(engine.worker, TritonWorker)
    for prompt, tokens in zip(prompts, expected, strict=True):
        ask_an_oracle(engine, prompt + tokens, 2)
    recomputed, plans = captured_steps(engine.worker, num_tokens=8, max_queries=3)
    assert engine.generate(prompts, greedy(length)) == expected
    counters = engine.core.counters()
    assert counters.drafted_tokens > counters.accepted_tokens > 0
    assert len(recomputed.replayed) == len(plans), "a step ran without a graph"


@pytest.mark.parametrize("variant", slow_but(["qwen3"], ["qwen3", "mistral with a window", "qwen3_5"]))
def test_deterministic_steps_have_a_tile_for_each_sequence_in_graphs(models: Models, variant: str) -> None:
    worker = make_kernel_worker(models(variant), max_num_seqs=4, block_size=16, deterministic=True)
    limits = {"max_num_batched_tokens": 8}
    plain = run(worker, REQUESTS, 4, **limits)
    recomputed, plans = captured_steps(worker, num_tokens=8)
    assert outputs(run(worker, REQUESTS, 4, **limits)) == outputs(plain)
    assert len(recomputed.replayed) == len(plans), "a step ran without a graph"


def test_vectors_of_pooling_sequences_come_from_the_hidden_states_of_graphs(models: Models) -> None:
    worker = make_kernel_worker(models("llama"), max_num_seqs=4, block_size=16)
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=8)

    def pooled(name: str) -> tuple[Any, ...]:
        found = Pooled(worker, limits)
        text = SequenceSpec(sequence_id=name, prompt_token_ids=tuple(make_prompt(5)), params=greedy(3))
        vectors = found.run(text, *(spec(f"{name}{size}", make_prompt(size), kind="mean") for size in (3, 9)))
        return found.tokens[name], vectors

    tokens, vectors = pooled("plain")
    recomputed, plans = captured_steps(worker, num_tokens=8)
    again, same = pooled("captured")
    assert again == tokens
    for vector, other in zip(vectors, same, strict=True):
        np.testing.assert_allclose(vector, other, atol=1e-6)
    assert len(recomputed.replayed) == len(plans), "a step ran without a graph"


def test_a_step_that_no_graph_has_room_for_runs_without_one(models: Models) -> None:
    worker = make_kernel_worker(models("qwen3"), max_num_seqs=4, block_size=16)
    plain = run(worker, REQUESTS, 3)
    recomputed, plans = captured_steps(worker, num_tokens=4)
    assert outputs(run(worker, REQUESTS, 3)) == outputs(plain)
    assert 0 < len(recomputed.replayed) < len(plans)
