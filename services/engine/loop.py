"""The step loop: inbox, schedule, run, apply, report. Synchronous; a thread of its own drives it in production.

It launches as many plans as the executor takes at a time (`flight`). It knows the core and an executor, nothing of the
bus. Commands come through a thread-safe inbox; what a step gave leaves through one callback, once a step or once for
several (`--num-scheduler-steps`). `ThreadedLoop` runs it beside the event loop; the simulation calls `step`
itself.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.engine.core.core import Core
from services.engine.core.invariants import check_idle
from services.engine.core.plan import StepPlan
from services.engine.core.request import Outcome, SequenceSpec
from services.engine.executor.interface import Executor
from services.engine.flight import Flight
from shared.clock import Clock
from shared.errors import ServiceError

log = logging.getLogger(__name__)
REST_S = 1.0
"""Time without work after which the loop counts as resting."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, or several, whose outcomes are put together for each sequence; `step` is the last one.

    Times are the clock's nanoseconds. `refused`: sequences that the core could not take.
    """

    step: int
    outcomes: tuple[Outcome, ...]
    refused: tuple[tuple[str, ServiceError], ...]
    joined: tuple[str, ...]
    num_tokens: int
    started_ns: int
    ended_ns: int


class StepLoop:
    """One engine's core and executor. `add` and `abort` may be called from any thread, `step` from one only.

    `steps_a_report`: how many steps a pass takes at most. A step in which sequences join ends the pass, so that nobody
    waits for a first token.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        clock: Clock,
        report: Callable[[StepReport], None],
        steps_a_report: int = 1,
    ) -> None:
        self.core = core
        self.flight = Flight(executor, clock)
        self.thread_id: int | None = None
        """The system's id of the thread that calls `step`; None where no thread of its own does."""
        self._clock = clock
        self._report = report
        self._steps_a_report = steps_a_report
        self._inbox: deque[SequenceSpec | str] = deque()
        self._work = threading.Event()

    @property
    def has_commands(self) -> bool:
        """Whether commands were given that no step has taken yet."""
        return bool(self._inbox)

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence."""
        self._inbox.append(spec)
        self._work.set()

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence; harmless when it is gone."""
        self._inbox.append(sequence_id)
        self._work.set()

    def wake(self) -> None:
        """Lets a waiting `wait` return."""
        self._work.set()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until something arrives, or a batch that gathers has to start; False if there was neither."""
        batch_s = self.core.seconds_to_batch(self._clock.monotonic())
        return self._work.wait(min(timeout_s, batch_s)) or batch_s < timeout_s

    def step(self) -> bool:
        """One pass. False when there was nothing to compute."""
        self._work.clear()
        reports: list[StepReport] = []
        while len(reports) < self._steps_a_report:
            report = self._one_step()
            reports.append(report)
            if not report.num_tokens or report.joined:
                break
        whole = reports[0] if len(reports) == 1 else _put_together(reports)
        if whole.num_tokens or whole.refused:
            # It may wait for reports that are not published yet, and that is not the step's time.
            paused = self.flight.pause()
            self._report(whole)
            self.flight.resume(paused)
        return whole.num_tokens > 0

    def check_idle(self) -> None:
        """Checks the core's invariants after a pass that had nothing to compute. Raises AssertionError, and logs it."""
        try:
            check_idle(self.core, self._clock.monotonic())
        except AssertionError as violation:
            log.critical("the idle engine's state is inconsistent, so the engine ends: %s", violation)
            raise

    def _one_step(self) -> StepReport:
        started_ns = self._clock.time_ns()
        refused: list[tuple[str, ServiceError]] = []
        plan = self._fill_flight(refused)
        if not self.flight:
            return self._summary(plan, [], refused, started_ns)
        plan, result = self.flight.land()
        # Aborts that came while the step ran take effect before its tokens are given out.
        refused += self._receive()
        outcomes = self.core.apply(plan, result, self._clock.monotonic())
        return self._summary(plan, outcomes, refused, started_ns)

    def _fill_flight(self, refused: list[tuple[str, ServiceError]]) -> StepPlan:
        """Gives the worker as many plans as it takes; the last one, which is empty if there is nothing to compute."""
        while True:
            if spare_s := self.flight.seconds_to_plan():
                time.sleep(spare_s)
            refused += self._receive()
            plan = self.core.schedule(self._clock.monotonic())
            if not plan.empty:
                self.flight.launch(plan)
            if plan.empty or self.flight.full:
                return plan

    def _receive(self) -> list[tuple[str, ServiceError]]:
        refused: list[tuple[str, ServiceError]] = []
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, str):
                self.core.abort(command)
                continue
            try:
                self.core.add(command)
            except ServiceError as error:
                refused.append((command.sequence_id, error))
        return refused

    def _summary(
        self, plan: StepPlan, outcomes: list[Outcome], refused: list[tuple[str, ServiceError]], started_ns: int
    ) -> StepReport:
        joined = tuple(new.sequence_id for new in plan.new)
        ended_ns = self._clock.time_ns()
        return StepReport(plan.step, tuple(outcomes), tuple(refused), joined, plan.num_tokens, started_ns, ended_ns)


def _put_together(reports: list[StepReport]) -> StepReport:
    outcomes: dict[str, Outcome] = {}
    for outcome in (outcome for report in reports for outcome in report.outcomes):
        earlier = outcomes.get(outcome.sequence_id)
        outcomes[outcome.sequence_id] = outcome if earlier is None else _join(earlier, outcome)
    return StepReport(
        step=reports[-1].step,
        outcomes=tuple(outcomes.values()),
        refused=tuple(each for report in reports for each in report.refused),
        joined=tuple(each for report in reports for each in report.joined),
        num_tokens=sum(report.num_tokens for report in reports),
        started_ns=reports[0].started_ns,
        ended_ns=reports[-1].ended_ns,
    )


def _join(earlier: Outcome, later: Outcome) -> Outcome:
    assert later.position == earlier.position + len(earlier.token_ids), (earlier, later)
    return msgspec.structs.replace(
        later,
        position=earlier.position,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
    )


class Driver(Protocol):
    """What calls a StepLoop's `step` again and again."""

    def stop(self) -> None:
        """Asks it to end after the step that runs."""
        ...

    async def join(self, timeout_s: float) -> None:
        """Waits until it has ended."""
        ...


class ThreadedLoop:
    """Runs a StepLoop on a thread of its own.

    Both callbacks come from that thread: `on_exit` when it ends, with None or the error, `on_rest` when there has been
    nothing to compute for a second, once until there is again. The core's invariants are checked before `on_rest`; a
    violation ends the thread with the error.
    """

    def __init__(
        self, loop: StepLoop, on_exit: Callable[[BaseException | None], None], on_rest: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._on_rest = on_rest
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        """Starts stepping."""
        self._thread.start()

    def stop(self) -> None:
        """See Driver."""
        self._stop.set()
        self._loop.wake()

    async def join(self, timeout_s: float) -> None:
        """See Driver."""
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            _take_a_turn_at_once()
            self._loop.thread_id = threading.get_native_id()
            self._step_until_stopped()
        except BaseException as failure:
            error = failure
        self._on_exit(error)

    def _step_until_stopped(self) -> None:
        resting = True
        while not self._stop.is_set():
            if self._loop.step():
                resting = False
            elif not self._loop.wait(REST_S) and not resting:
                resting = True
                self._loop.check_idle()
                self._on_rest()


def _take_a_turn_at_once() -> None:
    """This thread, and those that it starts, are scheduled like any program's: the launcher has services wait more.

    A sandbox may refuse it, and then it refused the launcher too.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
