"""PromptLookup against transformers and against plain steps: guesses change how fast tokens come, never which."""

from typing import Any

import pytest

from antiphon.services.engine.core.drafts.prompt_lookup import PromptLookup
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import (
    BACKENDS,
    CACHE_VARIANTS,
    FAMILY_VARIANTS,
    Engine,
    Models,
    Reference,
    few_blocks,
    make_prompt,
    on_both,
)
from tests.models import VOCAB_SIZE

pytestmark = pytest.mark.model


REPETITIVE = [3, 4, 5, 6, 7, 8, 9, 10] * 5


@pytest.mark.spec("S-SRV-057", "S-SRV-058")
@pytest.mark.parametrize(
    ("backend", "variant", "num_draft_tokens"),
    [*on_both(FAMILY_VARIANTS, 8), *on_both(CACHE_VARIANTS, 1)],
)
def test_lookahead_gives_the_same_greedy_tokens(
    backend: str, variant: str, num_draft_tokens: int, models: Models, reference: Reference
) -> None:
    """Also in a crowded pool, in chunks and after prefix hits."""
    prompts = [make_prompt(30), make_prompt(50), REPETITIVE, make_prompt(33)]
    expected = reference(variant, prompts)
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=48, num_speculative_tokens=num_draft_tokens)
    few = few_blocks(models(variant), 12)
    engine = Engine(models(variant), limits, backend, num_gpu_blocks_override=few, max_model_len=160)
    for prompt, tokens in zip(prompts, expected, strict=True):
        ask_an_oracle(engine, prompt + tokens, num_draft_tokens)
    assert engine.generate(prompts) == expected
    assert engine.generate(prompts) == expected
    counters = engine.core.counters()
    assert counters.drafted_tokens > counters.accepted_tokens > 0
    assert counters.preemptions > 0


@pytest.mark.spec("S-SRV-057")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7, "temperature": 0.4},
        {"seed": 8, "temperature": 0.2, "top_k": 5, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"temperature": 0.0, "min_tokens": 12, "ignore_eos": False, "stop_token_ids": tuple(range(100, 200))},
    ],
    ids=str,
)
def test_lookahead_gives_the_same_seeded_penalised_and_held_back_tokens(
    backend: str, changes: dict[str, Any], models: Models
) -> None:
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "logprobs": 2, **changes})
    prompts = [REPETITIVE, make_prompt(20) * 2]
    plain = Engine(models("qwen3"), CoreLimits(max_num_seqs=2, max_num_batched_tokens=64), backend).generate(
        prompts, params
    )
    ahead = Engine(
        models("qwen3"), CoreLimits(max_num_seqs=2, max_num_batched_tokens=64, num_speculative_tokens=4), backend
    )
    for prompt, tokens in zip(prompts, plain, strict=True):
        ask_an_oracle(ahead, prompt + tokens, 4)
    assert ahead.generate(prompts, params) == plain
    assert ahead.core.counters().accepted_tokens > 10


def ask_an_oracle(engine: Engine, whole: list[int], most: int) -> None:
    """Has the core guess what the sequence will be, and now and then something else."""
    add = engine.core.add

    def add_with_oracle(spec: SequenceSpec) -> None:
        add(spec)
        sequence = engine.core.sequences[spec.sequence_id]
        if sequence.drafter is not None and tuple(whole[: len(spec.prompt_token_ids)]) == spec.prompt_token_ids:
            sequence.drafter.lookup = Oracle(whole, most)

    engine.core.add = add_with_oracle  # type: ignore[method-assign]


class Oracle(PromptLookup):
    """Knows the output; every third guess goes wrong at its end."""

    def __init__(self, whole: list[int], most: int) -> None:
        super().__init__(most)
        self._whole, self._most = whole, most
        self._count = 0

    def draft(self, tokens: Any, most: int) -> tuple[int, ...]:
        self._count += 1
        guesses = self._whole[len(tokens) : len(tokens) + min(most, self._most)]
        if self._count % 3 == 0 and guesses:
            guesses[-1] = (guesses[-1] + 1) % VOCAB_SIZE
        return tuple(guesses)
