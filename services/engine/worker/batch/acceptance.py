"""Accepts draft tokens: a draft token is accepted if it equals the token sampled at its position.

The random draw for an output position is a function of seed, position and logits, so the accepted tokens are exactly
those that steps without draft tokens would have sampled. Draft tokens do not change the distribution. Called by the
workers.
"""

import numpy as np

from antiphon.services.engine.core.plan import SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.worker.batch.sampler import Sampled
from antiphon.services.engine.worker.batch.state_table import StateTable


def accept(plan: StepPlan, sampled: Sampled, table: StateTable) -> StepResult:
    """Returns the result of a step with draft tokens or waiting rows, and appends its tokens to the rows.

    A row's tokens end before the first that waits for its mask. `sampled` has the tokens in the order of
    `inputs.flatten`.
    """
    drawn, first = sampled.token_ids.tolist(), 0
    rows: list[int] = []
    tokens: list[tuple[int, ...]] = []
    logprobs: list[tuple[SampledLogprobs, ...]] = []
    failed: list[tuple[int, str]] = []
    for share in plan.scheduled:
        if not share.samples:
            continue
        end = first + 1 + _num_accepted(share.draft_token_ids, drawn[first:])
        if sampled.waiting:
            end = next((place for place in range(first, end) if place in sampled.waiting), end)
        if error := next((sampled.errors[place] for place in range(first, end) if place in sampled.errors), ""):
            failed.append((len(rows), error))
        rows.append(share.row)
        tokens.append(tuple(drawn[first:end]))
        logprobs.append(sampled.logprobs[first:end])
        first += 1 + len(share.draft_token_ids)
    _append(table, rows, tokens)
    return StepResult(step=plan.step, token_ids=tuple(tokens), logprobs=tuple(logprobs), failed=tuple(failed))


def _num_accepted(draft_tokens: tuple[int, ...], drawn: list[int]) -> int:
    """Returns how many leading draft tokens equal the sampled tokens. `drawn` must be at least as long."""
    for index, draft_token in enumerate(draft_tokens):
        if draft_token != drawn[index]:
            return index
    return len(draft_tokens)


def _append(table: StateTable, rows: list[int], tokens: list[tuple[int, ...]]) -> None:
    """Appends the tokens to the table, which takes at most one token of each row in a call."""
    for place in range(max(map(len, tokens))):
        long = [(row, given[place]) for row, given in zip(rows, tokens, strict=True) if place < len(given)]
        columns = np.array(long, dtype=np.int64)
        table.append(columns[:, 0], columns[:, 1])
