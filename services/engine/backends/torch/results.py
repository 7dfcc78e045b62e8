"""The result of a step from the logits of its tokens: sampled tokens, accepted draft tokens, log probabilities.

Called by the workers that compute with torch operations.
"""

import torch
from msgspec.structs import replace
from torch import Tensor

from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.worker.batch.acceptance import accept
from antiphon.services.engine.worker.batch.inputs import FlatStep
from antiphon.services.engine.worker.batch.prompt_logprobs import ReportedLogits, packed, report_logits
from antiphon.services.engine.worker.batch.sampler import NOTHING_SAMPLED, sample
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.shared.messages import PromptLogprobs


def step_result(plan: StepPlan, step: FlatStep, logits: Tensor | None, table: StateTable) -> StepResult:
    """Samples, appends the sampled tokens to the table, and returns the step's result.

    `logits`: those of `FlatStep.logit_tokens`; None if there are none.
    """
    if logits is None:
        return StepResult(step=plan.step)
    num_samples = len(step.rows)
    reported = _reported(step, logits[num_samples:])
    if not num_samples:
        return NOTHING_SAMPLED.result(plan.step, reported)
    batch = table.sampling(step.rows, step.offsets)
    sampled = sample(logits[:num_samples], table.with_adjustments(batch, step.rows, step.offsets))
    if step.has_draft_tokens or sampled.waiting:
        return replace(accept(plan, sampled, table), prompt_logprobs=reported)
    table.append(step.rows, sampled.token_ids)
    return sampled.result(plan.step, reported)


def _reported(step: FlatStep, logits: Tensor) -> tuple[PromptLogprobs, ...]:
    """Returns the log probabilities of prompts that the step reports, from the logits of their tokens."""
    if step.report is None:
        return ()
    token_ids = torch.from_numpy(step.report.token_ids).to(logits.device)
    found = report_logits(logits, token_ids, step.report.num_top)
    return packed(step.report, ReportedLogits(*(values.cpu() for values in found)))
