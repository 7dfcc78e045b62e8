"""Beam search against transformers: the same hypotheses in the same order, whatever else the engine computes."""

import itertools
from typing import Any, Literal

import msgspec
import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.shared.parameters.sampling import BeamParams, SamplingParams
from tests.model.harness import BACKENDS, Engine, Models, greedy, make_prompt
from tests.models import EOS_TOKEN_ID, beam_reference, reference_log_probabilities

pytestmark = pytest.mark.model
ENDS = [EOS_TOKEN_ID, *range(40, 331, 24)]
"""Enough of the vocabulary that hypotheses end before the maximum length."""
NUM_TOKENS = 14


def beams(n: int, width: int, *, min_tokens: int = 0, **others: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            min_tokens=min_tokens,
            temperature=0.0,
            stop_token_ids=tuple(ENDS[1:]),
            beam=BeamParams(width, rank, **others),
        )
        for rank in range(n)
    ]


def search(engine: Engine, name: str, prompt: list[int], params: list[SamplingParams]) -> None:
    for rank, one in enumerate(params):
        engine.core.add(
            SequenceSpec(sequence_id=f"{name}-{rank}", prompt_token_ids=tuple(prompt), params=one, sequence_group=name)
        )


def finish(engine: Engine) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    while engine.core.sequences:
        found.update({each.sequence_id: each for each in engine.step() if each.finish_reason})
        invariants.check(engine.core)
    return found


def tokens(found: dict[str, Outcome], name: str, n: int) -> list[list[int]]:
    return [list(found[f"{name}-{rank}"].token_ids) for rank in range(n)]


def expected(models: Models, prompt: list[int], n: int, width: int, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NUM_TOKENS, "num_beams": width, "num_return_sequences": n, **options}
    return beam_reference(models("llama"), prompt, ENDS, **options)


@pytest.mark.parametrize(
    ("backend", "length_penalty", "early_stopping"),
    [
        *itertools.product(["torch"], [0.5, 1.0, 2.0, -1.0], [False, True, "never"]),
        ("native", 0.5, False),
        ("native", 2.0, "never"),
    ],
)
def test_the_hypotheses_are_those_of_transformers(
    backend: str, length_penalty: float, early_stopping: bool | Literal["never"], models: Models
) -> None:
    engine = Engine(models("llama"), CoreLimits(max_num_seqs=16, max_num_batched_tokens=64), backend)
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    prompts = [make_prompt(length, seed=7) for length in (3, 33)]
    for number, prompt in enumerate(prompts):
        search(engine, f"p{number}", prompt, beams(2, 4, **options))
    found = finish(engine)
    for number, prompt in enumerate(prompts):
        assert tokens(found, f"p{number}", 2) == expected(models, prompt, 2, 4, **options)
    assert length_penalty >= 1 or "stop" in {each.finish_reason for each in found.values()}


def test_every_width_gives_as_many_hypotheses(models: Models) -> None:
    engine = Engine(models("llama"), CoreLimits(max_num_seqs=16, max_num_batched_tokens=64))
    for width in (2, 3, 7, 16):
        prompt = make_prompt(20, seed=width)
        search(engine, f"w{width}", prompt, beams(width, width))
        assert tokens(finish(engine), f"w{width}", width) == expected(models, prompt, width, width)


def test_min_tokens_forbids_the_tokens_that_end(models: Models) -> None:
    engine = Engine(models("llama"), CoreLimits(max_num_seqs=8, max_num_batched_tokens=64))
    prompt = make_prompt(18, seed=3)
    search(engine, "m", prompt, beams(4, 4, min_tokens=5))
    found = tokens(finish(engine), "m", 4)
    assert found == expected(models, prompt, 4, 4, min_new_tokens=5)
    assert min(map(len, found)) >= 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_search_among_other_sequences_and_too_little_memory_gives_the_same_hypotheses(
    backend: str, models: Models
) -> None:
    limits = CoreLimits(max_num_seqs=9, max_num_batched_tokens=9, enable_prefix_caching=False)
    engine = Engine(models("llama"), limits, backend, num_gpu_blocks_override=14, swap_space=0.0)
    prompts = [make_prompt(length, seed=5) for length in (30, 31)]
    others = [make_prompt(length, seed=6) for length in (30, 17, 40)]
    for number, other in enumerate(others):
        engine.core.add(
            SequenceSpec(
                sequence_id=f"o{number}", prompt_token_ids=tuple(other), params=greedy(), priority=-(number == 1)
            )
        )
    for number, prompt in enumerate(prompts):
        search(engine, f"p{number}", prompt, beams(2, 4))
    found = finish(engine)
    assert engine.core.counters().preemptions > 0
    for number, prompt in enumerate(prompts):
        assert tokens(found, f"p{number}", 2) == expected(models, prompt, 2, 4)


def test_log_probabilities_are_those_of_the_hypothesis(models: Models) -> None:
    engine = Engine(models("llama"), CoreLimits(max_num_seqs=8, max_num_batched_tokens=64))
    prompt = make_prompt(12, seed=1)
    params = [msgspec.structs.replace(one, logprobs=3) for one in beams(2, 3)]
    search(engine, "l", prompt, params)
    for outcome in finish(engine).values():
        assert len(outcome.logprobs) == len(outcome.token_ids)
        assert {len(each.top_token_ids) for each in outcome.logprobs} == {3}
        again = reference_log_probabilities(
            models("llama"),
            [prompt + list(outcome.token_ids[:count]) for count in range(len(outcome.token_ids))],
            "float32",
        )
        expected_ones = [float(row[token]) for row, token in zip(again, outcome.token_ids, strict=True)]
        assert [each.logprob for each in outcome.logprobs] == pytest.approx(expected_ones, abs=1e-4)
        assert outcome.cumulative_logprob == pytest.approx(sum(expected_ones), abs=1e-3)
