"""Samples tokens on the device, and keeps each row's last token and penalty counts there for the next step.

The order of the operations is that of `sampler`; the kernels are in `kernels/sampling`. The random generator has no
state. Called by the GPU worker: `stage` before a step's arrays are copied, `with_masks` and `choose` when its forward
pass has been launched.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Integers
from antiphon.services.engine.backends.triton.kernels.sampling import Adjustments, choose_tokens
from antiphon.services.engine.backends.triton.staging import Staging, sent
from antiphon.services.engine.core.plan import NewSequence, SampledLogprobs
from antiphon.services.engine.kernels.sampling import GREEDY_BELOW, SamplingColumns
from antiphon.services.engine.worker.batch.sampler import Sampled, SamplingBatch, add_biases, errors_of
from antiphon.services.engine.worker.batch.state_table import StateTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSampling:
    """A step's sampling parameters on the device. `rows` [n] int64; `penalised`: indices of rows with penalties."""

    batch: SamplingBatch
    columns: SamplingColumns[Tensor]
    positions: Tensor
    adjustments: Adjustments
    rows: Tensor
    penalised: Integers


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens [n] int64 and their log probabilities; `top`: (indices of rows, top token ids, log probabilities)."""

    tokens: Tensor
    logprobs: Tensor
    top: tuple[Integers, Tensor, Tensor] | None


class DeviceSampler:
    """The sampler and its state on the device, one row for each running sequence."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self.last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """The last sampled token of each row."""
        shape = (max_num_seqs, vocab_size)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(shape, dtype=torch.int8, device=device)
        self._everything = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)

    def join(self, sequences: tuple[NewSequence, ...], table: StateTable) -> None:
        """Copies the penalty counts of new sequences with penalties to the device."""
        joined = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        rows = joined[table.has_penalties(joined)]
        if len(rows):
            counts, in_prompt = table.penalty_rows(rows)
            places = sent(torch.from_numpy(rows), self._device)
            self._counts.index_copy_(0, places, sent(torch.from_numpy(counts), self._device))
            self._in_prompt.index_copy_(0, places, sent(torch.from_numpy(in_prompt.astype(np.int8)), self._device))

    def stage(self, batch: SamplingBatch, rows: Integers, staging: Staging) -> StagedSampling:
        """Puts the parameters of the rows to sample into the staging buffer, in their order, without adjustments."""
        penalty_rows = np.full(len(rows), -1)
        penalty_rows[batch.penalised] = rows[batch.penalised]
        put = staging.put
        columns = batch.columns.map(lambda column: put(column, dtype=column.dtype))
        adjustments = Adjustments(
            counts=self._counts,
            in_prompt=self._in_prompt,
            bitmask=self._everything,
            penalty_rows=put(penalty_rows),
            mask_rows=put(np.full(len(rows), -1)),
        )
        positions, places = put(batch.output_positions), put(rows, dtype=np.int64)
        return StagedSampling(
            batch=batch,
            columns=columns,
            positions=positions,
            adjustments=adjustments,
            rows=places,
            penalised=batch.penalised,
        )

    def with_masks(self, staged: StagedSampling, batch: SamplingBatch) -> StagedSampling:
        """Returns what was staged, with the batch's adjustments, whose masks are copied to the device by themselves."""
        masks = {row: each.mask for row, each in batch.adjustments.items() if each.mask is not None}
        if not masks:
            return replace(staged, batch=batch)
        mask_rows = np.full(len(batch.num_logprobs), -1, dtype=np.int32)
        mask_rows[list(masks)] = np.arange(len(masks))
        bitmask = np.stack(list(masks.values())).view(np.int32)
        placed = [sent(torch.from_numpy(values), self._device) for values in (bitmask, mask_rows)]
        adjustments = replace(staged.adjustments, bitmask=placed[0], mask_rows=placed[1])
        return replace(staged, batch=batch, adjustments=adjustments)

    def choose(self, logits: Tensor, staged: StagedSampling, draft_tokens: "DraftTokens | None" = None) -> Chosen:
        """Samples tokens from logits [n, vocab].

        Without draft tokens the sampled tokens are also recorded as output. With `draft_tokens` the caller records
        the accepted ones afterwards, with `take`.
        """
        batch, adjustments = staged.batch, staged.adjustments
        if draft_tokens is not None and len(staged.penalised):
            adjustments = self._with_draft_tokens(staged, draft_tokens)
        any_draws = bool((batch.columns.temperature >= GREEDY_BELOW).any())
        biased = [row for row, adjustment in batch.adjustments.items() if adjustment.biases]
        adjusted = logits.clone() if biased else logits
        if biased:
            add_biases(adjusted, batch)
        tokens, logprobs = choose_tokens(adjusted, staged.columns, staged.positions, adjustments, any_draws)
        if biased:
            logprobs = logprobs.index_copy(0, *_model_logprobs(logits, tokens, biased))
        if draft_tokens is None:
            self.take(staged.rows, tokens, staged.penalised)
        return Chosen(tokens, logprobs, _top(logits, batch))

    def take(self, rows: Tensor, tokens: Tensor, penalised: Integers) -> None:
        """Records output tokens, one for each of the rows, which must be distinct.

        `penalised`: indices of the rows with penalties, whose counts are updated.
        """
        self.last.index_copy_(0, rows, tokens)
        if len(penalised):
            places = sent(torch.from_numpy(penalised), self._device)
            ones = torch.ones(len(penalised), dtype=torch.int32, device=self._device)
            self._counts.index_put_((rows[places], tokens[places]), ones, accumulate=True)

    def _with_draft_tokens(self, staged: StagedSampling, draft_tokens: "DraftTokens") -> Adjustments:
        """Returns adjustments in which the draft tokens before each penalised row count as output."""
        places = staged.penalised
        own = staged.rows[sent(torch.from_numpy(places), self._device)]
        counts = self._counts.index_select(0, own).cpu().numpy()
        for row, place in enumerate(places.tolist()):
            np.add.at(counts[row], draft_tokens.before(place), 1)
        rows = torch.full_like(staged.adjustments.penalty_rows, -1)
        rows[sent(torch.from_numpy(places), self._device)] = torch.arange(
            len(places), dtype=torch.int32, device=self._device
        )
        counted, in_prompt = sent(torch.from_numpy(counts), self._device), self._in_prompt.index_select(0, own)
        return replace(staged.adjustments, counts=counted, in_prompt=in_prompt, penalty_rows=rows)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The draft tokens that a step checks: for each sampled token, the draft tokens of its sequence before it."""

    token_ids: tuple[tuple[int, ...], ...]

    def before(self, place: int) -> np.ndarray:
        """Returns the draft tokens before the sampled token with index `place`."""
        return np.array(self.token_ids[place], dtype=np.int64)


def _model_logprobs(logits: Tensor, tokens: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Returns (rows, log probabilities of their tokens before biases), for rows whose logits were biased."""
    places = sent(torch.tensor(rows, dtype=torch.int64), logits.device)
    own = logits.index_select(0, places).to(torch.float32)
    chosen = own.gather(1, tokens.index_select(0, places)[:, None]).squeeze(1)
    return places, chosen - own.logsumexp(dim=-1)


def _top(logits: Tensor, batch: SamplingBatch) -> tuple[Integers, Tensor, Tensor] | None:
    """Returns the top candidates of the rows that asked for them, as in `Chosen.top`; None if no row asked."""
    asking = np.flatnonzero(batch.num_logprobs)
    if not len(asking):
        return None
    rows = logits.index_select(0, sent(torch.from_numpy(asking), logits.device)).to(torch.float32)
    values, token_ids = rows.topk(min(int(batch.num_logprobs.max()), logits.shape[1]), dim=-1)
    return asking, token_ids, values - rows.logsumexp(dim=-1, keepdim=True)


def report(tokens: Integers, logprobs: list[float], top: tuple[Integers, Tensor, Tensor] | None,
           batch: SamplingBatch) -> Sampled:  # fmt: skip
    """Returns the sampled tokens with their log probabilities, from results copied to the host."""
    reports = [SampledLogprobs(logprob) for logprob in logprobs]
    if top is not None:
        for row, ids, values in zip(top[0].tolist(), top[1].tolist(), top[2].tolist(), strict=True):
            count = int(batch.num_logprobs[row])
            reports[row] = SampledLogprobs(logprobs[row], tuple(ids[:count]), tuple(values[:count]))
    return Sampled(tokens, tuple(reports), errors_of(batch), batch.waiting)
