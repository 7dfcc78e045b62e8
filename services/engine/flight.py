"""The plans that a worker has and whose results are not in, oldest first. Used by the step loop.

One for most workers: it is carried out where it is launched. A pipelined worker takes a second one while its device is
busy with the first, so that planning and taking in results cost the device no time. The second one is made as late as
is safe: what arrives until then need not wait for a step more.
"""

from collections import deque

from services.engine.core.plan import StepPlan, StepResult
from services.engine.pace import Pace
from services.engine.worker.seam import ModelWorker, PipelinedWorker
from shared.clock import Clock

LEAD_S, LEAD_SHARE = 0.002, 0.1
"""How long before the expected end of a step the next one is there: some time, and a share of the step."""
READY_S = 0.0002
"""A result that is there sooner was there before it was asked for."""
TOO_LONG = 0.5
"""What is expected the next time, of what was, when a step had ended before it was asked for: when is not known."""
FORGETS = 0.9
"""What counts of the longest planning in the next one."""


class Flight:
    """See the module. Its length is the number of plans under way."""

    def __init__(self, worker: ModelWorker, clock: Clock) -> None:
        self._worker = worker
        self._pipelined = worker if isinstance(worker, PipelinedWorker) else None
        self._clock = clock
        self._plans: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._pace = Pace()
        self._began_s = self._planning_from_s = self._planning_s = 0.0
        """When the oldest plan's step began; when planning the next one did, and how long that takes at most."""

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def full(self) -> bool:
        """Whether a result must be taken in before the next plan."""
        return bool(self._plans) and (self._pipelined is None or not self._pipelined.takes_another())

    def seconds_to_plan(self) -> float:
        """How long the next plan can wait. The time that it takes counts from the end of that."""
        now_s = self._clock.monotonic()
        wait_s = 0.0
        if self._plans:
            expected_s = self._pace.expected(self._plans[0]) * (1 - LEAD_SHARE) - LEAD_S - self._planning_s
            wait_s = max(0.0, self._began_s + expected_s - now_s)
        self._planning_from_s = now_s + wait_s
        return wait_s

    def launch(self, plan: StepPlan) -> None:
        """Gives the worker a plan that is not empty."""
        if not self._plans:
            self._began_s = self._clock.monotonic()
        if self._pipelined is None:
            self._results.append(self._worker.run(plan))
        else:
            self._pipelined.launch(plan)
            took_s = self._clock.monotonic() - self._planning_from_s
            self._planning_s = max(took_s, self._planning_s * FORGETS)
        self._plans.append(plan)

    def land(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest plan."""
        plan = self._plans.popleft()
        if self._pipelined is None:
            return plan, self._results.popleft()
        asked_s = self._clock.monotonic()
        result = self._pipelined.collect()
        self._learn(plan, asked_s, self._clock.monotonic())
        return plan, result

    def _learn(self, plan: StepPlan, asked_s: float, now_s: float) -> None:
        took_s = now_s - self._began_s
        if now_s - asked_s < READY_S:
            took_s = min(took_s, self._pace.expected(plan) * TOO_LONG)
        self._pace.took(plan, took_s)
        self._began_s = now_s
