"""Results of steps on their way from the device to the host. Called by the GPU worker."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.backends.triton.device_sampler import Chosen, StagedSampling, report
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Integers
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.worker.batch.pooling import NO_SUMS
from antiphon.services.engine.worker.batch.prompt_logprobs import PromptReport, ReportedLogits, packed
from antiphon.services.engine.worker.batch.sampler import NOTHING_SAMPLED, Sampled
from antiphon.shared.messages import PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A launched step with logits. The copies of its results to the host are complete when `arrived` has occurred.

    `places`: position of each sampled token in its row (not used for a step with draft tokens). `sampling` and `chosen`
    are None if no sequence samples; `report` and `reported` are None if no log probabilities of prompts are reported.
    """

    plan: StepPlan
    rows: Integers
    places: Integers
    sampling: StagedSampling | None
    chosen: Chosen | None
    report: PromptReport | None
    reported: ReportedLogits | None
    arrived: "torch.cuda.Event | None"

    def wait(self) -> None:
        """Waits for the copies."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def sampled(self) -> Sampled:
        """Returns the sampled tokens. The step must have been waited for."""
        if self.chosen is None or self.sampling is None:
            return NOTHING_SAMPLED
        chosen = self.chosen
        return report(chosen.tokens.numpy(), chosen.logprobs.tolist(), chosen.top, self.sampling.batch)

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Returns the log probabilities of prompts. The step must have been waited for."""
        return () if self.report is None or self.reported is None else packed(self.report, self.reported)


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of a launched step's hidden states (`PoolingRows.spans`) on the host.

    The copy to the host is complete when `arrived` has occurred.

    `values` is None if the step has no spans.
    """

    plan: StepPlan
    values: Tensor | None = None
    arrived: "torch.cuda.Event | None" = None

    def wait(self) -> NDArray[np.float32]:
        """Waits for the copy and returns the sums."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return NO_SUMS if self.values is None else self.values.numpy()


class HostCopies:
    """Starts copies of tensors from a device to the host. On a CPU they are complete at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"

    def begin(self, values: Tensor) -> Tensor:
        """Starts a copy and returns the host tensor."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._on_device)
        return host.copy_(values, non_blocking=True)

    def begin_chosen(self, chosen: Chosen) -> Chosen:
        """Starts the copies of sampled tokens and returns the host tensors."""
        top = chosen.top
        if top is not None:
            top = top[0], self.begin(top[1]), self.begin(top[2])
        return Chosen(self.begin(chosen.tokens), self.begin(chosen.logprobs), top)

    def end(self) -> "torch.cuda.Event | None":
        """Returns an event that occurs when the copies begun so far are complete; None on a CPU."""
        if not self._on_device:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
