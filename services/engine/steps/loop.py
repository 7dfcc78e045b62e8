"""The step loop: receive commands, schedule, run, apply, report. Synchronous.

The loop launches as many plans as the executor takes at a time (`in_flight`). It uses the core and an executor and does
not know the bus. Commands arrive in a thread-safe inbox. Results leave through one callback, which is called once for
each step or once for several steps (`--num-scheduler-steps`). In production `ThreadedLoop` runs the loop on a thread of
its own beside the event loop; the simulation calls `step` itself.
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
from typing import Protocol

import msgspec

from antiphon.services.engine.canary.canary import Canary
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.invariants import check_idle
from antiphon.services.engine.core.kv.kv_transfer import KvLoaded, KvMeta, KvReleased
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.steps.in_flight import InFlightSteps
from antiphon.shared.clock import Clock
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
REST_S = 1.0
"""Seconds without work after which the loop counts as resting."""


class StepDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computed, for the record of requests. Times are the clock's monotonic seconds.

    `scheduled`: for each sequence of the step its id in the core, the position of its first computed token, and the
    number of its computed tokens. `preempted`: ids of the sequences preempted since the step before.
    """

    step: int
    started_s: float
    ended_s: float
    scheduled: tuple[tuple[str, int, int], ...]
    preempted: tuple[str, ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one step, or of several steps with the outcomes of each sequence merged.

    `step` is the number of the last step. `refused` lists the ids of sequences that the core refused or ended without a
    result, with the errors; `joined` lists the ids of sequences that got a row. Times are the clock's nanoseconds.
    """

    step: int
    outcomes: tuple[Outcome, ...]
    refused: tuple[tuple[str, ServiceError], ...]
    joined: tuple[str, ...]
    num_tokens: int
    started_ns: int
    ended_ns: int
    details: tuple[StepDetail, ...] = ()
    """For each step, if `StepLoop.records` is set."""
    preempted: tuple[str, ...] = ()
    """Ids of the sequences that were preempted; one that was preempted twice is here twice."""


class Connector(Protocol):
    """The half of KV transfers that moves the bytes (`services/engine/kv/connector.py`). Calls `StepLoop.wake`."""

    def start_load(self, meta: KvMeta) -> None:
        """Begins and stops transfers. Returns at once."""
        ...

    def finished(self) -> list[KvLoaded | KvReleased]:
        """Returns the loads that have ended and the saved blocks that are not read any more, since the last call."""
        ...


class StepLoop:
    """Runs one core with one executor. `add` and `abort` may be called from any thread, `step` from one thread only.

    A pass is one call of `step`: up to `steps_a_report` steps that are reported together. A step in which sequences
    join ends the pass, so that first tokens are reported without delay.
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
        self.connector: Connector | None = None
        """Exchanges KV with other engines. To be set before the first step."""
        self.in_flight = InFlightSteps(executor, clock)
        self._check = executor.check
        self.records = False
        """Whether reports have the details of their steps. May be set from any thread."""
        self.canary: Canary | None = None
        """Tests the engine with its canary. To be set before the first step."""
        self._clock = clock
        self._report = report
        self._steps_a_report = steps_a_report
        self._inbox: deque[SequenceSpec | str | tuple[str, ServiceError] | Callable[[Core], None]] = deque()
        """Sequences to add, ids to abort, (id, error) of sequences that were refused before they reached the loop, and
        functions to call."""
        self._work = threading.Event()
        executor.watch(self.wake)

    @property
    def has_commands(self) -> bool:
        """Whether the inbox holds commands that no step has received yet."""
        return bool(self._inbox)

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence."""
        self._inbox.append(spec)
        self._work.set()

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence. Does nothing if the sequence has already ended."""
        self._inbox.append(sequence_id)
        self._work.set()

    def refuse(self, sequence_id: str, error: ServiceError) -> None:
        """Makes the next report list a sequence, which has not been added, as refused."""
        self._inbox.append((sequence_id, error))
        self._work.set()

    def call(self, function: Callable[[Core], None]) -> None:
        """Has a function called with the core between two steps, on the thread that steps. Returns at once."""
        self._inbox.append(function)
        self._work.set()

    def wake(self) -> None:
        """Makes a blocked `wait` return."""
        self._work.set()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a command arrives, `wake` is called, or a gathering batch or the canary's sequence must start.

        Returns False on timeout.
        """
        now_s = self._clock.monotonic()
        due_s = self.core.scheduler.seconds_to_batch(now_s)
        if self.canary is not None:
            due_s = min(due_s, self.canary.seconds_left(now_s))
        return self._work.wait(min(timeout_s, due_s)) or due_s < timeout_s

    def step(self) -> bool:
        """Runs one pass and reports it. Returns False if there was nothing to compute, or only the canary's sequence.

        Raises WrongResultError if the engine has computed a wrong result; the pass is then not reported.
        """
        self._work.clear()
        self._check()
        reports: list[StepReport] = []
        while len(reports) < self._steps_a_report:
            report = self._one_step()
            reports.append(report)
            if not report.num_tokens or report.joined:
                break
        if self.canary is not None:
            self.canary.check()
        whole = reports[0] if len(reports) == 1 else _put_together(reports)
        if whole.num_tokens or whole.refused:
            # The callback may block until earlier reports are published. The watchdog must not count that as step time.
            paused = self.in_flight.pause()
            self._report(whole)
            self.in_flight.resume(paused)
        return whole.num_tokens > 0

    def check_idle(self) -> None:
        """Checks the invariants of an idle core (see `ThreadedLoop`). Logs a violation and raises AssertionError."""
        try:
            check_idle(self.core, self._clock.monotonic())
        except AssertionError as violation:
            log.critical("the idle engine's state is inconsistent, so the engine ends: %s", violation)
            raise

    def _one_step(self) -> StepReport:
        started_ns, started_s = self._clock.time_ns(), self._clock.monotonic()
        refused: list[tuple[str, ServiceError]] = []
        plan = self._fill_flight(refused)
        if not self.in_flight:
            return self._summary(plan, (), [], refused, started_ns)
        plan, result = self.in_flight.collect()
        # Aborts that arrived while the step ran take effect before the step's tokens are reported.
        refused += self._receive()
        joined = self.core.joined(plan)
        ids = self.core.scheduled_ids(plan) if self.records else None
        outcomes = self.core.apply(plan, result, self._clock.monotonic())
        if self.core.canary_outcomes:
            self._pass_to_canary()
        self._exchange_kv()
        refused += self.core.failed
        self.core.failed.clear()
        preempted = self.core.take_preempted()
        details = () if ids is None else (self._detail(plan, ids, preempted, started_s),)
        return self._summary(plan, joined, outcomes, refused, started_ns, details, preempted)

    def _detail(self, plan: StepPlan, ids: list[str], preempted: tuple[str, ...], started_s: float) -> StepDetail:
        residency = self.core.residency
        return StepDetail(
            step=plan.step,
            started_s=started_s,
            ended_s=self._clock.monotonic(),
            scheduled=tuple(
                (name, share.start, share.num_tokens) for name, share in zip(ids, plan.scheduled, strict=True) if name
            ),
            preempted=preempted,
            num_running=residency.num_running,
            num_waiting=residency.num_waiting,
            num_free_blocks=self.core.pool.num_free,
        )

    def _fill_flight(self, refused: list[tuple[str, ServiceError]]) -> StepPlan:
        """Launches plans until the executor has no room for another or a plan is empty. Returns the last plan."""
        plan = StepPlan(step=0)
        while not self.in_flight.full:
            if spare_s := self.in_flight.seconds_to_plan():
                time.sleep(spare_s)
            refused += self._receive()
            now_s = self._clock.monotonic()
            plan = self.core.schedule(now_s, urgent_canary=self._start_canary(now_s))
            self._exchange_kv()
            if plan.empty:
                break
            self.in_flight.launch(plan)
        return plan

    def _start_canary(self, now_s: float) -> bool:
        """Adds the canary if a run is due. Returns whether it is urgent."""
        if self.canary is None:
            return False
        spec = self.canary.next(now_s)
        if spec is not None:
            self.core.add(spec)
        return self.canary.is_urgent(now_s)

    def _pass_to_canary(self) -> None:
        assert self.canary is not None, "outcomes of a canary that nobody has started"
        self.canary.take(self.core.canary_outcomes, self._clock.monotonic())
        self.core.canary_outcomes.clear()

    def _exchange_kv(self) -> None:
        """Passes the core's KV transfer commands to the connector. After a step these include the computed blocks."""
        if self.connector is not None and (meta := self.core.transfers.plan_meta()):
            self.connector.start_load(meta)

    def _receive(self) -> list[tuple[str, ServiceError]]:
        refused: list[tuple[str, ServiceError]] = []
        if self.connector is not None:
            for transferred in self.connector.finished():
                self.core.transferred(transferred)
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, str):
                self.core.abort(command)
                continue
            if isinstance(command, tuple):
                refused.append(command)
                continue
            if not isinstance(command, SequenceSpec):
                command(self.core)
                continue
            try:
                self.core.add(command)
            except ServiceError as error:
                refused.append((command.sequence_id, error))
        return refused

    def _summary(
        self,
        plan: StepPlan,
        joined: tuple[str, ...],
        outcomes: list[Outcome],
        refused: list[tuple[str, ServiceError]],
        started_ns: int,
        details: tuple[StepDetail, ...] = (),
        preempted: tuple[str, ...] = (),
    ) -> StepReport:
        ended_ns = self._clock.time_ns()
        num_canary = self.core.num_canary_tokens(plan)
        if num_canary == plan.num_tokens and num_canary:
            self._work.set()  # only the canary was computed: call `step` again, although the pass returns False
        num_tokens = plan.num_tokens - num_canary
        return StepReport(
            step=plan.step,
            outcomes=tuple(outcomes),
            refused=tuple(refused),
            joined=joined,
            num_tokens=num_tokens,
            started_ns=started_ns,
            ended_ns=ended_ns,
            details=details,
            preempted=preempted,
        )


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
        details=tuple(each for report in reports for each in report.details),
        preempted=tuple(each for report in reports for each in report.preempted),
    )


def _join(earlier: Outcome, later: Outcome) -> Outcome:
    assert later.position == earlier.position + len(earlier.token_ids), (earlier, later)
    return msgspec.structs.replace(
        later,
        position=earlier.position,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
    )


class Driver(Protocol):
    """Calls a StepLoop's `step` repeatedly."""

    def stop(self) -> None:
        """Asks the driver to end after the current pass. Returns at once."""
        ...

    async def join(self, timeout_s: float) -> None:
        """Waits until the driver has ended, for at most `timeout_s` seconds."""
        ...


class ThreadedLoop:
    """Runs a StepLoop on a thread of its own.

    Both callbacks are called on that thread. `on_exit` is called when the thread ends, with None or the error.
    `on_rest` is called once when there has been nothing to compute for `REST_S`, and again only after the loop has
    computed something. The core's invariants are checked before `on_rest`; a violation ends the thread with the error.
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
        """Starts the thread."""
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
            self._loop.in_flight.thread_id = threading.get_native_id()
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
    """Sets the scheduling policy of this thread and the threads it starts to SCHED_OTHER. The launcher set SCHED_BATCH.

    A sandbox may refuse the call; then it has also refused the launcher's call.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
