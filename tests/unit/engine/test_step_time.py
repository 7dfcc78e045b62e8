"""How long steps take, and when the next one is planned."""

import pytest

from antiphon.services.engine.core.plan import EngineFacts, ScheduledSequence, StepPlan, StepResult
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.steps.in_flight import LEAD_S, LEAD_SHARE, InFlightSteps
from antiphon.services.engine.steps.step_time import StepTimeEstimator
from antiphon.services.engine.worker.interface import UNDER_WAY_MAX

FACTS = EngineFacts(num_blocks=8, block_size=4, max_model_len=100, vocab_size=1000)


def plan(num_tokens: int, step: int = 1) -> StepPlan:
    return StepPlan(
        step=step,
        scheduled=(ScheduledSequence(row=0, start=0, num_tokens=num_tokens, samples=True),),
        num_tokens=num_tokens,
    )


def test_of_a_size_that_nobody_has_seen_nothing_is_expected() -> None:
    estimator = StepTimeEstimator()
    estimator.took(plan(8), 0.5)
    assert estimator.expected(plan(1)) == estimator.expected(plan(512)) == 0.0


@pytest.mark.parametrize(
    ("seen", "asked", "expected_s"), [(8, 9, 1.0), (8, 8, 1.0), (1024, 1536, 1.5), (1024, 1025, 1.0)]
)
def test_many_tokens_take_longer_with_each_and_few_do_not(seen: int, asked: int, expected_s: float) -> None:
    estimator = StepTimeEstimator()
    estimator.took(plan(seen), 1.0)
    assert estimator.expected(plan(asked)) == pytest.approx(expected_s, rel=0.01)


def test_the_shorter_of_the_last_two_steps_of_a_size_is_what_counts() -> None:
    estimator, expected_s = StepTimeEstimator(), []
    for seconds in (1.0, 3.0, 2.0, 4.0, 4.0):
        estimator.took(plan(4), seconds)
        expected_s.append(estimator.expected(plan(5)))
    assert expected_s == [1.0, 1.0, 2.0, 2.0, 4.0]


class Device:
    """A pipelined worker on a clock of its own. A step runs for `step_s` once it is launched and none runs."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s, self.idle_s = step_s, 0.0, 0.0
        self._ends_s: list[float] = []
        self._last_end_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return round(self.now_s * 1e9)

    def facts(self) -> EngineFacts:
        return FACTS

    def takes_another(self) -> bool:
        return len(self._ends_s) < UNDER_WAY_MAX

    def launch(self, plan: StepPlan) -> None:
        self.idle_s += max(0.0, self.now_s - self._last_end_s)
        self._last_end_s = max(self._last_end_s, self.now_s) + self.step_s
        self._ends_s.append(self._last_end_s)

    def collect(self) -> StepResult:
        self.now_s = max(self.now_s, self._ends_s.pop(0))
        return StepResult(step=1)

    def run(self, plan: StepPlan) -> StepResult:
        raise AssertionError("it is asked to launch and to collect")

    def close(self) -> None:
        pass


class Planner:
    """The step loop's part: waits, plans for `plan_s`, launches, lands."""

    def __init__(self, step_s: float, plan_s: float) -> None:
        self.device = Device(step_s)
        self.plan_s = plan_s
        self.in_flight = InFlightSteps(Executor(self.device), self.device)
        self.waited_s: list[float] = []

    def steps(self, count: int) -> float:
        """Runs so many; the time that the device had nothing to do meanwhile."""
        idle_s = self.device.idle_s
        for _ in range(count):
            while not self.in_flight.full:
                self.waited_s.append(self.in_flight.seconds_to_plan())
                self.device.now_s += self.waited_s[-1] + self.plan_s
                self.in_flight.launch(plan(4))
            self.in_flight.collect()
        return self.device.idle_s - idle_s


def test_the_next_plan_is_made_shortly_before_the_step_that_runs_should_end() -> None:
    planner = Planner(step_s=0.050, plan_s=0.001)
    planner.steps(20)
    assert planner.steps(50) == 0.0
    assert planner.waited_s[-1] == pytest.approx(0.050 * (1 - LEAD_SHARE) - LEAD_S - planner.plan_s, abs=0.002)


@pytest.mark.parametrize("plan_s", [0.0005, 0.002, 0.006, 0.0099])
def test_a_device_is_never_idle_however_long_planning_takes(plan_s: float) -> None:
    planner = Planner(step_s=0.010, plan_s=plan_s)
    planner.steps(30)
    assert planner.steps(100) <= 100 * 0.010 * 0.01


def test_a_step_that_took_far_too_long_leaves_the_device_idle_no_longer() -> None:
    planner = Planner(step_s=0.010, plan_s=0.001)
    planner.steps(20)
    planner.device.step_s = 1.0
    planner.steps(1)
    planner.device.step_s = 0.010
    assert planner.steps(100) == 0.0


def test_a_planning_that_took_far_too_long_is_forgotten() -> None:
    planner = Planner(step_s=0.050, plan_s=0.001)
    planner.steps(10)
    planner.plan_s = 0.5
    planner.steps(1)
    planner.plan_s = 0.001
    planner.steps(60)
    assert planner.steps(50) == 0.0
    assert planner.waited_s[-1] > 0.030
