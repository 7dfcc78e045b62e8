"""The plans that are launched and not yet collected, oldest first. Used by the step loop.

With an executor that takes one plan at a time a step is computed before the next is planned. With one that takes two,
the second is planned while the device computes the first, so that planning and applying results cost the device no
time. The second one is planned as late as is safe, so that a request that arrives meanwhile still joins it.
"""

from collections import deque
from typing import NamedTuple

from services.engine.core.plan import ScheduledSequence, StepPlan, StepResult
from services.engine.executor.interface import Executor
from services.engine.pace import Pace, Timing
from shared.clock import Clock

LEAD_S, LEAD_SHARE = 0.002, 0.1
"""How long before the expected end of a step the next one is there: some time, and a share of the step."""
READY_S = 0.0002
"""A result that is there sooner was there before it was asked for."""
TOO_LONG = 0.5
"""What is expected the next time, of what was, when a step had ended before it was asked for: when is not known."""
FORGETS = 0.9
"""What counts of the longest planning in the next one."""


class RunningStep(NamedTuple):
    """The step that a worker computes, for readers on other threads: immutable. Times are monotonic seconds."""

    step: int
    started_s: float
    expected_s: float
    """How long it should take; 0 where nothing is known."""
    scheduled: tuple[ScheduledSequence, ...]
    basis: Timing | None
    """The step of its size from which `expected_s` is known."""


class Flight:
    """See the module. Its length is the number of plans under way.

    `running` and `planning_from_s` may be read from any thread: the step that runs, None while there is none, and until
    when the step thread sleeps on purpose.
    """

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._ahead = executor.max_in_flight > 1
        self._clock = clock
        self._plans: deque[StepPlan] = deque()
        self._pace = Pace()
        self.running: RunningStep | None = None
        self.planning_from_s = 0.0
        self._began_s = self._planning_s = 0.0
        """When the oldest plan's step began; how long planning the next one takes at most."""

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def full(self) -> bool:
        """Whether a result must be collected before the next plan."""
        return bool(self._plans) and (not self._ahead or not self._executor.has_room())

    def seconds_to_plan(self) -> float:
        """How long the next plan can wait. The time that it takes counts from the end of that."""
        now_s = self._clock.monotonic()
        wait_s = 0.0
        if self._plans:
            expected_s = self._pace.expected(self._plans[0]) * (1 - LEAD_SHARE) - LEAD_S - self._planning_s
            wait_s = max(0.0, self._began_s + expected_s - now_s)
        self.planning_from_s = now_s + wait_s
        return wait_s

    def launch(self, plan: StepPlan) -> None:
        """Launches a plan that is not empty."""
        if not self._plans:
            self._begin(plan, self._clock.monotonic())
        self._executor.launch(plan)
        if self._ahead:
            took_s = self._clock.monotonic() - self.planning_from_s
            self._planning_s = max(took_s, self._planning_s * FORGETS)
        self._plans.append(plan)

    def land(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest plan."""
        plan = self._plans.popleft()
        asked_s = self._clock.monotonic()
        result = self._executor.collect()
        now_s = self._clock.monotonic()
        if self._ahead:
            self._learn(plan, asked_s, now_s)
        else:
            self._pace.took(plan, now_s - self._began_s)
        if self._plans:
            self._begin(self._plans[0], now_s)
        else:
            self.running = None
        return plan, result

    def pause(self) -> RunningStep | None:
        """The step thread is about to do something else than computing. Returns what `resume` needs."""
        paused, self.running = self.running, None
        return paused

    def resume(self, paused: RunningStep | None) -> None:
        """It goes on. The time since `pause` says nothing about the step."""
        if paused is not None:
            self.running = paused._replace(started_s=self._clock.monotonic())

    def _begin(self, plan: StepPlan, now_s: float) -> None:
        self._began_s = now_s
        basis = self._pace.basis(plan)
        self.running = RunningStep(plan.step, now_s, self._pace.expected(plan), plan.scheduled, basis)

    def _learn(self, plan: StepPlan, asked_s: float, now_s: float) -> None:
        took_s = now_s - self._began_s
        if now_s - asked_s < READY_S:
            took_s = min(took_s, self._pace.expected(plan) * TOO_LONG)
        self._pace.took(plan, took_s)
