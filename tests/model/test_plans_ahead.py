"""The CPU worker with the next plan under way: the tokens are those of the torch worker, which takes one at a time."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.engine.core.plan import CoreLimits, StepPlan
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.worker.interface import ModelWorker, PipelinedWorker
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import CACHE_VARIANTS, TORCH_VARIANTS, Models, make_prompt, make_worker, quick_or_slow
from tests.model.looped import Output, run

GREEDY = {"temperature": 0.0}
MIXED: list[tuple[int, dict[str, Any]]] = [
    (17, GREEDY),
    (3, {"seed": 2**64 - 3, "top_p": 0.9, "top_k": 50}),
    (4, {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "seed": 4, "logprobs": 3}),
    (5, {"temperature": 0.0, "min_tokens": 2, "ignore_eos": False}),
]
"""(prompt, parameters): in chunks, drawn, with penalties and log probabilities, with bans."""


def both_workers(models: Models, variant: str, **flags: Any) -> tuple[ModelWorker, ModelWorker]:
    directory: Path = models(variant)
    chosen = {"max_num_seqs": 4, "block_size": 16, **flags}
    return make_worker("native", directory, **chosen), make_worker("torch", directory, **chosen)


def most_under_way(worker: ModelWorker) -> Callable[[], int]:
    """Counts what is under way at each launch."""
    assert isinstance(worker, PipelinedWorker)
    launch, counts = worker.launch, [0]
    waiting = [0]
    collect = worker.collect

    def counted_launch(plan: StepPlan) -> None:
        launch(plan)
        waiting[0] += 1
        counts.append(waiting[0])

    def counted_collect() -> Any:
        waiting[0] -= 1
        return collect()

    worker.launch, worker.collect = counted_launch, counted_collect  # type: ignore[method-assign]
    return lambda: max(counts)


@pytest.mark.parametrize("variant", quick_or_slow(name for name in CACHE_VARIANTS if name not in TORCH_VARIANTS))
def test_greedy_tokens_are_the_same_with_every_kind_of_cache(models: Models, variant: str) -> None:
    ours, theirs = both_workers(models, variant)
    ahead = most_under_way(ours)
    requests = [(make_prompt(length), GREEDY) for length in (20, 3, 9)]
    assert run(ours, requests, 6).tokens == run(theirs, requests, 6).tokens
    assert ahead() == 2


def test_a_mixed_batch_gets_the_same_tokens_and_log_probabilities(models: Models) -> None:
    requests = [(make_prompt(length), params) for length, params in MIXED]
    ours, theirs = (run(worker, requests, 5) for worker in both_workers(models, "qwen3"))
    assert ours.tokens == theirs.tokens
    for mine, other in zip(ours.logprobs["r2"], theirs.logprobs["r2"], strict=True):
        assert mine.top_token_ids == other.top_token_ids
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_guesses_are_accepted_alike(models: Models) -> None:
    repeating: dict[str, Any] = {"repetition_penalty": 1.1, "seed": 5, "temperature": 0.4}
    requests = [(make_prompt(5), GREEDY), (make_prompt(3), repeating)]
    ours, theirs = (run(worker, requests, 8, num_speculative_tokens=3) for worker in both_workers(models, "llama"))
    assert ours.tokens == theirs.tokens


def test_preempted_sequences_come_back_from_the_hosts_memory(models: Models) -> None:
    flags = {"block_size": 2, "num_gpu_blocks_override": 6, "max_model_len": 12, "swap_space": 0.01}
    requests = [(make_prompt(length), GREEDY) for length in (3, 4)]
    ours, theirs = both_workers(models, "llama", **flags)
    results = [run(worker, requests, 6, enable_prefix_caching=False).tokens for worker in (ours, theirs)]
    assert results[0] == results[1]


def test_sequences_may_end_and_others_take_their_rows_while_the_next_step_runs(models: Models) -> None:
    ours, theirs = both_workers(models, "llama", max_num_seqs=2)
    plain = run(theirs, [(make_prompt(4), GREEDY)], 8).tokens["r0"]
    stop = {**GREEDY, "stop_token_ids": (plain[2],), "ignore_eos": False}
    requests = [(make_prompt(4), stop), *((make_prompt(length), GREEDY) for length in (5, 6, 7))]
    limits = {"max_num_seqs": 2}
    mine, other = run(ours, requests, 8, **limits), run(theirs, requests, 8, **limits)
    assert mine.tokens == other.tokens
    assert mine.tokens["r0"] == plain[: plain.index(plain[2]) + 1]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes_the_tokens_are_those_of_a_sequence_alone(models: Models, seed: int) -> None:
    draw = random.Random(seed)
    flags = {"block_size": 4, "num_gpu_blocks_override": 14, "max_model_len": 40, "swap_space": draw.choice([0, 0.01])}
    ours, theirs = both_workers(models, "llama", **flags)
    prompts = {f"s{i}": make_prompt(draw.randint(1, 20)) for i in range(10)}
    output = Output()
    engine = Engine.of_worker(ours, CoreLimits(max_num_seqs=4, max_num_batched_tokens=12), output.report)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    waiting, aborted = list(prompts), set[str]()
    while waiting or engine._core.sequences:
        if waiting and draw.random() < 0.4:
            name = waiting.pop()
            engine.add(SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompts[name]), params=params))
        if engine._core.sequences and draw.random() < 0.1:
            aborted.add(name := draw.choice(sorted(engine._core.sequences)))
            engine.abort(name)
        engine.step()
    assert any(len(output.tokens[name]) == 9 for name in prompts)
    for name, prompt in prompts.items():
        alone = run(theirs, [(prompt, GREEDY)], 9).tokens["r0"]
        given = output.tokens[name]
        assert given == alone if len(given) == 9 else name in aborted and given == alone[: len(given)]
