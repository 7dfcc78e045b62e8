"""The plans that a worker has and whose results are not in, oldest first. Used by the step loop.

One for most workers: it is carried out where it is launched. A pipelined worker takes a second one while its device is
busy with the first, so that planning and taking in results cost the device no time.
"""

from collections import deque

from services.engine.core.plan import StepPlan, StepResult
from services.engine.worker.seam import ModelWorker, PipelinedWorker

_AHEAD = 2


class Flight:
    """See the module. Its length is the number of plans under way."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._pipelined = worker if isinstance(worker, PipelinedWorker) else None
        self._plans: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def full(self) -> bool:
        """Whether a result must be taken in before the next plan."""
        return len(self._plans) >= (1 if self._pipelined is None else _AHEAD)

    def launch(self, plan: StepPlan) -> None:
        """Gives the worker a plan that is not empty."""
        if self._pipelined is None:
            self._results.append(self._worker.run(plan))
        else:
            self._pipelined.launch(plan)
        self._plans.append(plan)

    def land(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest plan."""
        plan = self._plans.popleft()
        return plan, self._results.popleft() if self._pipelined is None else self._pipelined.collect()
