"""The worker's state table: one row (batch slot) for each running sequence.

A sequence keeps its row from the plan that adds it until the plan that frees the row. Each property is an array indexed
by row, so that a step gathers its inputs with one array of row numbers. The work for a decoding row does not grow with
its context. The worker appends sampled tokens to the rows itself, so the input of the next step is known before the
next plan arrives. The table makes no scheduling decisions; it applies plans. Called by the workers.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import NewSequence, StepPlan
from antiphon.services.engine.kernels.sampling import GREEDY_BELOW, new_columns, set_row
from antiphon.services.engine.sampling.grammar import GrammarProcessor
from antiphon.services.engine.sampling.processor import Adjustment, LogitsProcessor
from antiphon.services.engine.sampling.processors import Grammars, processors_of
from antiphon.services.engine.worker.batch.mask_turns import MaskTurns, SequenceMasks
from antiphon.services.engine.worker.batch.sampler import PenaltyCounts, SamplingBatch, penalty_bytes
from antiphon.shared.parameters.sampling import SamplingParams

Rows = NDArray[np.int64]
NOTHING_ALLOWED = "The parameters of this request together allow no token that could come next."
"""Error message if the masks of a sequence forbid all tokens."""


def table_bytes(max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> int:
    """Returns the main memory, in bytes, of a `StateTable` in which every row is full and has penalties."""
    tokens_and_blocks = 4 * (max_model_len + 1 + -(-max_model_len // block_size))
    return max_num_seqs * (tokens_and_blocks + penalty_bytes(vocab_size))


class StateTable:
    """The state of up to `max_num_seqs` running sequences, one row each."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        grammars: Grammars | None = None,
        mask_turns: MaskTurns | None = None,
        *,
        num_groups: int = 1,
    ) -> None:
        # The system allocates zeroed pages when they are first written, so a row takes memory as its sequence grows.
        # The last column holds the token sampled by the last step of a full row; no step reads it.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.tables = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        """The block tables of each group of layers (`DecoderDescription.kv_groups`)."""
        self.block_tables = self.tables[0]
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        """For a prompt whose log probabilities are reported: number of candidates to report with each of its tokens."""
        self.adapter_slots = np.full(max_num_seqs, -1, dtype=np.int64)
        """The slot of each row's adapter; -1: none."""
        self._num_adapted = 0
        """Number of rows (some may be free) whose last sequence has an adapter."""
        self._prefixed: set[int] = set()
        """Rows (some may be free) with virtual tokens: those of a prompt adapter or of images."""
        self._params = _RowParams(max_num_seqs)
        self.vocab_size = vocab_size
        self.counting, self.zeros = np.arange(max_num_seqs + 1), np.zeros(max_num_seqs, dtype=np.int64)
        """Constant arrays 0, 1, 2, … and 0, 0, 0, …; steps take slices of them and must not write to them."""
        self.max_model_len = max_model_len
        self._processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        """The logits processors of the rows that have any, by row."""
        self._grammars = grammars
        self._mask_turns = mask_turns or MaskTurns()
        self._eos_token_ids = eos_token_ids
        self._penalties = PenaltyCounts(max_num_seqs, vocab_size)

    def apply(self, plan: StepPlan) -> None:
        """Fills the rows of new sequences, extends block tables, writes draft tokens behind the known tokens.

        Freed rows keep their arrays, because a new sequence overwrites everything in its row.
        """
        for row in plan.freed_rows:
            self._processors.pop(row, None)
        for sequence in plan.new:
            self._fill(sequence)
        for share in plan.scheduled:
            if share.new_block_ids:
                self._add_blocks(share.row, share.new_block_ids, share.new_window_ids)
            if share.draft_token_ids:
                known = int(self.num_tokens[share.row])
                self.token_ids[share.row, known : known + len(share.draft_token_ids)] = share.draft_token_ids

    def append(self, rows: Rows, token_ids: NDArray[np.int64]) -> None:
        """Appends one sampled token to each of the rows and counts it for penalties. The rows must be distinct."""
        self.fill(rows, self._grow(rows), token_ids)
        penalised = self._params.penalised[rows]
        self._penalties.count(rows[penalised], token_ids[penalised])

    def reserve(self, rows: Rows) -> NDArray[np.int64]:
        """Reserves the position of the next token in each row, for a step that is still running.

        Returns the position in each row. The rows must be distinct. Until `fill` the position in `rows[i]` holds
        -1 - i, so that the next step can refer to token i of the running step.
        """
        places = self._grow(rows)
        self.token_ids[rows, places] = -1 - self.counting[: len(rows)]
        return places

    def fill(self, rows: Rows, places: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Writes the sampled tokens at reserved positions.

        Penalty counts are not updated: the C++ worker reserves only for rows without penalties, and the GPU worker
        keeps its counts on the device.
        """
        self.token_ids[rows, places] = token_ids
        if self._processors:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                for processor in self._processors.get(row, ()):
                    processor.append(token_id)

    def slots_of(self, rows: Rows) -> Rows | None:
        """Returns the adapter slot of each of the rows; None if none of them has an adapter."""
        slots = self.adapter_slots[rows] if self._num_adapted else None
        return slots if slots is not None and bool((slots >= 0).any()) else None

    def virtual_tokens(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the indices of the virtual tokens among a step's tokens; None if there are none."""
        found = np.flatnonzero(ids >= self.vocab_size) if self._prefixed else None
        return found if found is not None and len(found) else None

    def tables_of(self, rows: Rows, num_blocks: int) -> NDArray[np.int64]:
        """Returns the first `num_blocks` columns of the rows' block tables, [groups, len(rows), num_blocks]."""
        return self.tables[:, rows, :num_blocks].astype(np.int64, "C")

    def needs_choice(self, rows: Rows) -> bool:
        """Whether any of the rows needs more than the most likely token and its log probability.

        True for rows with a temperature, penalties, logits processors or `logprobs`.
        """
        return bool(self._params.chooses[rows].any())

    def needs_tokens(self, rows: Rows) -> bool:
        """Whether a processor of any row must know all earlier tokens before the next token can be sampled."""
        found = self._processors
        return bool(found) and any(each.needs_tokens for row in rows.tolist() for each in found.get(row, ()))

    def has_penalties(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns for each of the rows whether it has penalties."""
        return self._params.penalised[rows]

    def penalty_rows(self, rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the counts of output tokens and whether each token is in the prompt, [len(rows), vocab] each.

        The counts include tokens given to `append`, but not those given to `fill`.
        """
        return self._penalties.rows(rows)

    def sampling(self, rows: Rows, offsets: NDArray[np.int64], with_counts: bool = True) -> SamplingBatch:
        """Returns the sampling parameters of the rows, in their order, each after `offsets` draft tokens.

        A row may occur several times with different offsets. Without `with_counts` the penalty counts are empty.
        """
        params = self._params
        output_positions = self.num_tokens[rows] - self._num_prompt_tokens[rows] + offsets
        penalised = np.flatnonzero(params.penalised[rows])
        return SamplingBatch(
            columns=params.columns.map(lambda column: column[rows]),
            output_positions=output_positions,
            num_logprobs=params.num_logprobs[rows],
            penalised=penalised,
            penalty_counts=self._penalty_counts(*(x[penalised if with_counts else []] for x in (rows, offsets))),
            adjusted=np.flatnonzero(params.adjusted[rows]),
        )

    def with_adjustments(self, batch: SamplingBatch, rows: Rows, offsets: NDArray[np.int64]) -> SamplingBatch:
        """Returns the batch that `sampling` has made for the rows and offsets, with the adjustments of its rows.

        Earlier sampled tokens must have been appended if a processor of the row needs them. Masks of grammars that are
        not computed in time wait for the next step (`Adjustment.waits`).
        """
        if not len(batch.adjusted):
            return batch
        found: dict[int, Adjustment] = {}
        grammars: dict[int, SequenceMasks] = {}
        for place in batch.adjusted.tolist():
            row, offset = int(rows[place]), int(offsets[place])
            known = int(self.num_tokens[row])
            drafts = self.token_ids[row, known : known + offset].tolist()
            position = known - int(self._num_prompt_tokens[row]) + offset
            adjustment = found[place] = Adjustment()
            for processor in self._processors[row]:
                if isinstance(processor, GrammarProcessor):
                    if row not in grammars:
                        grammars[row] = SequenceMasks(processor)
                    grammars[row].places.append((place, position, drafts))
                else:
                    processor.adjust(adjustment, position, drafts)
        if grammars:
            self._mask_turns.compute(list(grammars.values()), found)
        for adjustment in found.values():
            if adjustment.mask is not None and not adjustment.error and not adjustment.mask.any():
                adjustment.error = NOTHING_ALLOWED
        return dataclasses.replace(batch, adjustments=found)

    def _penalty_counts(self, rows: Rows, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns counts and prompt membership [len(rows), vocab], with the first `offsets` draft tokens as output."""
        counts, in_prompt = self._penalties.rows(rows)
        for place in np.flatnonzero(offsets):
            known = int(self.num_tokens[rows[place]])
            np.add.at(counts[place], self.token_ids[rows[place], known : known + int(offsets[place])], 1)
        return counts, in_prompt

    def _fill(self, sequence: NewSequence) -> None:
        row, length = sequence.row, len(sequence.token_ids)
        self.token_ids[row, :length] = sequence.token_ids
        self.num_tokens[row] = length
        self._num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.num_prompt_logprobs[row] = sequence.params.prompt_logprobs or 0
        self.num_blocks[row] = 0
        self._num_adapted += (sequence.adapter_slot >= 0) - (int(self.adapter_slots[row]) >= 0)
        self.adapter_slots[row] = sequence.adapter_slot
        (self._prefixed.add if sequence.prompt_adapter or sequence.images else self._prefixed.discard)(row)
        self._number_images(sequence)
        self._add_blocks(row, sequence.block_ids, sequence.window_ids)
        self._params.set(row, sequence.params)
        self._set_processors(sequence)
        if self._params.penalised[row]:
            tokens = np.asarray(sequence.token_ids, dtype=np.int64)
            prompt, output = tokens[: sequence.num_prompt_tokens], tokens[sequence.num_prompt_tokens :]
            self._penalties.reset(row, prompt[prompt < self.vocab_size], output)

    def _number_images(self, sequence: NewSequence) -> None:
        """Assigns ids to the tokens of the prompt's images, in order, starting at the vocabulary's size."""
        first = self.vocab_size
        for image in sequence.images:
            places = np.delete(np.arange(image.start, image.start + image.num_tokens), image.plain)
            self.token_ids[sequence.row, places] = np.arange(first, first + len(places))
            first += len(places)

    def _grow(self, rows: Rows) -> NDArray[np.int64]:
        """Adds one token to each row that has less than `max_model_len`. Returns the positions of these tokens."""
        places = self.num_tokens[rows]
        self.num_tokens[rows] = np.minimum(places + 1, self.max_model_len)
        return places

    def _add_blocks(self, row: int, block_ids: Sequence[int], window_ids: Sequence[int]) -> None:
        first = int(self.num_blocks[row])
        end = self.num_blocks[row] = first + len(block_ids)
        self.block_tables[row, first:end] = block_ids
        if window_ids:
            columns = np.array(window_ids, dtype=np.int32).reshape(-1, len(self.tables) - 1)
            self.tables[1:, row, end - len(columns) : end] = columns.T

    def _set_processors(self, sequence: NewSequence) -> None:
        row, params, output = sequence.row, sequence.params, sequence.token_ids[sequence.num_prompt_tokens :]
        ends = sorted(params.effective_end_ids(self._eos_token_ids).union(params.stop_token_ids))
        found = processors_of(params, output, ends, self._eos_token_ids, self.vocab_size, self._grammars)
        self._params.adjusted[row] = bool(found)
        self._params.chooses[row] |= bool(found)
        if found:
            self._processors[row] = found


class _RowParams:
    """The sampling parameters of all rows, and what each row needs for them."""

    def __init__(self, max_num_seqs: int) -> None:
        self.columns = new_columns(max_num_seqs)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.penalised, self.adjusted, self.chooses = np.zeros((3, max_num_seqs), dtype=np.bool_)

    def set(self, row: int, params: SamplingParams) -> None:
        set_row(self.columns, row, params)
        self.num_logprobs[row] = params.logprobs or 0
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        penalised = self.penalised[row] = penalties != (1.0, 0.0, 0.0)
        self.chooses[row] = params.temperature >= GREEDY_BELOW or penalised or self.num_logprobs[row] > 0
