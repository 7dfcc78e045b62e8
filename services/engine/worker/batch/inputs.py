"""Builds the flat arrays of a forward pass from a plan and the state table.

    query_start_loc [S + 1]      index of each sequence's first token in the step
    ids, positions [num_tokens]  the step's tokens and their positions in their sequences
    seq_lens [S]                 number of tokens of each sequence that have KV after the step
    logit_tokens [R + M]         indices of the tokens whose logits are needed. After the first R, a token is sampled:
                                 for each sequence that samples, they are its last known token and its draft tokens,
                                 if it has any. The other M are those of `report`: log probabilities of prompts
    rows, offsets [R]            for each of the first R tokens, the row of its sequence, and the number of draft tokens
                                 up to it (0 for the last known token)

Plain index arithmetic over whole arrays, on the CPU. Called by the workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.kernels.paged_attention import Spans
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from antiphon.services.engine.worker.batch.pooling import NO_SPANS
from antiphon.services.engine.worker.batch.prompt_logprobs import PromptReport, report_of
from antiphon.services.engine.worker.batch.state_table import StateTable

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """The virtual tokens of a step, whose embeddings come from a prompt adapter or from images.

    `tokens` [n]: their indices in the step. `rows` [n]: the rows of their sequences. `indices` [n]: index of each token
    in the embeddings of its row's prompt adapter or images.
    """

    tokens: Integers
    rows: Integers
    indices: Integers


class FlatStep(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays of a step, see the module.

    `block_tables` [groups, S, blocks of the longest sequence]: those of the S sequences (`StateTable.tables`).
    """

    ids: Integers
    positions: Integers
    query_start_loc: Integers
    seq_lens: Integers
    block_tables: Integers
    logit_tokens: Integers
    rows: Integers
    offsets: Integers
    has_draft_tokens: bool = False
    """Whether any sequence computes draft tokens."""
    report: PromptReport | None = None
    """The log probabilities of prompts that the step reports."""
    spans: Integers = msgspec.field(default_factory=lambda: NO_SPANS)
    """See `PoolingRows.spans`."""
    token_slots: Integers | None = None
    """The adapter slot of each token, -1 for none; None if no token of the step has an adapter."""
    virtual: VirtualTokens | None = None
    """The virtual tokens, whose `ids` are 0; None if there are none."""
    spatial: Integers | None = None
    """Positions for rotation in time, row and column, [3, num_tokens], of a step with images; None: `positions`."""
    states: StateMoves | None = None
    """The slots of recurrent states that the sequences read and write; None in a model without such states."""
    mutual: Sequence[Spans] | None = None
    """For each sequence the images whose tokens attend to each other; None: no sequence has any."""

    def slot_mapping(self, block_size: int) -> Integers:
        """Returns the KV slots of each token, [groups, num_tokens]: block id * block_size + offset in the block."""
        owner = np.repeat(np.arange(len(self.seq_lens)), np.diff(self.query_start_loc))
        blocks, places = np.divmod(self.positions, block_size)
        return np.ascontiguousarray(self.block_tables[:, owner, blocks]) * block_size + places


def flatten(plan: StepPlan, table: StateTable, block_size: int) -> FlatStep:
    """Returns the arrays of a plan that the table has already applied and that schedules at least one sequence."""
    if plan.num_tokens == len(plan.scheduled) and all(s.samples and not s.draft_token_ids for s in plan.scheduled):
        return _flatten_decode(plan, table, block_size)
    columns = [(s.row, s.start, s.num_tokens, s.samples + len(s.draft_token_ids)) for s in plan.scheduled]
    rows, starts, counts, samples = np.array(columns, dtype=np.int64).T
    num_draft_tokens = np.maximum(samples - 1, 0)
    query_start_loc = np.concatenate(([0], counts.cumsum()))
    seq_lens = starts + counts
    assert (counts > 0).all(), "a scheduled sequence without tokens"
    assert (seq_lens <= table.num_tokens[rows] + num_draft_tokens).all(), "a plan runs past the known tokens"
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(len(owner)) + (starts - query_start_loc[:-1])[owner]
    offsets = np.arange(samples.sum()) - np.repeat(samples.cumsum() - samples, samples)
    report = report_of(plan, table, query_start_loc[:-1]) if plan.num_prompt_logprobs else None
    logit_tokens = np.repeat(query_start_loc[1:] - samples, samples) + offsets
    slots = table.slots_of(rows)
    ids = table.token_ids[rows[owner], positions].astype(np.int64)
    virtual = take_virtual(ids, rows[owner], table)
    return FlatStep(
        ids=ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=table.tables_of(rows, -(-int(seq_lens.max()) // block_size)),
        logit_tokens=logit_tokens if report is None else np.concatenate((logit_tokens, report.tokens)),
        rows=np.repeat(rows, samples),
        offsets=offsets,
        has_draft_tokens=bool(num_draft_tokens.any()),
        report=report,
        token_slots=None if slots is None else slots[owner],
        virtual=virtual,
        states=state_moves(plan, query_start_loc),
    )


def _flatten_decode(plan: StepPlan, table: StateTable, block_size: int) -> FlatStep:
    """Like `flatten`, in fewer array operations, for steps in which each sequence computes one token and samples one.

    The time depends on the number of array operations, not of sequences, because each operation's code has been evicted
    from the CPU's caches since the previous step.
    """
    count = len(plan.scheduled)
    rows = np.array([s.row for s in plan.scheduled], dtype=np.int64)
    starts = [s.start for s in plan.scheduled]
    positions = np.array(starts, dtype=np.int64)
    seq_lens = positions + 1
    assert (seq_lens <= table.num_tokens[rows]).all(), "a plan runs past the known tokens"
    ids = table.token_ids[rows, positions].astype(np.int64)
    # The only token to compute may be an image's: the last one of a prompt whose other tokens were in the cache.
    virtual = take_virtual(ids, rows, table)
    return FlatStep(
        ids=ids,
        positions=positions,
        query_start_loc=table.counting[: count + 1],
        seq_lens=seq_lens,
        block_tables=table.tables_of(rows, max(starts) // block_size + 1),
        logit_tokens=table.counting[:count],
        rows=rows,
        offsets=table.zeros[:count],
        token_slots=table.slots_of(rows),
        virtual=virtual,
        states=state_moves(plan, table.counting[: count + 1]),
    )


def state_moves(plan: StepPlan, query_start_loc: Integers) -> StateMoves | None:
    """Returns the slots of recurrent states of a plan's sequences; None in a model without such states."""
    if not plan.scheduled[0].states:
        return None
    counts = [len(share.states) for share in plan.scheduled]
    writes = [(end, slot) for share in plan.scheduled for end, slot in share.states]
    ends, slots = np.array(writes, dtype=np.int64).T
    return StateMoves(
        query_start_loc=query_start_loc,
        sources=np.array([share.state for share in plan.scheduled], dtype=np.int64),
        starts=np.concatenate(([0], np.cumsum(counts))),
        ends=np.repeat(query_start_loc[:-1], counts) + ends,
        slots=np.ascontiguousarray(slots),
    )


def take_virtual(ids: Integers, rows: Integers, table: StateTable) -> VirtualTokens | None:
    """Returns the virtual tokens of a step, and sets their `ids` to 0. `rows` [num_tokens]: the row of each token."""
    places = table.virtual_tokens(ids)
    if places is None:
        return None
    virtual = VirtualTokens(places, rows[places], ids[places] - table.vocab_size)
    ids[places] = 0
    return virtual
