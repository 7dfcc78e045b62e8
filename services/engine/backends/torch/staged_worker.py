"""The torch worker of a pipeline stage: it accepts the next plans while other stages compute earlier ones.

`launch` computes this stage's layers and passes the hidden states on to the next stage; `collect` gets the hidden
states of the last stage and samples from them. Plans are launched and collected in the same order on every stage; a
later stage may collect a plan before an earlier stage does. A plan contains no token that another plan in flight
samples (`EngineFacts.num_stages`).
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.services.engine.worker.batch.inputs import FlatStep
from antiphon.services.engine.worker.batch.pooling import NO_SUMS, span_sums, with_vectors
from antiphon.shared.config import EngineSettings


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A plan that this stage has computed. `step` is None if the plan computes nothing.

    `hidden` [n, hidden]: this stage's hidden states of the tokens whose hidden states are needed from the last stage:
    all tokens if the step has spans, else its `logit_tokens`.
    """

    plan: StepPlan
    step: FlatStep | None = None
    hidden: Tensor | None = None


class StagedWorker(TorchWorker):
    """A `PipelinedWorker` of one pipeline stage."""

    def __init__(self, settings: EngineSettings, model_dir: Path, device: torch.device, ranks: Communicator) -> None:
        """See `TorchWorker`."""
        self._under_way: deque[_UnderWay] = deque()
        super().__init__(settings, model_dir, device, ranks)

    def takes_another(self) -> bool:
        """See `PipelinedWorker`. The executor counts the plans in flight."""
        return True

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See `PipelinedWorker`. On a CPU, returns when this stage has computed the plan."""
        step = self._begin(plan)
        if step is None:
            self._under_way.append(_UnderWay(plan))
            return
        hidden = self._decoder.forward(*self._inputs(step))
        if not len(step.spans):
            hidden = hidden.index_select(0, self._tensor(step.logit_tokens))
        self._under_way.append(_UnderWay(plan, step, hidden if len(hidden) else None))

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """See `PipelinedWorker`."""
        oldest = self._under_way.popleft()
        result = self._finished(oldest.plan, oldest.step, oldest.hidden)
        self._after_step()
        return result

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelWorker`. All launched plans must have been collected."""
        return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        assert not self._under_way, "a plan is under way"
        self.launch(plan)
        return self.collect()

    def _finished(self, plan: StepPlan, step: FlatStep | None, hidden: Tensor | None) -> StepResult:
        if step is None:
            return StepResult(step=plan.step)
        logits, sums = None, NO_SUMS
        if hidden is not None:
            hidden = self._decoder.from_last(hidden)
            if len(step.spans):
                sums = span_sums(hidden, step.spans).cpu().numpy()
                hidden = hidden.index_select(0, self._tensor(step.logit_tokens))
            logits = self._decoder.logits(hidden) if len(step.logit_tokens) else None
        return with_vectors(self._result(plan, step, logits), self._pooling.take(plan, sums))

    @property
    def _decoder(self) -> Decoder:
        # Models without a description run in one process.
        return cast(Decoder, self._model)

    def close(self) -> None:
        """See `ModelWorker`."""
        self._under_way.clear()
        super().close()
