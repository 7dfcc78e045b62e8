"""Tokens from logits: what the reference sampler chooses, for every filter and mixture of rows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.sampling import Adjustments, choose_tokens
from antiphon.services.engine.core.plan import NewSequence, StepPlan
from antiphon.services.engine.kernels.sampling import new_columns, set_row
from antiphon.services.engine.sampling.masks import all_tokens
from antiphon.services.engine.worker.batch.sampler import sample
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.shared.parameters.sampling import SamplingParams

VOCAB, EOS = 4099, frozenset({1, 2})
"""Over one chunk of the kernels, and no multiple of anything."""


@dataclass
class Row:
    """A sequence that samples its next token."""

    params: dict[str, Any] = field(default_factory=dict)
    output: tuple[int, ...] = (7, 9, 9)


def both(rows: list[Row], logits: Tensor) -> tuple[list[int], list[float], list[int], list[float]]:
    """Tokens and log probabilities by the kernels, then by the reference."""
    table = StateTable(len(rows), 64, 16, logits.shape[1], EOS)
    new = tuple(
        NewSequence(
            row=i,
            sequence_id=str(i),
            token_ids=(3, 4, 4, *row.output),
            num_prompt_tokens=3,
            block_ids=(),
            params=SamplingParams(**{"seed": 11 * i, **row.params}),
        )
        for i, row in enumerate(rows)
    )
    table.apply(StepPlan(step=0, new=new))
    places, offsets = np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64)
    batch = table.with_adjustments(table.sampling(places, offsets), places, offsets)
    expected = sample(logits.float(), batch)
    count, vocab = logits.shape
    counts, in_prompt = torch.zeros(count, vocab, dtype=torch.int32), torch.zeros(count, vocab, dtype=torch.int8)
    penalty_rows, mask_rows = torch.full((2, count), -1, dtype=torch.int32)
    for place, row in enumerate(batch.penalised):
        # Counts lie in the rows of a table, in another order than the step.
        penalty_rows[row] = count - 1 - row
        counts[count - 1 - row] = torch.from_numpy(batch.penalty_counts[0][place])
        in_prompt[count - 1 - row] = torch.from_numpy(batch.penalty_counts[1][place])
    allowed = [adjustment.mask for adjustment in batch.adjustments.values() if adjustment.mask is not None]
    for place, row in enumerate(row for row, adjustment in batch.adjustments.items() if adjustment.mask is not None):
        mask_rows[row] = place
    bitmask = torch.from_numpy(np.stack(allowed or [all_tokens(vocab)]).view(np.int32))
    tokens, logprobs = choose_tokens(
        logits,
        batch.columns.map(torch.from_numpy),
        torch.from_numpy(batch.output_positions.astype(np.int32)),
        Adjustments(
            counts=counts, in_prompt=in_prompt, bitmask=bitmask, penalty_rows=penalty_rows, mask_rows=mask_rows
        ),
        any_draws=bool((batch.columns.temperature > 0).any()),
    )
    theirs = [each.logprob for each in expected.logprobs]
    return tokens.tolist(), logprobs.tolist(), expected.token_ids.tolist(), theirs


def check(rows: list[Row], logits: Tensor) -> list[int]:
    tokens, logprobs, expected, theirs = both(rows, logits)
    assert tokens == expected
    np.testing.assert_allclose(logprobs, theirs, rtol=1e-5, atol=1e-5)
    return tokens


def draw_logits(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.7},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.1},
    {"top_a": 0.5},
    {"top_k": 30, "top_p": 0.95, "top_a": 0.2, "temperature": 1.3},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"repetition_penalty": 0.5, "temperature": 0.0},
    {"min_tokens": 9, "top_p": 0.8},
    {"top_k": 6000, "top_p": 0.8},
    {"top_k": 6000, "min_p": 0.9},
]


@pytest.mark.parametrize(("vocab", "scale"), [(VOCAB, 3.0), (2 * VOCAB, 3.0), (2 * VOCAB, 0.1), (3 * VOCAB, 0.01)])
def test_every_filter_alone_and_together_leaves_the_references_tokens(vocab: int, scale: float) -> None:
    """Small scales: so many tokens are candidates that they are searched where they are."""
    rows = [Row({**params, "seed": 2**63 + i}) for i, params in enumerate(FILTERS)]
    check(rows, draw_logits(len(rows), vocab, scale))


@pytest.mark.parametrize("vocab", [2, 5, 33, 700])
def test_small_vocabularies_work(vocab: int) -> None:
    rows = [Row({"top_k": 3, "top_p": 0.9, "min_tokens": 0}, output=()), Row({"temperature": 0.0}, output=())]
    table_logits = draw_logits(2, vocab)
    for row in rows:
        row.params["seed"] = vocab
    # The prompt must be of this vocabulary.
    if vocab > 5:
        check(rows, table_logits)
    assert both_in_range(table_logits)


def both_in_range(logits: Tensor) -> bool:
    count, vocab = logits.shape
    words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32)
    columns = new_columns(count)
    for row in range(count):
        set_row(columns, row, SamplingParams())
    none, nothing = torch.full((count,), -1, dtype=torch.int32), torch.zeros(1, vocab, dtype=torch.int32)
    adjustments = Adjustments(
        counts=nothing, in_prompt=nothing.to(torch.int8), bitmask=words, penalty_rows=none, mask_rows=none
    )
    tokens, _ = choose_tokens(logits, columns.map(torch.from_numpy), none + 1, adjustments)
    return all(0 <= token < vocab for token in tokens.tolist())


def test_equal_weights_at_an_edge_are_all_candidates() -> None:
    logits = torch.zeros(8, 64)
    logits[:, 40:] = -1.0
    rows = [Row({"top_k": 3, "seed": i}, output=()) for i in range(4)]
    rows += [Row({"top_p": 0.01, "seed": i}, output=()) for i in range(4)]
    tokens = check(rows, logits)
    assert max(tokens) < 40
    assert len(set(tokens)) > 3


def test_what_is_no_number_or_impossible_is_never_chosen() -> None:
    logits = draw_logits(5, 700)
    logits[:, ::2] = float("-inf")
    logits[2:, 1::4] = float("nan")
    rows = [Row({"seed": 5}), Row({"top_p": 0.5}), Row(), Row({"temperature": 0.0}), Row({"top_a": 1.0})]
    tokens, _, _, _ = both(rows, logits.clone())
    assert all(token % 2 == 1 for token in tokens)
    assert all(token % 4 == 3 for token in tokens[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened_first(dtype: torch.dtype) -> None:
    check([Row({"temperature": 0.0}), Row({"top_p": 0.9}), Row({"top_k": 9})], draw_logits(3, 700).to(dtype))


def test_a_row_gets_the_same_token_whatever_is_beside_it() -> None:
    logits = draw_logits(3, 700, scale=0.3)
    rows = [Row({"top_p": 0.95, "seed": 5}), Row({"top_k": 7}), Row({"temperature": 0.0})]
    assert check(rows, logits)[:1] == check(rows[:1], logits[:1])
