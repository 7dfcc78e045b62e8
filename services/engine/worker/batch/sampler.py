"""Samples tokens from logits: defines the order of the operations and the rows that need each of them.

    log probabilities   all rows: from the model's logits, before any adjustment
    biases              rows with `logit_bias`
    penalties           rows that have penalties
    masks               rows with forbidden tokens: the logits of these become -inf (see `services/engine/sampling`)
    greedy rows         the most likely token
    other rows          temperature, filters of candidates, one draw (see `kernels/sampling.py`)

The random generator has no state: the draw for a token is a function of the request's seed and the token's index in the
output. Called by the workers.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.core.plan import SampledLogprobs, StepResult
from antiphon.services.engine.kernels import sampling as kernels
from antiphon.services.engine.kernels.philox import uniforms
from antiphon.services.engine.kernels.sampling import GREEDY_BELOW, SamplingColumns
from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.shared.messages import PromptLogprobs

Integers = NDArray[np.int64]

SLICE_BYTES = 4 * 2**20
"""Bytes of logits processed at once on a CPU, so that they stay in its cache between operations."""


def penalty_bytes(vocab_size: int) -> int:
    """Returns the main memory, in bytes, of one row in `PenaltyCounts`."""
    return vocab_size * (np.dtype(np.int32).itemsize + np.dtype(np.bool_).itemsize)


class PenaltyCounts:
    """For each row with penalties, how often each token is in the output, and which tokens are in the prompt."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        # The system allocates zeroed pages only when a row with penalties writes them.
        self._counts = np.zeros((max_num_seqs, vocab_size), dtype=np.int32)
        self._in_prompt = np.zeros((max_num_seqs, vocab_size), dtype=np.bool_)

    def reset(self, row: int, prompt: Integers, output: Integers) -> None:
        """Sets a row to the prompt and output of a new sequence."""
        self._in_prompt[row] = False
        self._in_prompt[row, prompt] = True
        self._counts[row] = np.bincount(output, minlength=self._counts.shape[1])

    def count(self, rows: Integers, token_ids: Integers) -> None:
        """Counts one more output token for each of the rows, which must be distinct."""
        self._counts[rows, token_ids] += 1

    def rows(self, rows: Integers) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the counts and the prompt membership, [len(rows), vocab] each."""
        return self._counts[rows], self._in_prompt[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of the S rows to sample; see `SamplingParams`."""

    columns: SamplingColumns[NDArray[Any]]
    output_positions: Integers
    """Index in the output of the token to sample."""
    num_logprobs: Integers
    """Number of top candidates to report; 0 if the request asked for none."""
    penalised: Integers
    """Indices of the rows with penalties."""
    penalty_counts: tuple[NDArray[np.int32], NDArray[np.bool_]]
    """Parallel to `penalised`, or empty."""
    adjusted: Integers
    """Indices of the rows with logits processors, ascending."""
    adjustments: Mapping[int, Adjustment] = field(default_factory=dict[int, Adjustment])
    """Index of each row in `adjusted` → its adjustment. Empty until `StateTable.with_adjustments`."""

    @property
    def waiting(self) -> frozenset[int]:
        """Returns the indices of the rows from which nothing can be sampled yet (`Adjustment.waits`)."""
        return frozenset(row for row, adjustment in self.adjustments.items() if adjustment.waits)

    def take(self, rows: Integers) -> "SamplingBatch":
        """Returns a batch of some rows, given in ascending order. They must include every penalised or adjusted row."""
        return dataclasses.replace(
            self,
            columns=self.columns.map(lambda column: column[rows]),
            output_positions=self.output_positions[rows],
            num_logprobs=self.num_logprobs[rows],
            penalised=np.searchsorted(rows, self.penalised),
            adjusted=np.searchsorted(rows, self.adjusted),
            adjustments={int(np.searchsorted(rows, row)): each for row, each in self.adjustments.items()},
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [S] and the log probabilities to report for each.

    `errors`: index of each row that must end without a token → the message for the user. `waiting`: the indices of the
    rows that wait for their mask, whose tokens are not to be used. If there are any, `acceptance` makes the result.
    """

    token_ids: Integers
    logprobs: tuple[SampledLogprobs, ...]
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    waiting: frozenset[int] = frozenset()

    def result(self, step: int, prompt_logprobs: tuple[PromptLogprobs, ...] = ()) -> StepResult:
        """Returns the result of a step without draft tokens, in which every row gives one token."""
        tokens = tuple((token,) for token in self.token_ids.tolist())
        logprobs = tuple((one,) for one in self.logprobs)
        return StepResult(
            step=step,
            token_ids=tokens,
            logprobs=logprobs,
            failed=tuple(self.errors.items()),
            prompt_logprobs=prompt_logprobs,
        )


NOTHING_SAMPLED = Sampled(np.zeros(0, dtype=np.int64), ())
"""The result of a step in which no sequence samples."""


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Samples one token from each row of `logits` [S, vocab] float32, which is not modified."""
    adjusted = _adjust(logits, batch)
    best = _argmax(adjusted)
    tokens = best.clone()
    for rows in _slices(np.flatnonzero(batch.columns.temperature >= GREEDY_BELOW), logits):
        tokens[torch.from_numpy(rows).to(logits.device)] = _draw(adjusted, batch, rows)
    return Sampled(tokens.cpu().numpy(), _report(logits, tokens, batch), errors_of(batch), batch.waiting)


def errors_of(batch: SamplingBatch) -> dict[int, str]:
    """Returns the errors of the batch's adjustments by index of the row."""
    return {row: adjustment.error for row, adjustment in batch.adjustments.items() if adjustment.error}


def _adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the logits after biases, penalties and masks; the same tensor if no row has any."""
    if not len(batch.penalised) and not batch.adjustments:
        return logits
    adjusted = logits.clone()
    add_biases(adjusted, batch)
    if len(batch.penalised):
        _penalise(adjusted, batch)
    _forbid(adjusted, batch)
    return adjusted


def _forbid(logits: Tensor, batch: SamplingBatch) -> None:
    """Sets the logits that the masks forbid to -inf, in place. On a CPU NumPy is faster than torch."""
    # A row with an error gets no token; its mask, which may forbid all tokens, is not applied.
    found = {row: one.mask for row, one in batch.adjustments.items() if one.mask is not None and not one.error}
    for rows in _slices(np.fromiter(found, dtype=np.int64, count=len(found)), logits):
        chosen = np.stack([found[row] for row in rows.tolist()])
        if logits.device.type != "cpu":
            forbidden = torch.from_numpy(masks.forbidden(chosen, logits.shape[1])).to(logits.device)
            places = torch.from_numpy(rows).to(logits.device)
            logits[places] = logits[places].masked_fill_(forbidden, float("-inf"))
            continue
        values, greatest = logits.numpy(), masks.greatest_logits(chosen, logits.shape[1])
        # Consecutive rows, which are the usual case, are changed in place.
        consecutive = rows[-1] - rows[0] + 1 == len(rows)
        target = values[rows[0] : rows[-1] + 1] if consecutive else values[rows]
        np.minimum(target, greatest, out=target)
        if not consecutive:
            values[rows] = target


def add_biases(logits: Tensor, batch: SamplingBatch) -> None:
    """Adds the `logit_bias` of each row, in place."""
    for row, adjustment in batch.adjustments.items():
        for token_ids, values in adjustment.biases:
            places = torch.from_numpy(token_ids).to(logits.device)
            logits[row].index_add_(0, places, torch.from_numpy(values).to(logits.device, logits.dtype))


def _penalise(adjusted: Tensor, batch: SamplingBatch) -> None:
    columns = (batch.columns.repetition, batch.columns.frequency, batch.columns.presence)
    for members in _slices(np.arange(len(batch.penalised)), adjusted):
        rows = batch.penalised[members]
        ours = (*(counts[members] for counts in batch.penalty_counts), *(column[rows] for column in columns))
        places, *values = (torch.from_numpy(one).to(adjusted.device) for one in (rows, *ours))
        adjusted[places] = kernels.apply_penalties(adjusted[places], *values)


def _argmax(logits: Tensor) -> Tensor:
    """Returns the index of the first maximum of each row, [S]. On a CPU NumPy is many times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: Tensor, batch: SamplingBatch, rows: Integers) -> Tensor:
    """Returns one drawn token for each of `rows`, which are not greedy."""
    columns = batch.columns.map(lambda column: torch.from_numpy(column[rows]).to(logits.device))
    chosen = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
    weights = kernels.relative_weights(chosen, columns.temperature)
    threshold = kernels.candidate_threshold(weights, columns)
    draws = uniforms(batch.columns.seeds[rows].view(np.uint64), batch.output_positions[rows])
    return kernels.draw(weights, threshold, torch.from_numpy(draws).to(logits.device))


def _slices(rows: Integers, logits: Tensor) -> list[Integers]:
    """Returns the rows in portions of at most `SLICE_BYTES` of logits on a CPU, as one portion on other devices."""
    if not len(rows):
        return []
    portion = max(1, SLICE_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(rows)
    return [rows[first : first + portion] for first in range(0, len(rows), portion)]


def _report(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> tuple[SampledLogprobs, ...]:
    """Returns log probabilities under the model's own distribution, before penalties and other adjustments."""
    everything = np.arange(len(logits))
    norms = torch.cat([logits[rows[0] : rows[-1] + 1].logsumexp(dim=-1) for rows in _slices(everything, logits)])
    chosen = (logits.gather(1, tokens[:, None]).squeeze(1) - norms).tolist()
    reports = [SampledLogprobs(logprob) for logprob in chosen]
    for asking in _slices(np.flatnonzero(batch.num_logprobs), logits):
        rows = torch.from_numpy(asking).to(logits.device)
        width = min(int(batch.num_logprobs.max()), logits.shape[1])
        values, token_ids = logits[rows].topk(width, dim=-1)
        values -= norms[rows, None]
        for row, ids, logprobs in zip(asking.tolist(), token_ids.tolist(), values.tolist(), strict=True):
            count = int(batch.num_logprobs[row])
            reports[row] = SampledLogprobs(chosen[row], tuple(ids[:count]), tuple(logprobs[:count]))
    return tuple(reports)
