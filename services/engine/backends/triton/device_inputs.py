"""Builds the inputs of the GPU kernels from a plan and the state table: flat arrays and the attention's work lists.

    ids, positions [num_tokens]   the step's tokens and their positions in their sequences
    sources [num_tokens]          row whose last sampled token, kept on the device, replaces the id, because the host
                                  does not know the token yet; -1: the id from the host is right
    slots [groups, num_tokens]    KV slot of each token in each group of layers (`DecoderDescription.kv_groups`), -1 for
                                  the padding of a captured graph
    logit_tokens, rows, offsets   as in `inputs`, with the tokens of `report` after the sampled ones
    rotary [num_tokens]           positions for rotation, which differ from `positions` behind an image (`images`), or
                                  [3, num_tokens] if the tokens of an image are among them

Computes indices on the host and puts the arrays into the staging buffer. Called by the GPU worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from antiphon.services.engine.backends.triton.graph_sizes import GraphSize
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import (
    DeviceWork,
    Integers,
    Sequences,
    WorkKinds,
    plan_work,
)
from antiphon.services.engine.backends.triton.kernels.lora import TILE_ROWS, LoraTiles, most_tiles, put_tiles
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import (
    NO_MOVES,
    DeviceMoves,
    moves_words,
    put_moves,
)
from antiphon.services.engine.backends.triton.kernels.step_inputs import scatter_words
from antiphon.services.engine.backends.triton.staging import Staging, aligned
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.kernels.paged_attention import Spans
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from antiphon.services.engine.kernels.splits import SPLIT_TOKENS, splits_of
from antiphon.services.engine.models.layers.given import GivenEmbeddings
from antiphon.services.engine.worker.batch.given import GivenRows
from antiphon.services.engine.worker.batch.inputs import VirtualTokens, state_moves, take_virtual
from antiphon.services.engine.worker.batch.prompt_logprobs import PromptReport, report_of
from antiphon.services.engine.worker.batch.state_table import StateTable


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """The arrays of a step on the host, see the module."""

    ids: Integers
    sources: Integers
    positions: Integers
    rotary: Integers
    slots: Integers
    sequences: Sequences
    logit_tokens: Integers
    rows: Integers
    offsets: Integers
    report: PromptReport | None = None
    token_slots: Integers | None = None
    """The adapter slot of each token, -1 for none; None if no token of the step has an adapter."""
    states: StateMoves | None = None
    """See `FlatStep.states`."""
    virtual: VirtualTokens | None = None
    """See `FlatStep.virtual`."""
    given: GivenEmbeddings | None = None
    """See `StepInputs.given`."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes exactly one token and samples the next one."""
        return len(self.ids) == len(self.sequences.rows) == len(self.rows)

    @property
    def is_eager(self) -> bool:
        """Whether the step has tokens of images or prompt adapters, which no graph computes."""
        return self.given is not None or self.rotary.ndim > 1 or self.sequences.horizons is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """The arrays of a step on the device. `logit_tokens` is None if logits of all tokens are computed.

    `positions`: those for rotation. `attention`: the work lists of each layer. `reported_ids`: the prompt tokens whose
    log probabilities are reported; None if there are none.
    """

    ids: Tensor
    sources: Tensor
    positions: Tensor
    slots: Tensor
    attention: Mapping[int, DeviceWork]
    logit_tokens: Tensor | None
    reported_ids: Tensor | None
    adapters: LoraTiles | None = None
    """The tokens with adapters; None if no token of the step has one."""
    states: DeviceMoves | None = None
    """The slots of recurrent states; None in a model without such states."""
    given: GivenEmbeddings | None = None
    """See `StepInputs.given`."""


def flatten_for_device(plan: StepPlan, table: StateTable, num_known: Integers, block_size: int) -> HostStep:
    """Returns the step of a plan that the table has applied. `num_known` [rows]: number of tokens the host knows."""
    columns = [(s.row, s.start, s.num_tokens, s.samples + len(s.draft_token_ids)) for s in plan.scheduled]
    rows, starts, counts, samples = np.array(columns, dtype=np.int64).T
    query_starts = counts.cumsum() - counts
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(len(owner)) + (starts - query_starts)[owner]
    owners = rows[owner]
    blocks = table.tables[:, owners, positions // block_size].astype(np.int64)
    offsets = np.arange(samples.sum()) - np.repeat(samples.cumsum() - samples, samples)
    known = positions < num_known[owners]
    report = report_of(plan, table, query_starts) if plan.num_prompt_logprobs else None
    logit_tokens = np.repeat(query_starts + counts - samples, samples) + offsets
    adapter_slots = table.slots_of(rows)
    ids = table.token_ids[owners, positions].astype(np.int64)
    virtual = take_virtual(ids, owners, table)
    return HostStep(
        ids=ids,
        sources=np.where(known, -1, owners),
        positions=positions,
        rotary=positions,
        slots=blocks * block_size + positions % block_size,
        sequences=Sequences(rows, starts + counts, query_starts, counts),
        logit_tokens=logit_tokens if report is None else np.concatenate((logit_tokens, report.tokens)),
        rows=np.repeat(rows, samples),
        offsets=offsets,
        report=report,
        token_slots=None if adapter_slots is None else adapter_slots[owner],
        states=state_moves(plan, np.append(query_starts, len(owner))),
        virtual=virtual,
    )


def with_given(step: HostStep, plan: StepPlan, given: GivenRows) -> HostStep:
    """Returns a plan's step with what its rows' images and prompt adapters give and change."""
    rotary = given.positions(plan, step.positions, step.sequences.query_starts)
    spans, sequences = given.spans(plan), step.sequences
    if rotary is None and step.virtual is None and spans is None:
        return step
    rotary = step.rotary if rotary is None else rotary
    if rotary.ndim > 1 and (rotary == rotary[0]).all():
        # Behind an image a token has one position, as it is in steps of graphs.
        rotary = rotary[0]
    horizons = None if spans is None else _horizons(step, spans)
    if horizons is not None and (horizons > step.positions).any():
        sequences = replace(sequences, horizons=horizons)
    return replace(step, rotary=rotary, sequences=sequences, given=given.embeddings(step.virtual))


def _horizons(step: HostStep, spans: Sequence[Spans]) -> Integers:
    """Returns the position of the last token that each token sees. `spans`: images of each sequence."""
    horizons, sequences = step.positions.copy(), step.sequences
    for index, first in enumerate(sequences.query_starts.tolist()):
        own = horizons[first : first + sequences.query_lens[index]]
        for start, end in spans[index]:
            assert end <= sequences.seq_lens[index] or start >= sequences.seq_lens[index], "a step cuts an image"
            own[(own >= start) & (own < end)] = end - 1
    return horizons


def empty_step(has_states: bool, num_groups: int) -> HostStep:
    """Returns a step without sequences, for the capture of graphs. `has_states`: of a model with recurrent states."""
    none = np.zeros(0, dtype=np.int64)
    return HostStep(
        ids=none,
        sources=none,
        positions=none,
        rotary=none,
        slots=np.zeros((num_groups, 0), dtype=np.int64),
        sequences=Sequences(none, none, none, none),
        logit_tokens=none,
        rows=none,
        offsets=none,
        states=NO_MOVES if has_states else None,
    )


def place(
    step: HostStep,
    tables: Tensor,
    kinds: WorkKinds,
    staging: Staging,
    graph: GraphSize | None = None,
) -> DeviceStep:
    """Puts a step's arrays into the staging buffer, padded to the size of the graph that will run it, if any.

    `tables`: see `send`.
    """
    count = len(step.ids) if graph is None else graph.num_tokens
    missing = count - len(step.ids)

    def padded(values: Integers, filling: int) -> Integers:
        return np.concatenate((values, np.full(missing, filling))) if missing else values

    ids, sources = staging.put(padded(step.ids, 0)), staging.put(padded(step.sources, -1))

    def rows(values: Integers, filling: int) -> Tensor:
        out = np.full((len(values), aligned(count)), filling)
        out[:, : len(step.ids)] = values
        return staging.put(out.ravel()).view(out.shape)[:, :count]

    positions = rows(step.rotary, 0) if step.rotary.ndim > 1 else staging.put(padded(step.rotary, 0))
    placed_slots = rows(step.slots, -1)
    adapters, max_tiles = None, 0 if graph is None else graph.max_tiles
    if step.token_slots is not None or max_tiles:
        row_slots = step.token_slots if step.token_slots is not None else np.zeros(0, dtype=np.int64)
        adapters = put_tiles(row_slots, staging.put, max_tiles)
    attention, group_tables = dict[int, DeviceWork](), tables.unbind()
    for (window, heads), groups in kinds.items():
        room = None if graph is None else graph.room(heads)
        work = plan_work(step.sequences, group_tables[0], window, heads, staging.put, room, staging.put_any)
        for group, layers in groups.items():
            attention |= dict.fromkeys(layers, replace(work, tables=group_tables[group]))
    states = None
    if step.states is not None:
        sizes = () if graph is None else (graph.num_seqs, 0 if graph.is_decode else graph.num_tokens)
        states = put_moves(step.states, staging.put, *sizes)
    # What follows is not read by graphs, so its addresses may differ from step to step.
    every = len(step.logit_tokens) == len(step.ids) and step.report is None
    padded_hidden = graph is not None and not graph.is_decode
    logit_tokens = None if every and not padded_hidden else staging.put(step.logit_tokens)
    reported_ids = None if step.report is None else staging.put(step.report.token_ids, dtype=np.int64)
    return DeviceStep(
        ids=ids,
        sources=sources,
        positions=positions,
        slots=placed_slots,
        attention=attention,
        logit_tokens=logit_tokens,
        reported_ids=reported_ids,
        adapters=adapters,
        states=states,
        given=step.given,
    )


def send(plan: StepPlan, table: StateTable, tables: Tensor, staging: Staging) -> None:
    """Copies the staged arrays of a step to the device, and writes a plan's new block ids into the tables there.

    `tables` [groups, rows, blocks]: the block table of each row in each group of layers, on the device.
    """
    (num_groups, rows, width), places, words = tables.shape, list[int](), list[int]()

    def write(row: int, num_blocks: int, block_ids: tuple[int, ...], window_ids: tuple[int, ...]) -> None:
        further = (window_ids[first :: num_groups - 1] for first in range(num_groups - 1))
        for group, ids in enumerate((block_ids, *further)):
            end = (group * rows + row) * width + num_blocks
            places.extend(range(end - len(ids), end))
            words.extend(ids)

    for sequence in plan.new:
        write(sequence.row, len(sequence.block_ids), sequence.block_ids, sequence.window_ids)
    for share in plan.scheduled:
        if share.new_block_ids:
            write(share.row, int(table.num_blocks[share.row]), share.new_block_ids, share.new_window_ids)
    if not places:
        staging.upload()
        return
    staged = [staging.put_any(np.array(values, dtype=np.int32)) for values in (places, words)]
    staging.upload()
    scatter_words(tables, staged[0], staged[1])


def staging_bytes(
    max_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_kinds: int,
    block_size: int,
    num_slots: int = 0,
    *,
    has_states: bool = False,
    num_groups: int = 1,
    takes_images: bool = False,
) -> int:
    """Returns the staging bytes that the largest step needs: these arrays, the sampler's parameters, new block ids.

    `num_kinds`: number of kinds of layers. `num_slots`: number of adapter slots. `has_states`: whether the model has
    recurrent states. `num_groups`: number of groups of layers. `takes_images`: whether steps may have images.
    """
    items = max_num_seqs * int(splits_of(np.array([max_model_len]), SPLIT_TOKENS)[0])
    words = 30 * max_tokens + num_kinds * (items + 2 * max_tokens + 10 * max_num_seqs) + 40 * max_num_seqs
    words += (TILE_ROWS + 1) * most_tiles(max_tokens, num_slots) if num_slots else 0
    words += moves_words(max_tokens, max_num_seqs) if has_states else 0
    words += (num_groups - 1) * max_tokens
    # Two more positions of each token, and its horizon in the layers of each kind.
    words += (2 + num_kinds) * max_tokens if takes_images else 0
    return 4 * (words + num_groups * (4 * max_num_seqs + max_tokens // block_size)) + 64 * 64
