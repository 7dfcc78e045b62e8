"""Which guesses were right: those that are the token which is sampled in their place anyway.

The draw for an output position is a function of seed, position and logits, so what is accepted is exactly what single
steps would have sampled; no guess changes a distribution. Called by the workers.
"""

import numpy as np

from services.engine.core.plan import SampledLogprobs, StepPlan, StepResult
from services.engine.worker.sampler import Sampled
from services.engine.worker.state_table import StateTable


def accept(plan: StepPlan, sampled: Sampled, table: StateTable) -> StepResult:
    """The tokens of a step with guesses, also appended to the rows. `sampled` as `inputs.flatten` orders it."""
    drawn, first = sampled.token_ids.tolist(), 0
    rows: list[int] = []
    tokens: list[tuple[int, ...]] = []
    logprobs: list[tuple[SampledLogprobs, ...]] = []
    for share in plan.scheduled:
        if not share.samples:
            continue
        end = first + 1 + _num_right(share.draft_token_ids, drawn[first:])
        rows.append(share.row)
        tokens.append(tuple(drawn[first:end]))
        logprobs.append(sampled.logprobs[first:end])
        first += 1 + len(share.draft_token_ids)
    _append(table, rows, tokens)
    return StepResult(plan.step, tuple(tokens), tuple(logprobs))


def _num_right(guesses: tuple[int, ...], drawn: list[int]) -> int:
    """Leading guesses that were drawn; one shorter list ends it."""
    for index, guess in enumerate(guesses):
        if guess != drawn[index]:
            return index
    return len(guesses)


def _append(table: StateTable, rows: list[int], tokens: list[tuple[int, ...]]) -> None:
    """One token of each row at a time, as the table takes them."""
    for place in range(max(map(len, tokens))):
        long = [(row, given[place]) for row, given in zip(rows, tokens, strict=True) if place < len(given)]
        columns = np.array(long, dtype=np.int64)
        table.append(columns[:, 0], columns[:, 1])
