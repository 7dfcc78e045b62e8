"""When a step counts as hanging: on a clock of the test's own."""

import sys
import threading
from itertools import count

import pytest

from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, ScheduledSequence, StepPlan, StepResult
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.steps import progress
from antiphon.services.engine.steps.computing_threads import observe, observe_one
from antiphon.services.engine.steps.in_flight import InFlightSteps, RunningStep
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.steps.progress import ProgressMonitor
from antiphon.services.engine.steps.reports import ReportQueue
from antiphon.services.engine.steps.step_time import Timing
from antiphon.services.engine.steps.watchdog import Activity, DeliveryWatchdog, ProgressWatchdog, Stall, WaitingReport
from antiphon.shared import limits
from antiphon.shared.actors.service import EXIT_FAULT
from tests.unit.engine.core.factories import answer

BEAT_S = limits.HEARTBEAT_INTERVAL_S
FACTS = EngineFacts(num_blocks=8, block_size=4, max_model_len=100, vocab_size=1000)


def shares(start: int = 0, num_tokens: int = 1) -> tuple[ScheduledSequence, ...]:
    return (ScheduledSequence(row=0, start=start, num_tokens=num_tokens, samples=True),)


def step(expected_s: float | None = None, start: int = 0, basis_start: int = 0) -> RunningStep:
    """Begins at time 0. `expected_s`: of a step like it at `basis_start`; None: there was none."""
    basis = None if expected_s is None else Timing(expected_s, shares(basis_start))
    return RunningStep(1, 0.0, expected_s or 0.0, shares(start), basis)


class WatchedEngine:
    """A watchdog that is asked at every heartbeat, and what it watches."""

    def __init__(self, *, on_host: bool = True) -> None:
        self.watchdog = ProgressWatchdog(on_host=on_host)
        self.now_s = 0.0
        self.step: RunningStep | None = None
        self.asleep_until_s = 0.0
        self.busy = True
        self.ready = False
        self.readable = True
        self._ticks = count(1)
        self._spent = 0

    def judge(self) -> Stall | None:
        return self.watchdog.judge(self.now_s, self.step, self.asleep_until_s, self._observe)

    def first_stall(self, within_s: float) -> float | None:
        """When it is first judged to stand still; None if it is not within this time."""
        end_s = self.now_s + within_s
        while self.now_s < end_s:
            self.now_s += BEAT_S
            if self.judge() is not None:
                return self.now_s
        return None

    def _observe(self) -> Activity | None:
        if self.busy:
            self._spent = next(self._ticks)
        return Activity({1: self._spent, 2: 7}, self.ready) if self.readable else None


def test_a_long_step_that_computes_is_no_hang_when_nothing_is_expected() -> None:
    engine = WatchedEngine()
    engine.step = step()
    assert engine.first_stall(600.0) is None


@pytest.mark.parametrize("expected_s", [None, 0.01, 3.0])
def test_a_step_that_uses_no_processor_is_seen_well_within_two_seconds(expected_s: float | None) -> None:
    engine = WatchedEngine()
    engine.step, engine.busy = step(expected_s), False
    seen_s = engine.first_stall(10.0)
    assert seen_s is not None
    assert limits.STEP_IDLE_S <= seen_s <= 2.0 - 2 * BEAT_S


def test_a_step_that_hangs_after_it_computed_is_seen_as_soon() -> None:
    engine = WatchedEngine()
    engine.step = step()
    assert engine.first_stall(30.0) is None
    hangs_from, engine.busy = engine.now_s, False
    seen_s = engine.first_stall(10.0)
    assert seen_s is not None
    assert seen_s - hangs_from <= 2.0 - 2 * BEAT_S


def test_a_thread_that_waits_for_its_turn_or_for_a_disk_does_not_hang() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy, engine.ready = step(), False, True
    assert engine.first_stall(60.0) is None


def test_where_threads_cannot_be_read_only_the_expectation_counts() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy, engine.readable = step(), False, False
    assert engine.first_stall(60.0) is None
    engine.step = step(0.02)._replace(started_s=engine.now_s)
    began_s = engine.now_s
    seen_s = engine.first_stall(10.0)
    assert seen_s is not None
    assert seen_s - began_s == pytest.approx(limits.STEP_STALL_S, abs=BEAT_S)


@pytest.mark.parametrize(("expected_s", "limit_s"), [(0.02, limits.STEP_STALL_S), (0.5, 5.0), (3.0, 30.0)])
def test_a_step_that_spins_is_seen_when_it_takes_far_longer_than_expected(expected_s: float, limit_s: float) -> None:
    engine = WatchedEngine()
    engine.step = step(expected_s)
    assert engine.first_stall(100.0) == pytest.approx(limit_s, abs=1.5 * BEAT_S)


def test_a_context_that_is_longer_than_those_before_may_take_longer() -> None:
    engine = WatchedEngine()
    engine.step = step(0.5, start=99_999, basis_start=999)
    assert engine.first_stall(600.0) == pytest.approx(500.0, abs=1.5 * BEAT_S)


def test_a_shorter_context_changes_nothing() -> None:
    engine = WatchedEngine()
    engine.step = step(0.5, start=9, basis_start=99_999)
    assert engine.first_stall(600.0) == pytest.approx(5.0, abs=1.5 * BEAT_S)


def test_on_a_device_idle_threads_say_nothing_and_a_first_step_has_a_minute() -> None:
    engine = WatchedEngine(on_host=False)
    engine.step, engine.busy = step(), False
    assert engine.first_stall(600.0) == pytest.approx(limits.DEVICE_FIRST_STEP_S, abs=1.5 * BEAT_S)


def test_on_a_device_a_step_may_compile_a_kernel() -> None:
    engine = WatchedEngine(on_host=False)
    engine.step, engine.busy = step(0.01), False
    assert engine.first_stall(600.0) == pytest.approx(limits.DEVICE_STEP_STALL_S, abs=1.5 * BEAT_S)


def test_an_engine_without_work_never_stalls() -> None:
    engine = WatchedEngine()
    engine.busy = False
    assert engine.first_stall(600.0) is None


def test_steps_that_end_never_stall() -> None:
    engine = WatchedEngine()
    engine.busy = False
    for _ in range(50):
        engine.step = step(0.01)._replace(started_s=engine.now_s)
        assert engine.first_stall(1.0) is None


def test_a_step_thread_that_sleeps_on_purpose_is_not_idle() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy, engine.asleep_until_s = step(10.0), False, 9.0
    assert engine.first_stall(100.0) == pytest.approx(9.0 + limits.STEP_IDLE_S, abs=1.5 * BEAT_S)


def test_a_process_that_stood_still_as_a_whole_is_not_stalled_when_it_wakes() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy = step(0.02), False
    engine.first_stall(0.5)
    engine.now_s += 3600.0
    woke_s = engine.now_s
    assert engine.judge() is None
    engine.step = step(0.02)._replace(started_s=woke_s)
    assert engine.first_stall(1.0) is None


def test_a_step_that_hangs_on_after_the_process_stood_still_is_seen() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy = step(0.02), False
    engine.judge()
    engine.now_s += 3600.0
    woke_s = engine.now_s
    assert engine.judge() is None
    seen_s = engine.first_stall(10.0)
    assert seen_s is not None
    assert seen_s - woke_s <= 2.0


def test_a_stall_lasts_until_the_step_ends_and_counts_from_its_first_judgement() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy = step(0.02), False
    since_s = engine.first_stall(10.0)
    assert since_s is not None
    for _ in range(40):
        engine.now_s += BEAT_S
        stall = engine.judge()
        assert stall is not None
        assert stall.lasted_s == pytest.approx(engine.now_s - since_s)
    engine.step = step(0.02)._replace(started_s=engine.now_s)
    assert engine.judge() is None


def test_time_in_which_the_process_stood_still_does_not_end_it() -> None:
    engine = WatchedEngine()
    engine.step, engine.busy = step(0.02), False
    assert engine.first_stall(10.0)
    engine.now_s += 3600.0
    stall = engine.judge()
    assert stall is None or stall.lasted_s == 0.0


# --- what the step thread publishes, and the shell --------------------------------------------------------------------


class Ticking:
    """A clock that moves by a second with each look, so that moments differ."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def time_ns(self) -> int:
        return 0


class Worker:
    """Notes what its flight says while it computes, and can be made to hang."""

    def __init__(self) -> None:
        self.in_flight: InFlightSteps | None = None
        self.seen: list[RunningStep | None] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def facts(self) -> EngineFacts:
        return FACTS

    def run(self, plan: StepPlan) -> StepResult:
        self.seen.append(self.in_flight.running if self.in_flight is not None else None)
        self.entered.set()
        self.go.wait()
        return answer(plan)

    def close(self) -> None:
        pass


def plan(number: int, num_tokens: int = 4) -> StepPlan:
    return StepPlan(step=number, scheduled=shares(num_tokens=num_tokens), num_tokens=num_tokens)


def test_a_flight_says_which_step_runs_since_when_and_what_is_expected_of_it() -> None:
    worker = Worker()
    worker.go.set()
    in_flight = worker.in_flight = InFlightSteps(Executor(worker), Ticking())
    for number in (1, 2):
        assert in_flight.running is None
        in_flight.launch(plan(number))
        in_flight.collect()
    assert in_flight.running is None
    first, second = worker.seen
    assert first is not None
    assert second is not None
    assert (first.step, first.started_s, first.expected_s, first.basis) == (1, 1.0, 0.0, None)
    assert (second.step, second.started_s, second.expected_s) == (2, 4.0, 2.0)
    assert second.basis == Timing(2.0, plan(1).scheduled)


def test_time_in_which_the_step_thread_does_something_else_does_not_count() -> None:
    clock = Ticking()
    in_flight = InFlightSteps(Executor(Worker()), clock)
    assert in_flight.pause() is None
    in_flight.resume(None)
    assert in_flight.running is None
    in_flight.running = step(0.5)
    paused = in_flight.pause()
    assert in_flight.running is None
    clock.now_s = 100.0
    in_flight.resume(paused)
    assert in_flight.running == step(0.5)._replace(started_s=101.0)


class Held:
    """A clock that stands where it is put."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return 0


async def test_an_engine_that_stays_stalled_ends_with_13_and_says_where_its_threads_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock, codes = Held(), list[int]()
    monkeypatch.setattr(progress.sys, "__stderr__", None)
    steps = Engine(
        Executor(Worker()),
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=64),
        lambda report: None,
        clock=clock,
    ).in_flight
    monitor = ProgressMonitor(
        steps, ReportQueue(lambda report: None, wait=False), clock, on_host=True, end=codes.append
    )
    steps.running = step(0.02)
    stalled_s = 0.0
    while not codes:
        clock.now_s += BEAT_S
        stalled_s += BEAT_S if monitor.check() else 0.0
    assert codes == [EXIT_FAULT]
    assert stalled_s == pytest.approx(limits.STALL_EXIT_S, abs=2.5 * BEAT_S)
    assert [(record.levelname, record.message.split(":")[0]) for record in caplog.records] == [
        ("ERROR", "computing stands still"),
        ("CRITICAL", "the engine ends"),
    ]
    assert "step 1 has run for" in caplog.text
    assert "test_an_engine_that_stays_stalled" in capfd.readouterr().err


async def test_an_engine_that_goes_on_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = Held()
    steps = Engine(
        Executor(Worker()),
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=64),
        lambda report: None,
        clock=clock,
    ).in_flight
    monitor = ProgressMonitor(
        steps,
        ReportQueue(lambda report: None, wait=False),
        clock,
        on_host=True,
        end=lambda code: pytest.fail(str(code)),
    )
    steps.running = step(0.02)
    while not monitor.check():
        clock.now_s += BEAT_S
    steps.running = None
    assert not monitor.check()
    assert caplog.records[-1].message == "computing goes on"


# --- the event loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activity", "stalls"),
    [(Activity({1: 5}, False), True), (Activity({1: 5}, True), False), (None, False)],
    ids=["sleeps", "waits for a processor", "unknown"],
)
def test_an_event_loop_whose_thread_sleeps_while_results_wait_hangs(activity: Activity | None, stalls: bool) -> None:
    watchdog, waiting, now_s = DeliveryWatchdog(), WaitingReport(7), 0.0
    found: list[Stall] = []
    while now_s < 2 * limits.STEP_IDLE_S:
        now_s += BEAT_S
        found += [stall] if (stall := watchdog.judge(now_s, waiting, lambda: activity)) else []
    assert bool(found) == stalls
    assert not found or found[0].reason.startswith("the results of step 7 wait for the event loop")
    assert watchdog.judge(now_s + BEAT_S, WaitingReport(8), lambda: activity) is None
    assert watchdog.judge(now_s + 2 * BEAT_S, None, lambda: activity) is None


async def test_the_oldest_report_that_waits_is_known_to_other_threads() -> None:
    queue = ReportQueue(lambda report: None, wait=False)
    for number in (1, 2):
        queue.put(StepReport(step=number, outcomes=(), refused=(), joined=(), num_tokens=1, started_ns=0, ended_ns=0))
    oldest = queue.oldest()
    assert oldest is not None
    assert oldest.step == 1
    assert queue.oldest() is oldest
    await queue.empty()
    assert queue.oldest() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_thread_is_observed_alone() -> None:
    thread, stop = computing(None)
    try:
        assert thread.native_id is not None
        seen = observe_one(thread.native_id)
        assert seen is not None
        assert list(seen.ticks) == [thread.native_id]
    finally:
        stop.set()
        thread.join()


# --- real threads -----------------------------------------------------------------------------------------------------


def computing(work: "threading.Event | None") -> tuple[threading.Thread, threading.Event]:
    """A thread that waits for `work`, or computes until told to stop; and what tells it."""
    stop = work or threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=stop.wait if work is not None else spin, daemon=True)
    thread.start()
    return thread, stop


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_computes_and_one_that_waits_are_told_apart() -> None:
    waiting, stop_waiting = computing(threading.Event())
    spinning, stop_spinning = computing(None)
    try:
        assert waiting.native_id is not None
        assert spinning.native_id is not None
        first, began = observe(spinning.native_id), observe(waiting.native_id)
        while (later := observe(spinning.native_id)) == first or later is None:
            pass
        assert first is not None
        assert later.ready or later.ticks[spinning.native_id] > first.ticks[spinning.native_id]
        still = observe(waiting.native_id)
        assert began is not None
        assert still is not None
        assert still.ticks[waiting.native_id] == began.ticks[waiting.native_id]
        assert spinning.native_id not in still.ticks
    finally:
        stop_waiting.set()
        stop_spinning.set()


def test_without_a_step_thread_nothing_is_read() -> None:
    assert observe(None) is None
