"""Log probabilities of prompt tokens: which tokens of a step report them, and their values from the logits.

    plan and state table -> PromptReport (host) -> report_logits (device) -> PromptLogprobs, one for each sequence

A step computes the logits of the reported tokens after those of the sampled tokens. The scheduler limits their number,
so a long prompt is reported over several steps. The values are those of the model's own distribution, as for sampled
tokens. Called by the workers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.worker.batch.sampler import SLICE_BYTES
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.shared.messages import PromptLogprobs

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The reported tokens of a step, in the order of the plan.

    `tokens` [m] are the step's tokens after which the logits are needed; `token_ids` [m] are the tokens of the prompt
    that follow them, whose log probabilities are reported.
    """

    spans: tuple[tuple[int, int, int], ...]
    """For each sequence that reports: position of its first reported token, number of tokens, number of candidates."""
    tokens: Integers
    token_ids: Integers

    @property
    def num_top(self) -> int:
        """The largest number of candidates that a sequence asked for."""
        return max(num_top for _, _, num_top in self.spans)


class ReportedLogits(NamedTuple):
    """Log probabilities and ranks [m] of the reported tokens; ids and log probabilities of the best, [m, num_top]."""

    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def report_of(plan: StepPlan, table: StateTable, first_tokens: Integers) -> PromptReport:
    """Returns the report of a step with prompt tokens to report (`StepPlan.num_prompt_logprobs`).

    `first_tokens`: index of each scheduled sequence's first token in the step. The table must have applied the plan.
    """
    spans: list[tuple[int, int, int]] = []
    tokens: list[Integers] = []
    token_ids: list[Integers] = []
    for share, first in zip(plan.scheduled, first_tokens.tolist(), strict=True):
        count, position = share.num_prompt_logprobs, share.start + 1
        if count:
            spans.append((position, count, int(table.num_prompt_logprobs[share.row])))
            tokens.append(np.arange(first, first + count))
            token_ids.append(table.token_ids[share.row, position : position + count].astype(np.int64))
    return PromptReport(tuple(spans), np.concatenate(tokens), np.concatenate(token_ids))


def report_logits(logits: Tensor, token_ids: Tensor, num_top: int) -> ReportedLogits:
    """Returns the log probabilities of `token_ids` [m] and of the `num_top` best tokens, from logits [m, vocab]."""
    num_top = min(num_top, logits.shape[1])
    portion = max(1, SLICE_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    parts: list[ReportedLogits] = []
    for first in range(0, len(logits), portion):
        rows = logits[first : first + portion].to(torch.float32)
        norms = rows.logsumexp(dim=-1, keepdim=True)
        chosen = rows.gather(1, token_ids[first : first + portion, None])
        ranks = (rows > chosen).sum(dim=-1) + 1
        values, top = rows.topk(num_top, dim=-1)
        parts.append(ReportedLogits((chosen - norms).squeeze(1), ranks, top, values - norms))
    return parts[0] if len(parts) == 1 else ReportedLogits(*map(torch.cat, zip(*parts, strict=True)))


def packed(report: PromptReport, found: ReportedLogits) -> tuple[PromptLogprobs, ...]:
    """Returns the report of each sequence, from tensors on the host."""
    logprobs, ranks = found.logprobs.numpy().astype("<f4"), found.ranks.numpy().astype("<u4")
    top_token_ids, top_logprobs = found.top_token_ids.numpy().astype("<u4"), found.top_logprobs.numpy().astype("<f4")
    parts: list[PromptLogprobs] = []
    first = 0
    for position, count, num_top in report.spans:
        span, first = slice(first, first + count), first + count
        num_top = min(num_top, top_token_ids.shape[1])
        parts.append(
            PromptLogprobs(
                start=position,
                token_ids=report.token_ids[span].astype("<u4").tobytes(),
                logprobs=logprobs[span].tobytes(),
                num_top=num_top,
                top_token_ids=top_token_ids[span, :num_top].tobytes(),
                top_logprobs=top_logprobs[span, :num_top].tobytes(),
                ranks=ranks[span].tobytes(),
            )
        )
    return tuple(parts)
