"""The GPU worker, under the interpreter: core, loop and worker give the tokens of PyTorch's operations."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits, StepPlan
from antiphon.services.engine.worker.capacity.profile import largest_step, make_probe
from antiphon.services.engine.worker.interface import ModelWorker, PipelinedWorker
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.parameters.sampling import BeamParams
from tests.model.harness import Engine, Models, few_blocks, greedy, make_kernel_worker, make_prompt, settings
from tests.model.looped import Output, run
from tests.model.recomputed import Recomputed, graphs_of
from tests.model.test_lookahead import ask_an_oracle
from tests.support.slow import slow_but

GREEDY = {"temperature": 0.0}
MIXED: list[tuple[int, dict[str, Any]]] = [
    (17, GREEDY),
    (3, {"seed": 2**64 - 3, "top_p": 0.9, "top_k": 50}),
    (4, {"repetition_penalty": 1.4, "top_a": 0.3, "frequency_penalty": 0.3, "seed": 4, "logprobs": 3}),
    (5, {"temperature": 0.0, "min_tokens": 2, "ignore_eos": False}),
]
"""(prompt, parameters): in chunks, over a block's border, with penalties and log probabilities, with bans."""

RECURRENT = ("lfm2", "qwen3_5", "granite with state spaces", "mamba")
"""One for each kernel of recurrent states; Mamba has no attention."""

Both = Callable[..., tuple[Output, Output]]


@pytest.fixture
def both(models: Models) -> Both:
    """Runs requests on both workers."""

    def run_both(variant: str, requests: list[tuple[int, dict[str, Any]]], num_tokens: int, **options: Any) -> Any:
        directory: Path = models(variant)
        flags = {name: options.pop(name) for name in ("dtype", "kv_cache_dtype", "swap_space") if name in options}
        chosen = {"max_num_seqs": 4, "block_size": 16, **flags}
        asked = [(make_prompt(length), params) for length, params in requests]
        theirs = TorchWorker(settings(directory, **chosen), directory)
        workers: tuple[ModelWorker, ...] = (make_kernel_worker(directory, **chosen), theirs)
        assert isinstance(workers[0], PipelinedWorker)
        return tuple(run(worker, asked, num_tokens, **options) for worker in workers)

    return run_both


@pytest.mark.parametrize(("quantization", "kind"), slow_but(["ifq"], [("", "float32"), ("ifq", "int8, float32")]))
def test_a_worker_measures_the_forms_of_its_products_and_keeps_what_it_found(
    models: Models, quantization: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = models("qwen3")
    chosen = {"max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 20, "quantization": quantization}
    with caplog.at_level(logging.INFO):
        ours = make_kernel_worker(directory, gpu_kernels="measure", compile_cache=str(tmp_path), **chosen)
    theirs = TorchWorker(settings(directory, **chosen), directory)
    asked = [(make_prompt(17), GREEDY)]
    assert run(ours, asked, 3, max_num_batched_tokens=20).tokens == run(theirs, asked, 3).tokens
    forms = "(skinny|tiles|swapped|library)"
    assert re.search(rf"the forms of products by rows .*\n(  .*\n)*  {kind}.*: {forms} up", caplog.text)
    assert "is left out" not in caplog.text
    [kept] = tmp_path.glob("*.json")
    products = json.loads(kept.read_text())["products"]
    assert all(list(by_rows) == ["1", "2", "4", "8", "16", "20"] for by_rows in products.values())


def test_a_mixed_batch_gets_the_tokens_and_log_probabilities_of_the_torch_worker(both: Both) -> None:
    ours, theirs = both("qwen3", MIXED, 3)
    assert ours.tokens == theirs.tokens
    assert all(len(tokens) == 3 for tokens in ours.tokens.values())
    for mine, other in zip(ours.logprobs["r2"], theirs.logprobs["r2"], strict=True):
        assert mine.top_token_ids == other.top_token_ids
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


KINDS = (
    "gemma2 with low caps",
    "qwen2 with experts",
    "glm",
    "smollm3",
    "gpt2",
    "falcon with biases for positions",
    "olmo2",
    "apertus",
    "ministral3",
    "cohere2",
    "glm4 with experts",
    "afmoe",
    "laguna",
    "laguna with a gate for each value",
    "gemma3n",
    "gemma4",
    "gemma4 with layers that share keys",
    "gemma4 with experts",
    "gemma4 unified",
    "mellum with stretched positions",
    "llama4",
    "gpt_oss",
    "deepseek_v2 lite",
    "deepseek_v3 with wide latents",
    "youtu",
    "lfm2 with biases and a wide kernel",
    "lfm2 with experts",
    "lfm3",
    "qwen3_5 with wide heads",
    "qwen3_next",
    "mamba2",
    "mamba with biases",
    "falcon_mamba",
    "granite with state spaces and experts",
    "bamba with wide heads",
    "falcon_h1 with norms before gates",
    "jamba",
    "nemotron_h",
    "nemotron_h with experts",
    "nemotron_h with narrow experts",
    "kimi_linear",
    "kimi_linear with wide heads",
)
"""Families of every kind of attention, experts, positions and states."""
QUICK_KINDS = ("gemma2 with low caps", "gpt_oss", "deepseek_v3 with wide latents", "laguna", "nemotron_h with experts")


@pytest.mark.parametrize("variant", slow_but(QUICK_KINDS, KINDS))
def test_families_of_every_kind_get_the_tokens_of_the_torch_worker(both: Both, variant: str) -> None:
    ours, theirs = both(variant, [(9, GREEDY), (2, GREEDY)], 2)
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("variant", slow_but(["lfm2"], [*RECURRENT, "kimi_linear", "gemma4"]))
def test_a_mixed_batch_of_a_model_whose_layers_differ(both: Both, variant: str) -> None:
    ours, theirs = both(variant, MIXED, 3)
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize(
    "variant",
    slow_but(["deepseek_v3 with wide latents"], ["deepseek_v3 with wide latents", "kimi_linear with wide heads"]),
)
def test_chunks_of_prompts_whose_latents_are_expanded(both: Both, variant: str) -> None:
    """Chunks of 24 tokens behind a context, beside sequences that decode."""
    ours, theirs = both(variant, [(60, GREEDY), (3, GREEDY), (31, GREEDY)], 3, max_num_batched_tokens=24)
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("variant", slow_but(["lfm2"], RECURRENT))
def test_a_prefix_is_continued_from_the_snapshot_of_its_state(models: Models, variant: str) -> None:
    directory = models(variant)
    chosen: dict[str, Any] = {"max_num_seqs": 4, "block_size": 16}
    asked = [(make_prompt(37), GREEDY), (make_prompt(37), {**GREEDY, "logprobs": 2})]
    worker = make_kernel_worker(directory, **chosen)
    starts, launch = list[int](), worker.launch

    def note(plan: StepPlan) -> None:
        rows = {new.row for new in plan.new}
        starts.extend(share.start for share in plan.scheduled if share.row in rows)
        launch(plan)

    worker.launch = note
    ours = run(worker, asked, 4, max_num_batched_tokens=64)
    assert starts == [0, 32]
    assert ours.tokens["r0"] == ours.tokens["r1"]
    assert ours.tokens == run(TorchWorker(settings(directory, **chosen), directory), asked, 4).tokens


def test_prompts_get_the_log_probabilities_of_the_torch_worker(both: Both) -> None:
    repeating: dict[str, Any] = {"temperature": 0.0, "prompt_logprobs": 1}
    requests = [(17, {**GREEDY, "prompt_logprobs": 2}), (1, repeating), (6, {"seed": 1, "prompt_logprobs": 0})]
    ours, theirs = both("llama", requests, 4, num_speculative_tokens=2)
    assert ours.tokens == theirs.tokens
    for name in ("r0", "r1", "r2"):
        for mine, other in zip(ours.prompts[name], theirs.prompts[name], strict=True):
            assert (mine.start, mine.token_ids, mine.num_top) == (other.start, other.token_ids, other.num_top)
            assert mine.top_token_ids == other.top_token_ids
            for packed in ("logprobs", "top_logprobs"):
                one, two = (np.frombuffer(getattr(part, packed), "<f4") for part in (mine, other))
                np.testing.assert_allclose(one, two, atol=1e-4)
    assert [sum(len(part.logprobs) // 4 for part in ours.prompts[f"r{number}"]) for number in range(3)] == [17, 1, 6]


def test_a_beam_search_finds_the_hypotheses_of_the_torch_worker(both: Both) -> None:
    search: list[dict[str, Any]] = [{"temperature": 0.0, "beam": BeamParams(3, rank)} for rank in range(2)]
    ours, theirs = both("llama", [(17, search[0]), (4, GREEDY), (17, search[1])], 4)
    assert ours.tokens == theirs.tokens
    assert ours.tokens["r0"] != ours.tokens["r2"]


def test_guesses_are_accepted_as_the_torch_worker_accepts_them(both: Both) -> None:
    repeating: dict[str, Any] = {"repetition_penalty": 1.1, "seed": 5, "temperature": 0.4}
    ours, theirs = both("llama", [(5, GREEDY), (3, repeating)], 5, num_speculative_tokens=3)
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("variant", slow_but(["lfm2"], RECURRENT))
def test_a_rejected_guess_takes_a_sequence_back_to_the_state_before_it(models: Models, variant: str) -> None:
    prompts, length = [make_prompt(17), make_prompt(4)], 12
    alone = Engine(models(variant), CoreLimits(max_num_seqs=2, max_num_batched_tokens=24), "torch")
    expected = alone.generate(prompts, greedy(length))
    limits = CoreLimits(max_num_seqs=2, max_num_batched_tokens=24, num_speculative_tokens=2)
    engine = Engine(models(variant), limits, "triton")
    for prompt, tokens in zip(prompts, expected, strict=True):
        ask_an_oracle(engine, prompt + tokens, 2)
    assert engine.generate(prompts, greedy(length)) == expected
    counters = engine.core.counters()
    assert counters.drafted_tokens > counters.accepted_tokens > 0


@pytest.mark.parametrize(
    "variant", slow_but(["youtu", "lfm2"], ["llama", "youtu", "lfm2", "mamba", "gemma4 with layers that share keys"])
)
def test_preempted_sequences_come_back_from_the_hosts_memory(models: Models, variant: str) -> None:
    directory = models(variant)
    chosen = {
        "max_num_seqs": 4, "block_size": 2, "max_model_len": 12, "swap_space": 0.01,
        "num_gpu_blocks_override": few_blocks(directory, 6),
    }  # fmt: skip
    requests = [(make_prompt(length), GREEDY) for length in (3, 4)]
    triton = make_kernel_worker(directory, **chosen)
    torch_worker = TorchWorker(settings(directory, **chosen), directory)
    copied: list[str] = []
    carry_out = triton._blocks.carry_out

    def note(plan: StepPlan) -> None:
        copied.extend(name for name in ("swap_out", "swap_in") if getattr(plan, name))
        carry_out(plan)

    triton._blocks.carry_out = note
    ours = run(triton, requests, 6, enable_prefix_caching=False)
    assert set(copied) == {"swap_out", "swap_in"}
    assert ours.tokens == run(torch_worker, requests, 6, enable_prefix_caching=False).tokens


@pytest.mark.parametrize("variant", slow_but(["llama"], ["llama", "lfm2", "mamba", "gemma4"]))
def test_it_runs_the_steps_that_are_measured_on_a_device_before_the_cache_is_sized(
    models: Models, variant: str
) -> None:
    directory = models(variant)
    sizes = {"max_num_seqs": 2, "block_size": 4, "max_model_len": 9, "max_num_batched_tokens": 6}
    chosen, worker = settings(directory, **sizes), make_kernel_worker(directory, **sizes)
    description = describe_model(directory)
    probe = make_probe(largest_step(chosen, description), description, 4, torch.device("cuda"))
    worker._make_state(chosen, frozenset(), probe.kv, 0)
    for plan, num_tokens in ((probe.passing, 0), (probe.many, 2), (probe.drawing, 2), (probe.few, 2)):
        assert len(worker.run(plan).token_ids) == num_tokens


@pytest.mark.spec("S-SRV-080:gpu")
@pytest.mark.parametrize(
    "variant",
    slow_but(
        ["qwen3", "lfm2"],
        ["qwen3", *RECURRENT, "laguna", "gemma3n", "gemma4 with layers that share keys"],
    ),
)
def test_steps_find_their_places_in_captured_graphs_and_padding_changes_nothing(models: Models, variant: str) -> None:
    directory = models(variant)
    requests = [(make_prompt(length), params) for length, params in ((5, GREEDY), (3, {"seed": 5}), (2, GREEDY))]
    worker = make_kernel_worker(directory, max_num_seqs=4, block_size=16)
    plain = run(worker, requests, 4)
    recomputed = Recomputed()
    with torch.inference_mode():
        worker._graphs = worker._capture(graphs_of(worker, usual=8), recomputed)
        captured = run(worker, requests, 4)
    assert captured.tokens == plain.tokens
    # A mixed graph for a token, then decode graphs for 4, 2 and 1 sequences, each used as the three join or end: three
    # take places for four.
    assert recomputed.num_captured == 4
    assert set(recomputed.replayed) == {1, 2, 3}
