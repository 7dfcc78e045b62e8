"""Blocks of layers with a window are given away when the window has passed them, and no number changes by a bit.

A worker with block tables for each group of layers, and one with the same tables for all, compute the same steps.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits, StepResult
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.step_worker import StepWorker
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import Engine, make_prompt, make_worker
from tests.models import VOCAB_SIZE, make_model
from tests.support.window_plans import Share, WindowPlans

pytestmark = pytest.mark.model

_S, _F = "sliding_attention", "full_attention"
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gemma3": ("gemma3_text", {"num_hidden_layers": 5, "layer_types": [_S, _S, _F, _S, _F]}, 2),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4, "layer_types": [_S, _F, _S, _F]}, 1),
    "cohere2": ("cohere2", {"num_hidden_layers": 3, "layer_types": [_S, _S, _F]}, 2),
    "llama4": ("llama4_text", {}, 3),
    "exaone4 without groups of heads": ("exaone4", {"num_key_value_heads": 4}, 1),
    "qwen3": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "num_hidden_layers": 3},
        2,
    ),
}
"""Family, fields of its config, and the number of groups of layers with a window."""
WINDOWS = {"qwen3": 40}
PLAIN: dict[str, Any] = {"block_size": 16}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", PLAIN),
    "native": ("native", PLAIN),
    "native, whole units": ("native", {"block_size": 64, "dtype": "bfloat16"}),
    "native, 16 bits": ("native", {"block_size": 16, "dtype": "bfloat16"}),
    "native, cache of 8 bits": ("native", {"block_size": 32, "kv_cache_dtype": "fp8"}),
}
NUM_ROWS, NUM_TOKENS = 4, 60
LENGTHS = (200, 90, 3, 130, 45, 70)
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=VOCAB_SIZE)
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Makes each variant once."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            family, overrides, _ = VARIANTS[variant]
            made[variant] = make_model(tmp_path_factory.mktemp("model"), family, **overrides)
        return made[variant]

    return make


def workers(directory: Path, backend: str, **flags: Any) -> Iterator[ModelWorker]:
    """Without further groups of block tables, then with them."""
    chosen = {
        "max_num_seqs": NUM_ROWS,
        "num_gpu_blocks_override": 256,
        "swap_space": 0.05,
        "max_model_len": 300,
        **flags,
    }
    for whole in (True, False):
        yield make_worker(backend, directory, disable_hybrid_kv_cache_manager=whole, **chosen)


def computed(worker: ModelWorker, seed: int, answers: list[list[int]], *, drafts: bool) -> list[StepResult]:
    """What sequences sample that come, go, and change their rows. Their tokens are put into `answers`.

    With `drafts`, they are in it already, and drafts are taken from them, some of them wrong.
    """
    draw, plans, results = random.Random(seed), WindowPlans(worker.facts(), seed), list[StepResult]()
    waiting, numbers = list(range(len(LENGTHS))), dict[int, int]()
    while waiting or plans.rows:
        vacant = [row for row in range(NUM_ROWS) if row not in plans.rows]
        if waiting and vacant and draw.random() < 0.4:
            numbers[row := draw.choice(vacant)] = waiting.pop()
            plans.add(row, make_prompt(LENGTHS[numbers[row]]), PARAMS)
        elif vacant and draw.random() < 0.1:
            row, other = draw.choice(sorted(plans.rows)), draw.choice(vacant)
            if plans.rows[row].joined:
                plans.move(row, other)
                numbers[other] = numbers.pop(row)
        chosen = [row for row in sorted(plans.rows) if draw.random() < 0.8]
        if not chosen:
            continue
        plan = plans.plan(*(_share(plans, row, draw, answers[numbers[row]] if drafts else []) for row in chosen))
        results.append(worker.run(plan))
        plans.take(plan, results[-1])
        for row in chosen:
            if len(plans.rows[row].token_ids) >= plans.rows[row].num_prompt_tokens + NUM_TOKENS:
                answers[numbers[row]] = plans.end(row).token_ids
    assert bool(plans.num_reused) == bool(worker.facts().num_windowed_groups)
    return results


def _share(plans: WindowPlans, row: int, draw: random.Random, answer: list[int]) -> Share:
    sequence = plans.rows[row]
    if sequence.num_missing > 1:
        return Share(row, min(sequence.num_missing, draw.choice((7, 33, 64, 150))))
    first = len(sequence.token_ids)
    drafts = [token if draw.random() < 0.8 else 5 for token in answer[first : first + draw.randrange(4)]]
    return Share(row, 1 + len(drafts), tuple(drafts))


def everything(worker: ModelWorker) -> list[StepResult]:
    """Without drafts, then with them."""
    answers: list[list[int]] = [[] for _ in LENGTHS]
    plain = computed(worker, 1, answers, drafts=False)
    drafting = computed(worker, 2, answers, drafts=True)
    assert any(len(tokens) > 1 for result in drafting for tokens in result.token_ids)
    return plain + drafting


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_are_those_without_groups_of_block_tables(windowed: Models, variant: str, setting: str) -> None:
    backend, flags = SETTINGS[setting]
    whole, groups = workers(windowed(variant), backend, **flags)
    assert (whole.facts().num_windowed_groups, whole.facts().window) == (0, 0)
    assert (groups.facts().num_windowed_groups, groups.facts().window) == (
        VARIANTS[variant][2],
        WINDOWS.get(variant, 20),
    )
    for mine, other in zip(everything(groups), everything(whole), strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == other.logprobs


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_blocks_of_every_group_are_exchanged(windowed: Models, backend: str) -> None:
    """A block that another engine gets has the keys and values of its group's layers, one in each slab."""
    whole, groups = workers(windowed("gemma3"), backend, **PLAIN)
    found = list[list[NDArray[np.uint8]]]()
    for worker in (whole, groups):
        assert isinstance(worker, StepWorker)
        plans = WindowPlans(worker.facts())
        plans.add(0, make_prompt(31), PARAMS)
        plans.take(plan := plans.plan(Share(0, 31)), worker.run(plan))
        memory, sequence = worker.kv_memory(), plans.rows[0]
        blocks = sequence.blocks[1:] + list(sequence.columns[-1])
        parts = [np.zeros(memory.layout.shape(15), dtype=np.uint8) for _ in blocks]
        for block, part in zip(blocks, parts, strict=True):
            memory.read(block, part)
        found.append(parts)
    by_layer, by_group = found
    layers = ((2, 4), (0, 1), (3,))
    for part, own in zip(by_group, layers, strict=True):
        assert part[: len(own)].tolist() == by_layer[0][list(own)].tolist()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_same_memory_holds_more_long_sequences(windowed: Models, backend: str) -> None:
    """A block of a group of two layers takes two fifths of the memory of a block of five layers."""
    prompts, limits = [make_prompt(250, seed=seed) for seed in range(6)], CoreLimits(max_num_batched_tokens=48)
    answers, most = list[list[list[int]]](), list[int]()
    for disabled, num_blocks in ((True, 40), (False, 100)):
        engine = Engine(
            windowed("gemma3"), limits, backend,
            num_gpu_blocks_override=num_blocks, disable_hybrid_kv_cache_manager=disabled, max_model_len=300,
        )  # fmt: skip
        answers.append(engine.generate(prompts))
        running, at_once = set[int](), 0
        for plan in engine.plans:
            running = (running - set(plan.freed_rows)) | {new.row for new in plan.new}
            at_once = max(at_once, len(running))
        most.append(at_once)
    assert answers[0] == answers[1]
    assert (most[0], most[1] >= 4) == (2, True)
