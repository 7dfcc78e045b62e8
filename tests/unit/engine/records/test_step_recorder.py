"""Step events: what the engine tells of its steps, and that it tells nothing while nobody records."""

import pytest

from antiphon.services.engine.core.plan import CoreLimits, EngineFacts
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.records.step_recorder import StepRecorder
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared import limits
from antiphon.shared.messages import SequenceSteps
from antiphon.shared.observability.step_rows import STEP_COLUMNS, unpacked
from antiphon.shared.parameters.sampling import SamplingParams
from tests.unit.engine.test_loop import CountingWorker


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 10.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


class SmallWorker(CountingWorker):
    """Has blocks for one long sequence only."""

    def facts(self) -> EngineFacts:
        return EngineFacts(num_blocks=4, block_size=4, max_model_len=16, vocab_size=1000)


def spec(name: str, num_prompt: int = 5, max_tokens: int = 3, number: int = 0) -> SequenceSpec:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return SequenceSpec(
        sequence_id=name,
        prompt_token_ids=tuple(range(1, num_prompt + 1)),
        params=params,
        output_token_ids=(),
        block_hashes=(),
        cache_salt=b"",
        priority=0,
        arrival=number,
    )


def rows_of(sequence: SequenceSteps) -> list[tuple[int, ...]]:
    numbers = unpacked(sequence.rows)
    return [tuple(numbers[at : at + STEP_COLUMNS]) for at in range(0, len(numbers), STEP_COLUMNS)]


def engine_of(worker: CountingWorker, steps_per_report: int = 1) -> tuple[Engine, list[StepReport]]:
    reports: list[StepReport] = []
    limit = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64)
    return Engine.of_worker(worker, limit, reports.append, steps_per_report=steps_per_report), reports


@pytest.mark.parametrize("records", [False, True])
def test_reports_have_details_only_while_somebody_records(records):
    engine, reports = engine_of(CountingWorker())
    engine.record(records)
    engine.add(spec("a-0#1"))
    while engine.step():
        pass
    assert [bool(report.details) for report in reports] == [records] * 3


def test_the_events_say_which_tokens_a_step_computed_and_how_long_the_sequence_is_there():
    engine, reports = engine_of(CountingWorker())
    engine.record(True)
    clock = Hand()
    recorder = StepRecorder(clock)
    recorder.submitted("a-0#1")
    clock.now += 0.25
    recorder.submitted("b-0#2")
    for name in ("a-0#1", "b-0#2"):
        engine.add(spec(name))
    while engine.step():
        pass
    for report in reports:
        assert all(detail.ended_s >= detail.started_s for detail in report.details)
        recorder.add(report)
    steps, sequences = recorder.take()
    first, second, third = steps
    assert (first.num_tokens, second.num_tokens, first.step, third.step) == (10, 2, 1, 3)
    assert [(one.sequence_id, one.attempt) for one in sequences] == [("a-0", 1), ("b-0", 2)]
    for one, submitted_s in zip(sequences, (10.0, 10.25), strict=True):
        rows = rows_of(one)
        assert [row[0] for row in rows] == [1, 2, 3]
        assert [row[3:6] for row in rows] == [(0, 5, 1), (5, 1, 1), (6, 1, 1)], "position, tokens, output"
        for row, event, detail in zip(rows, steps, (each.details[0] for each in reports), strict=True):
            assert row[1] == max(0, round((detail.ended_s - submitted_s) * 1e6))
            assert row[2] == event.duration_us
            assert row[6:] == (event.num_sequences, event.num_tokens, event.num_waiting, event.num_free_blocks)
    assert recorder.take() == ([], [])


def test_a_report_of_several_steps_gives_an_event_for_each():
    engine, reports = engine_of(CountingWorker(), steps_per_report=4)
    engine.record(True)
    recorder = StepRecorder(Hand())
    recorder.submitted("a-0#1")
    recorder.submitted("b-0#1")
    engine.add(spec("a-0#1", max_tokens=6))
    engine.add(spec("b-0#1", max_tokens=3))
    while engine.step():
        pass
    for report in reports:
        recorder.add(report)
    steps, sequences = recorder.take()
    assert [one.step for one in steps] == [1, 2, 3, 4, 5, 6]
    outputs = [[row[5] for row in rows_of(one)] for one in sequences]
    assert outputs == [[1, 0, 0, 0, 4, 1], [1, 0, 2]], "that of a report is counted at the sequence's last step"


def test_a_preempted_sequence_is_named():
    engine, reports = engine_of(SmallWorker())
    engine.record(True)
    recorder = StepRecorder(Hand())
    for number, name in enumerate(("a-0#1", "b-0#1")):
        recorder.submitted(name)
        engine.add(spec(name, max_tokens=9, number=number))
    while engine.step():
        pass
    for report in reports:
        recorder.add(report)
    named = [ref.sequence_id for one in recorder.take()[0] for ref in one.preempted]
    assert named == ["b-0"] * engine.counters().preemptions != []


def test_events_are_due_after_a_while_or_when_there_are_many():
    clock = Hand()
    recorder = StepRecorder(clock)
    engine, reports = engine_of(CountingWorker())
    engine.record(True)
    engine.add(spec("a-0#1"))
    engine.step()
    assert not recorder.add(reports[0])
    clock.now += 1.01 * limits.STEP_EVENTS_S
    assert recorder.add(reports[0])
    recorder.take()
    due = [recorder.add(reports[0]) for _ in range(limits.STEP_EVENTS_MAX)]
    assert due == [False] * (limits.STEP_EVENTS_MAX - 1) + [True]


def test_it_is_needed_while_a_recorded_sequence_is_live():
    recorder = StepRecorder(Hand())
    assert not recorder.is_needed
    recorder.submitted("a-0#1")
    recorder.ended("other-0#1")
    assert recorder.is_needed
    recorder.ended("a-0#1")
    assert not recorder.is_needed


def test_sequences_that_are_not_recorded_are_only_counted():
    engine, reports = engine_of(CountingWorker())
    engine.record(True)
    recorder = StepRecorder(Hand())
    recorder.submitted("a-0#1")
    for name in ("a-0#1", "b-0#1"):
        engine.add(spec(name))
    engine.step()
    recorder.add(reports[0])
    [event], [sequence] = recorder.take()
    assert (sequence.sequence_id, event.num_sequences, event.num_tokens) == ("a-0", 2, 10)
