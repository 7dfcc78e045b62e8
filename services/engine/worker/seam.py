"""The worker seam: all that the step loop knows of a backend. `torch_worker` implements it; others sit beside it."""

from typing import Protocol, runtime_checkable

from services.engine.core.plan import EngineFacts, StepPlan, StepResult

UNDER_WAY_MAX = 2
"""Plans that a worker holds at once: the one that runs and the one behind it."""


class ModelWorker(Protocol):
    """A model on a device with its KV cache and its state table. Called from one thread only."""

    def facts(self) -> EngineFacts:
        """What loading learnt; valid after construction."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Carries out one plan. An exception means that the worker's state is lost: the engine must end."""
        ...

    def close(self) -> None:
        """Frees the device's memory."""
        ...


@runtime_checkable
class PipelinedWorker(ModelWorker, Protocol):
    """A worker that takes the next plan while the device is busy with the last one."""

    def takes_another(self) -> bool:
        """Whether a plan could be launched now without waiting for one that is under way."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan behind those that were started before; at most `UNDER_WAY_MAX` are under way."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest plan under way."""
        ...
