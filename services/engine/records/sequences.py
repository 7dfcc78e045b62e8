"""Tells the recorders of an engine what happens to its sequences. Called by the actor."""

from collections import defaultdict
from collections.abc import Callable

from antiphon.services.engine.records.request_times import RequestTimes
from antiphon.services.engine.records.step_recorder import StepRecorder
from antiphon.services.engine.records.tracing import SequenceTraces
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.clock import Clock
from antiphon.shared.messages import FinishReason, SequenceSteps, StepEvent, Submit
from antiphon.shared.observability import telemetry


class SequenceRecords:
    """The records of one engine, by the core's sequence ids.

    `record` turns the details of steps in the loop's reports on or off.
    """

    def __init__(self, clock: Clock, record: Callable[[bool], None]) -> None:
        self.times = RequestTimes(clock)
        self.finished: dict[str, int] = defaultdict(int)
        """Numbers of sequences that have ended, by reason."""
        self._traces = SequenceTraces(clock)
        self._steps = StepRecorder(clock)
        self._record = record

    def submitted(self, sequence: str, submit: Submit, num_prompt_tokens: int) -> None:
        """Records the arrival of a sequence."""
        if submit.traceparent:
            headers = telemetry.trace_headers(submit.traceparent, submit.tracestate)
            self._traces.submitted(sequence, num_prompt_tokens, headers)
        self.times.submitted(sequence)
        if submit.recorded:
            self._steps.submitted(sequence)
            self._record(True)

    def step(self, report: StepReport) -> bool:
        """Records a step. Returns whether it is time to publish the recorded steps (`take_steps`)."""
        if self._traces.lives:
            self._traces.step(report)
        self.times.step(report)
        return bool(report.details) and self._steps.add(report)

    def ended(self, sequence: str, reason: FinishReason) -> None:
        """Records the end of a sequence."""
        self.finished[reason] += 1
        self.times.ended(sequence)
        if self._traces.lives:
            self._traces.ended(sequence, reason)
        self._forget_steps(sequence)

    def superseded(self, sequence: str) -> None:
        """Forgets an attempt that is followed by a later one."""
        self.times.forget(sequence)
        self._forget_steps(sequence)

    def take_steps(self) -> tuple[list[StepEvent], list[SequenceSteps]]:
        """See `StepRecorder.take`."""
        return self._steps.take()

    def _forget_steps(self, sequence: str) -> None:
        self._steps.ended(sequence)
        if not self._steps.is_needed:
            self._record(False)
