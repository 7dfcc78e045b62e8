"""The step loop: several steps in one report give what single steps give; a first token never waits for others."""

import asyncio
import os
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.steps import loop as loop_module
from antiphon.services.engine.steps.loop import StepLoop, StepReport, ThreadedLoop
from antiphon.services.engine.steps.reports import ReportQueue
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams

FACTS = EngineFacts(num_blocks=64, block_size=4, max_model_len=100, vocab_size=1000)


class CountingWorker:
    """Gives every sequence the number of the step."""

    def facts(self) -> EngineFacts:
        return FACTS

    def run(self, plan: StepPlan) -> StepResult:
        count = sum(share.samples for share in plan.scheduled)
        return StepResult(
            step=plan.step, token_ids=((plan.step,),) * count, logprobs=((SampledLogprobs(-1.0),),) * count
        )

    def close(self) -> None:
        pass


def loop_of(steps_a_report: int) -> tuple[StepLoop, list[StepReport]]:
    reports: list[StepReport] = []
    return loop_over(
        CountingWorker(), CoreLimits(max_num_seqs=4, max_num_batched_tokens=64), reports.append, steps_a_report
    ), reports


def loop_over(
    worker: CountingWorker, limits: CoreLimits, report: Callable[[StepReport], None], steps_a_report: int = 1
) -> StepLoop:
    return StepLoop(Core(limits, FACTS), Executor(worker), SystemClock(), report, steps_a_report)


def add(loop: StepLoop, name: str, max_tokens: int, length: int = 5) -> None:
    loop.add(
        SequenceSpec(
            sequence_id=name, prompt_token_ids=(1,) * length, params=SamplingParams(max_tokens=max_tokens, logprobs=0)
        )
    )


class PickyWorker(CountingWorker):
    """Takes a plan while another one runs, unless the number of the running one is divisible by three."""

    def __init__(self) -> None:
        self.under_way = list[StepPlan]()

    def takes_another(self) -> bool:
        return len(self.under_way) < 2 and all(plan.step % 3 for plan in self.under_way)

    def launch(self, plan: StepPlan) -> None:
        assert self.takes_another()
        self.under_way.append(plan)

    def collect(self) -> StepResult:
        return self.run(self.under_way.pop(0))


def test_a_worker_gets_a_plan_only_if_it_takes_another() -> None:
    worker, reports = PickyWorker(), list[StepReport]()
    loop = loop_over(worker, CoreLimits(max_num_seqs=4, max_num_batched_tokens=64), reports.append)
    add(loop, "a", 20)
    most = 0
    while loop.step():
        most = max(most, len(worker.under_way))
    assert most == 1  # a second one was under way when the first was collected
    assert [outcome.token_ids for report in reports for outcome in report.outcomes] == [(n,) for n in range(1, 21)]


@pytest.mark.spec("S-SRV-053")
@pytest.mark.parametrize("steps_a_report", [1, 2, 4, 100])
def test_outputs_do_not_depend_on_how_many_steps_share_a_report(steps_a_report: int) -> None:
    loop, reports = loop_of(steps_a_report)
    add(loop, "a", 9)
    add(loop, "b", 6)
    while loop.step():
        pass
    output: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, str] = {}
    for report in reports:
        for outcome in report.outcomes:
            assert outcome.position == len(output[outcome.sequence_id])
            assert len(outcome.logprobs) == len(outcome.token_ids)
            output[outcome.sequence_id] += outcome.token_ids
            ends |= {outcome.sequence_id: outcome.finish_reason} if outcome.finish_reason else {}
    assert output == {"a": [*range(1, 10)], "b": [*range(1, 7)]}
    assert ends == {"a": "length", "b": "length"}
    last = {outcome.sequence_id: outcome for report in reports for outcome in report.outcomes}
    assert {name: outcome.cumulative_logprob for name, outcome in last.items()} == {"a": -9.0, "b": -6.0}


@pytest.mark.spec("S-SRV-053")
def test_tokens_of_several_steps_leave_together_and_a_first_token_at_once() -> None:
    loop, reports = loop_of(3)
    add(loop, "a", 8)
    loop.step()
    loop.step()
    add(loop, "b", 1)
    loop.step()
    loop.step()
    given = [[(each.sequence_id, each.token_ids) for each in report.outcomes] for report in reports]
    assert given == [[("a", (1,))], [("a", (2, 3, 4))], [("a", (5,)), ("b", (5,))], [("a", (6, 7, 8))]]


def test_a_refused_sequence_is_reported_without_a_step() -> None:
    loop, reports = loop_of(2)
    add(loop, "a", 1, length=200)
    assert not loop.step()
    ((name, error),) = reports[0].refused
    assert name == "a"
    assert isinstance(error, ServiceError)
    assert not loop.step()
    assert len(reports) == 1


@pytest.mark.spec("S-SRV-055")
@pytest.mark.parametrize("wait", [False, True])
async def test_reports_leave_in_order_beside_the_steps_or_before_the_next_one(wait: bool) -> None:
    published: list[int] = []
    published_at_return: list[int] = []
    queue = ReportQueue(lambda report: published.append(report.step), wait=wait)

    def steps() -> None:
        for step in range(1, 6):
            queue.put(StepReport(step=step, outcomes=(), refused=(), joined=(), num_tokens=1, started_ns=0, ended_ns=0))
            published_at_return.append(len(published))

    publisher = asyncio.create_task(queue.run())
    if wait:
        await asyncio.to_thread(steps)
    else:
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()  # the event loop stands still, so nothing can be published
        assert published_at_return == [0] * 5
        await queue.empty()
    publisher.cancel()
    assert published == [1, 2, 3, 4, 5]
    assert not wait or published_at_return == [1, 2, 3, 4, 5]


async def test_a_report_that_cannot_be_published_ends_the_queue() -> None:
    published: list[int] = []

    def publish(report: StepReport) -> None:
        if report.step == 2:
            raise AssertionError("broken")
        published.append(report.step)

    queue = ReportQueue(publish, wait=True)
    publisher = asyncio.create_task(queue.run())
    for step in (1, 2, 3):
        await asyncio.to_thread(
            queue.put, StepReport(step=step, outcomes=(), refused=(), joined=(), num_tokens=1, started_ns=0, ended_ns=0)
        )
    with pytest.raises(AssertionError, match="broken"):
        await publisher
    assert published == [1]


def test_a_loop_without_work_for_a_while_says_so_once_until_it_has_worked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "REST_S", 0.01)
    loop, _ = loop_of(1)
    rests: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = ThreadedLoop(loop, lambda error: None, lambda: rests.put(loop.core.counters().generation_tokens))
    thread.start()
    for count in (3, 6):
        add(loop, f"s{count}", 3)
        assert rests.get(timeout=60) == count
    thread.stop()
    asyncio.run(thread.join(5))
    assert rests.empty()


def _leak_a_block(loop: StepLoop) -> None:
    loop.core.pool.allocate(1)


def _strand_a_sequence(loop: StepLoop) -> None:
    """A sequence that is live and in no queue: it would never run."""
    loop.core.add(SequenceSpec(sequence_id="lost", prompt_token_ids=(1,), params=SamplingParams(max_tokens=1)))
    waiting = loop.core.residency.waiting
    head = waiting.head()
    assert head is not None
    waiting.pop(head, 1)


@pytest.mark.parametrize(
    ("damage", "told"), [(_leak_a_block, "1 blocks are held by no sequence"), (_strand_a_sequence, "1 sequences wait")]
)
def test_an_idle_loop_ends_with_an_error_when_its_core_is_inconsistent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage, told: str
) -> None:
    monkeypatch.setattr(loop_module, "REST_S", 0.01)
    loop, _ = loop_of(1)
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    rests: queue.SimpleQueue[None] = queue.SimpleQueue()
    thread = ThreadedLoop(loop, ends.put, lambda: rests.put(None))
    add(loop, "a", 3)
    while loop.step():
        pass
    damage(loop)
    add(loop, "b", 3)  # the check follows work
    thread.start()
    error = ends.get(timeout=60)
    assert isinstance(error, AssertionError)
    assert told in str(error)
    assert told in caplog.text
    assert rests.empty()


def test_sequences_that_gather_for_a_batch_are_no_violation() -> None:
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, max_batch_size=4, batch_wait_timeout=5.0)
    loop = loop_over(CountingWorker(), limits, lambda report: None)
    add(loop, "a", 3)
    assert not loop.step()
    loop.check_idle()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class")
def test_the_thread_that_computes_takes_its_turn_at_once_though_the_process_waits_for_it() -> None:
    classes: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop, _ = loop_of(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        thread = ThreadedLoop(loop, lambda _: classes.put(os.sched_getscheduler(0)), lambda: None)
        thread.start()
        thread.stop()
        assert classes.get(timeout=60) == os.SCHED_OTHER
        asyncio.run(thread.join(5))
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
