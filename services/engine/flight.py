"""The plans that a worker has and whose results are not in, oldest first. Used by the step loop.

One for most workers: it is carried out where it is launched. A pipelined worker takes a second one while its device is
busy with the first, so that planning and taking in results cost the device no time. The second one is made as late as
is safe: what arrives until then need not wait for a step more.
"""

from collections import deque

from services.engine.core.plan import StepPlan, StepResult
from services.engine.pace import Pace
from services.engine.worker.seam import ModelWorker, PipelinedWorker

_AHEAD = 2
LEAD_S, LEAD_SHARE = 0.003, 0.1
"""How long before the expected end of a step the next one is planned: some time, and a share of what it takes."""


class Flight:
    """See the module. Its length is the number of plans under way. Times are the clock's seconds."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._pipelined = worker if isinstance(worker, PipelinedWorker) else None
        self._plans: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._pace = Pace()
        self._began_s = 0.0
        """When the oldest plan's step did."""

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def full(self) -> bool:
        """Whether a result must be taken in before the next plan."""
        return len(self._plans) >= (1 if self._pipelined is None else _AHEAD)

    def seconds_to_plan(self, now_s: float) -> float:
        """How long the next plan can wait."""
        if not self._plans:
            return 0.0
        expected_s = self._pace.expected(self._plans[0])
        return max(0.0, self._began_s + expected_s * (1 - LEAD_SHARE) - LEAD_S - now_s)

    def launch(self, plan: StepPlan, now_s: float) -> None:
        """Gives the worker a plan that is not empty."""
        if not self._plans:
            self._began_s = now_s
        if self._pipelined is None:
            self._results.append(self._worker.run(plan))
        else:
            self._pipelined.launch(plan)
        self._plans.append(plan)

    def land(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest plan."""
        plan = self._plans.popleft()
        return plan, self._results.popleft() if self._pipelined is None else self._pipelined.collect()

    def landed(self, plan: StepPlan, now_s: float) -> None:
        """Tells when `land` has returned."""
        self._pace.took(plan, now_s - self._began_s)
        self._began_s = now_s
