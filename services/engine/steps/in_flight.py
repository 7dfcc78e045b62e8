"""The plans in flight: launched but not yet collected, oldest first. Used by the step loop.

If the executor takes one plan at a time, each step is computed before the next one is planned. If it takes two, the
second step is planned while the device computes the first, so that the device does not wait for planning and for
applying results. The second step is planned as late as is safe, so that requests that arrive meanwhile still join it.
With several pipeline stages a plan is launched as soon as the first stage is free, which then computes it at once.
"""

from collections import deque
from typing import NamedTuple

from antiphon.services.engine.core.plan import ScheduledSequence, StepPlan, StepResult
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.steps.step_time import StepTimeEstimator, Timing
from antiphon.shared.clock import Clock

LEAD_S, LEAD_SHARE = 0.002, 0.1
"""The next plan is launched `LEAD_S` seconds plus the share `LEAD_SHARE` of the step's time before its expected end."""
READY_S = 0.0002
"""If collect() returns within this many seconds, the step had already ended, so its measured time is an upper bound."""
TOO_LONG = 0.5
"""If a step had ended before collect() was called, its time is taken as at most this factor times the expected time.
"""
FORGETS = 0.9
"""Factor by which the remembered longest planning time shrinks at each new plan."""


class RunningStep(NamedTuple):
    """The step that the worker computes now. Immutable, so other threads may read it. Times are monotonic seconds."""

    step: int
    started_s: float
    expected_s: float
    """Expected duration in seconds; 0 if unknown."""
    scheduled: tuple[ScheduledSequence, ...]
    basis: Timing | None
    """The earlier step of the same size class from which `expected_s` is derived; None if there is none."""


class InFlightSteps:
    """The queue of plans in flight. Its length is the number of plans in flight.

    Three attributes may be read from any thread: `running`, the step that runs now or None; `planning_from_s`, the
    monotonic time until which the step thread sleeps on purpose; and `thread_id`.
    """

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._one_at_a_time = executor.max_in_flight == 1
        self._ahead = not self._one_at_a_time and executor.facts().num_stages == 1
        self._clock = clock
        self._plans: deque[StepPlan] = deque()
        self._launched_s: deque[float] = deque()
        """Launch time of each plan in flight."""
        self._step_times = StepTimeEstimator()
        self.running: RunningStep | None = None
        self.planning_from_s = 0.0
        self.thread_id: int | None = None
        """The system's id of the step thread; None unless `ThreadedLoop` runs the loop."""
        self._began_s = self._planning_s = 0.0
        """Start time of the oldest plan's step; decaying maximum of the planning time, in seconds."""

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def full(self) -> bool:
        """Whether a result must be collected before another plan can be launched."""
        return bool(self._plans) and (self._one_at_a_time or not self._executor.has_room())

    def seconds_to_plan(self) -> float:
        """Returns for how many seconds planning of the next step can be put off; 0 if no plan is in flight.

        The planning time that `launch` measures starts when this wait ends.
        """
        now_s = self._clock.monotonic()
        wait_s = 0.0
        if self._plans and self._ahead:
            expected_s = self._step_times.expected(self._plans[0]) * (1 - LEAD_SHARE) - LEAD_S - self._planning_s
            wait_s = max(0.0, self._began_s + expected_s - now_s)
        self.planning_from_s = now_s + wait_s
        return wait_s

    def launch(self, plan: StepPlan) -> None:
        """Launches a plan. The plan must not be empty."""
        launched_s = self._clock.monotonic()
        if not self._plans:
            self._begin(plan, launched_s)
        self._executor.launch(plan)
        if self._ahead:
            took_s = self._clock.monotonic() - self.planning_from_s
            self._planning_s = max(took_s, self._planning_s * FORGETS)
        self._plans.append(plan)
        self._launched_s.append(launched_s)

    def collect(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest plan in flight. Returns the plan and its result."""
        plan = self._plans.popleft()
        self._launched_s.popleft()
        asked_s = self._clock.monotonic()
        result = self._executor.collect()
        now_s = self._clock.monotonic()
        if self._ahead:
            self._learn(plan, asked_s, now_s)
        else:
            self._step_times.took(plan, now_s - self._began_s)
        if self._plans:
            self._begin(self._plans[0], now_s if self._ahead else self._launched_s[0])
        else:
            self.running = None
        return plan, result

    def pause(self) -> RunningStep | None:
        """Hides the running step from the watchdog while the step thread does other work.

        Returns the hidden step, to be passed to `resume`.
        """
        paused, self.running = self.running, None
        return paused

    def resume(self, paused: RunningStep | None) -> None:
        """Shows the paused step to the watchdog again, with the current time as its start."""
        if paused is not None:
            self.running = paused._replace(started_s=self._clock.monotonic())

    def _begin(self, plan: StepPlan, now_s: float) -> None:
        self._began_s = now_s
        basis = self._step_times.basis(plan)
        self.running = RunningStep(plan.step, now_s, self._step_times.expected(plan), plan.scheduled, basis)

    def _learn(self, plan: StepPlan, asked_s: float, now_s: float) -> None:
        took_s = now_s - self._began_s
        if now_s - asked_s < READY_S:
            took_s = min(took_s, self._step_times.expected(plan) * TOO_LONG)
        self._step_times.took(plan, took_s)
