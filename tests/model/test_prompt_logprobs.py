"""Log probabilities of prompts against transformers, however the prompt is cut up and whatever else is computed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.shared.codec import unpack_ids
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import BACKENDS, Engine, Models, greedy, make_prompt, on_both
from tests.models import reference_log_probabilities

pytestmark = pytest.mark.model
TOLERANCE = 1e-4


def asking(num_top: int | None, num_tokens: int = 3, **others: object) -> SamplingParams:
    fields = {"temperature": 0.0, "ignore_eos": True, **others}
    return SamplingParams(max_tokens=num_tokens, prompt_logprobs=num_top, **fields)  # type: ignore[arg-type]


def generate(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Outcome]:
    """The first outcome of each prompt. Those after it report nothing of the prompt."""
    first: dict[str, Outcome] = {}
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.core.add(
            SequenceSpec(sequence_id=f"{len(engine.plans)}-{number}", prompt_token_ids=tuple(prompt), params=one)
        )
    names = list(engine.core.sequences)
    while engine.core.sequences:
        for outcome in engine.step():
            assert outcome.sequence_id not in first or not outcome.prompt_logprobs
            first.setdefault(outcome.sequence_id, outcome)
    return [first[name] for name in names]


def check(outcome: Outcome, prompt: list[int], num_top: int, expected: NDArray[np.float32]) -> None:
    """`expected` [prompt - 1, vocab]: log probabilities of the token after each token of the prompt."""
    first, *others = outcome.prompt_logprobs
    assert (first.start, unpack_ids(first.token_ids), first.num_top) == (0, prompt[:1], 0)
    assert np.isnan(np.frombuffer(first.logprobs, "<f4")).all()
    position = 1
    for part in others:
        count = len(part.token_ids) // 4
        assert part.start == position
        rows = expected[position - 1 : position - 1 + count]
        token_ids = prompt[position : position + count]
        assert unpack_ids(part.token_ids) == token_ids
        chosen = np.frombuffer(part.logprobs, "<f4")
        np.testing.assert_allclose(chosen, rows[np.arange(count), token_ids], atol=TOLERANCE)
        assert part.num_top == num_top
        top_ids = np.frombuffer(part.top_token_ids, "<u4").reshape(count, num_top).astype(np.int64)
        top = np.frombuffer(part.top_logprobs, "<f4").reshape(count, num_top)
        np.testing.assert_allclose(top, -np.sort(-rows, axis=1)[:, :num_top], atol=TOLERANCE)
        np.testing.assert_allclose(np.take_along_axis(rows, top_ids, 1), top, atol=TOLERANCE)
        position += count
    assert position == len(prompt), "not the whole prompt was reported"


def expected_of(models: Models, variant: str, prompt: list[int]) -> NDArray[np.float32]:
    return reference_log_probabilities(
        models(variant), [prompt[:end] for end in range(1, len(prompt))], "float32"
    ).numpy()


@pytest.mark.parametrize(("backend", "variant"), on_both(["llama", "mistral with a window", "gemma2"]))
def test_they_are_those_of_transformers_in_chunks_beside_sequences_that_sample(
    backend: str, variant: str, models: Models
) -> None:
    engine = Engine(
        models(variant), CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False), backend
    )
    prompts = [make_prompt(length) for length in (2, 16, 17, 60)]
    params = [asking(2), asking(0), asking(5, temperature=1.0, presence_penalty=1.0), asking(3)]
    outcomes = generate(engine, [*prompts, make_prompt(20)], [*params, greedy()])
    for outcome, prompt, one in zip(outcomes, prompts, params, strict=False):
        assert one.prompt_logprobs is not None
        check(outcome, prompt, one.prompt_logprobs, expected_of(models, variant, prompt))
    assert outcomes[-1].prompt_logprobs == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cached_prefix_is_computed_anew_and_cached_again(backend: str, models: Models) -> None:
    engine = Engine(models("llama"), CoreLimits(max_num_seqs=8, max_num_batched_tokens=64), backend)
    prompt = make_prompt(50)
    expected = expected_of(models, "llama", prompt)
    generate(engine, [prompt], [greedy(2)])
    first, second = generate(engine, [prompt, prompt], [asking(1), greedy(3)])
    check(first, prompt, 1, expected)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 48
    assert generate(engine, [prompt], [greedy(3)])[0].num_cached_tokens == 48


@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_prompts_are_reported_once(backend: str, models: Models) -> None:
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=False)
    engine = Engine(models("llama"), limits, backend, num_gpu_blocks_override=11, swap_space=0.0)
    prompts = [make_prompt(length) for length in (30, 31, 60, 33)]
    outcomes = generate(engine, prompts, [asking(1, 20) for _ in prompts])
    assert engine.core.counters().preemptions > 0
    for outcome, prompt in zip(outcomes, prompts, strict=True):
        check(outcome, prompt, 1, expected_of(models, "llama", prompt))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_of_one_token_has_nothing_to_report_and_draft_tokens_do_no_harm(backend: str, models: Models) -> None:
    engine = Engine(
        models("llama"),
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, num_speculative_tokens=4),
        backend,
        num_speculative_tokens=4,
    )
    repeated = make_prompt(6) * 5
    generate_first = generate(engine, [[7], repeated], [asking(1), asking(2, 30)])
    assert [unpack_ids(part.token_ids) for part in generate_first[0].prompt_logprobs] == [[7]]
    check(generate_first[1], repeated, 2, expected_of(models, "llama", repeated))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logits_of_a_step_are_bounded(backend: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.services.engine.core.plan.PROMPT_LOGPROBS_ROWS_MAX", 5)
    engine = Engine(
        models("llama"), CoreLimits(max_num_seqs=8, max_num_batched_tokens=64, enable_chunked_prefill=False), backend
    )
    prompts = [make_prompt(33), make_prompt(12)]
    outcomes = generate(engine, prompts, [asking(1) for _ in prompts])
    for outcome, prompt in zip(outcomes, prompts, strict=True):
        check(outcome, prompt, 1, expected_of(models, "llama", prompt))
    assert max(sum(share.num_prompt_logprobs for share in plan.scheduled) for plan in engine.plans) == 5
