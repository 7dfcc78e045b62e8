"""The draft pass of a step: after the step's tokens are sampled, the draft layer predicts the tokens that follow.

The draft layer's entry of a token is computed from the token's hidden state and the embedding of the token after it:
the next token of the prompt, or the one that was just sampled. It has a layer of the KV cache, with the blocks and
slots of the model's layers, so that cached prefixes, swapped and copied blocks have its entries too. An entry at the
end of a block depends on a token outside of it. This, and entries that are missing because steps ran without the draft
pass, change what is predicted, never what is sampled.

    first pass      the step's tokens of the sequences that take part (`ScheduledSequence.num_drafts`); what it gives
                    after the last token of a sequence is its first draft
    further passes  one token for each sequence, its latest draft, whose hidden state is that of the pass before; as
                    long as the sequence's blocks have room for its entry

The backends compute the passes (`RunPass`); this module has the index arithmetic. Called by the workers.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import ScheduledSequence, StepPlan, StepResult
from antiphon.services.engine.worker.batch.inputs import FlatStep, take_virtual
from antiphon.services.engine.worker.batch.state_table import StateTable

Integers = NDArray[np.int64]
RunPass = Callable[[FlatStep, Integers], Integers]
"""Computes the draft layer for the tokens of a step, whose `ids` are those after them. The second argument [num_tokens]
has for each the row of its hidden state among those that the pass before has kept: the model all tokens of the step,
the draft layer its `logit_tokens`. Returns the most likely token after each of the `logit_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The sequences of a step that predict: arrays of the same length."""

    samples: Integers
    """The place of each among the sequences that sample."""
    rows: Integers
    counts: Integers
    """How many drafts are wanted."""
    last: Integers
    """Position of the last token whose hidden state is known."""


def predicted(
    plan: StepPlan, step: FlatStep, result: StepResult, table: StateTable, block_size: int, run: RunPass
) -> StepResult:
    """Returns the result with the draft tokens. `result` must have been applied to the table."""
    started_s = time.perf_counter()
    shares = [(index, share) for index, share in enumerate(plan.scheduled) if share.num_drafts >= 0]
    rows = _predicting(plan, result, table)
    first, sources = _first_pass(shares, step, rows, table, block_size)
    drafts: list[list[int]] = [[] for _ in result.token_ids]
    ids, places = run(first, sources), np.arange(len(rows.rows))
    for number in range(1, int(rows.counts.max(initial=0)) + 1):
        for place, token in zip(rows.samples[places].tolist(), ids.tolist(), strict=True):
            drafts[place].append(token)
        positions = rows.last[places] + number
        has_room = positions < np.minimum(table.num_blocks[rows.rows[places]] * block_size, table.max_model_len)
        goes_on = np.flatnonzero((rows.counts[places] > number) & has_room)
        if not len(goes_on):
            break
        places = places[goes_on]
        ids = run(_further_pass(first, rows, places, positions[goes_on], ids[goes_on], table, block_size), goes_on)
    return replace(result, draft_token_ids=tuple(map(tuple, drafts)), draft_s=time.perf_counter() - started_s)


def _predicting(plan: StepPlan, result: StepResult, table: StateTable) -> _Rows:
    failed = {index for index, _ in result.failed}
    samples = [share for share in plan.scheduled if share.samples]
    found = [
        (index, share.row, share.num_drafts, int(table.num_tokens[share.row]) - 2)
        for index, share in enumerate(samples)
        if share.num_drafts > 0 and result.token_ids[index] and index not in failed and _has_next(share, table)
    ]
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return _Rows(samples=columns[0], rows=columns[1], counts=columns[2], last=columns[3])


def _has_next(share: ScheduledSequence, table: StateTable) -> bool:
    """Whether the row has the token after the last one that was computed; a full row has not."""
    last = int(table.num_tokens[share.row]) - 2
    return share.start <= last < share.start + share.num_tokens


def _first_pass(
    shares: list[tuple[int, ScheduledSequence]], step: FlatStep, rows: _Rows, table: StateTable, block_size: int
) -> tuple[FlatStep, Integers]:
    """Returns the first pass and, for each of its tokens, the token's index in the step."""
    indices, owners, starts, counts = np.array(
        [(index, share.row, share.start, share.num_tokens) for index, share in shares], dtype=np.int64
    ).T
    query_start_loc = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(shares)), counts)
    inside = np.arange(len(owner)) - query_start_loc[owner]
    sources, positions = step.query_start_loc[indices][owner] + inside, starts[owner] + inside
    known = positions + 1 < table.num_tokens[owners[owner]]
    # The token after a rejected draft, or after the last token of a row that waits for its mask, is not known. Its
    # entry is computed again.
    ids = np.where(known, table.token_ids[owners[owner], positions + 1].astype(np.int64), 0)
    place_of = {row: place for place, row in enumerate(owners.tolist())}
    of_rows = np.array([place_of[row] for row in rows.rows.tolist()], dtype=np.int64)
    logit_tokens = query_start_loc[:-1][of_rows] + rows.last - starts[of_rows]
    seq_lens = starts + counts
    flat = FlatStep(
        ids=ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=table.tables_of(owners, -(-int(seq_lens.max()) // block_size)),
        logit_tokens=logit_tokens,
        rows=rows.rows,
        offsets=np.zeros(len(rows.rows), dtype=np.int64),
        virtual=take_virtual(ids, owners[owner], table),
        spatial=None if step.spatial is None else step.spatial[:, sources],
    )
    return flat, sources


def _further_pass(
    first: FlatStep,
    rows: _Rows,
    places: Integers,
    positions: Integers,
    ids: Integers,
    table: StateTable,
    block_size: int,
) -> FlatStep:
    """Returns a pass of the latest drafts `ids`, at these positions of the rows at `places`."""
    count, owners = len(places), rows.rows[places]
    spatial = None
    if first.spatial is not None:
        spatial = first.spatial[:, first.logit_tokens[places]] + (positions - rows.last[places])
    return FlatStep(
        ids=ids,
        positions=positions,
        query_start_loc=np.arange(count + 1),
        seq_lens=positions + 1,
        block_tables=table.tables_of(owners, int(positions.max()) // block_size + 1),
        logit_tokens=np.arange(count),
        rows=owners,
        offsets=np.zeros(count, dtype=np.int64),
        spatial=spatial,
    )
