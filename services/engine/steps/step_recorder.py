"""Collects the events of an engine's steps (`StepEvents`) for the gateways, which record requests.

Nothing is collected, and the step loop computes no details, while no recorded sequence is live (`Submit.recorded`).
Times are differences of this process's monotonic clock.
"""

from collections.abc import Iterator

from services.engine.steps.loop import StepDetail, StepReport
from shared import limits
from shared.clock import Clock
from shared.messages import SequenceRef, SequenceStep, StepEvent

_MICROSECONDS = 1e6


class StepRecorder:
    """The arrival times of live recorded sequences, and the steps that have not been sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._arrived: dict[str, tuple[float, str, int]] = {}
        """For each live recorded sequence, by the core's id: its arrival in seconds, its id on the bus, its attempt."""
        self._steps: list[StepEvent] = []
        self._oldest_s = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether any live sequence is recorded."""
        return bool(self._arrived)

    def submitted(self, sequence: str) -> None:
        """Records the arrival of a sequence whose steps are recorded."""
        self._arrived[sequence] = (self._clock.monotonic(), *_split(sequence))

    def ended(self, sequence: str) -> None:
        """Forgets a sequence that has ended. Does nothing for one that is not recorded."""
        self._arrived.pop(sequence, None)

    def add(self, report: StepReport) -> bool:
        """Adds the steps of a report. Returns whether it is time to send the collected steps.

        To be called before the sequences that end in the report are passed to `ended`.
        """
        if not self._steps:
            self._oldest_s = self._clock.monotonic()
        num_output = {outcome.sequence_id: len(outcome.token_ids) for outcome in report.outcomes}
        # A report of several steps has their output merged; it is counted at the last step.
        self._steps += [self._event(detail, num_output) for detail in reversed(report.details)][::-1]
        is_late = self._clock.monotonic() - self._oldest_s >= limits.STEP_EVENTS_S
        return is_late or len(self._steps) >= limits.STEP_EVENTS_MAX

    def take(self) -> list[StepEvent]:
        """Returns the collected steps and forgets them."""
        steps, self._steps = self._steps, []
        return steps

    def _event(self, detail: StepDetail, num_output: dict[str, int]) -> StepEvent:
        return StepEvent(
            detail.step,
            _microseconds(detail.ended_s - detail.started_s),
            sum(num_tokens for _, _, num_tokens in detail.scheduled),
            detail.num_running,
            detail.num_waiting,
            detail.num_free_blocks,
            len(detail.scheduled),
            tuple(self._shares(detail, num_output)),
            tuple(SequenceRef(*_split(name)) for name in map(_member, detail.preempted) if name in self._arrived),
        )

    def _shares(self, detail: StepDetail, num_output: dict[str, int]) -> Iterator[SequenceStep]:
        for beam, start, num_tokens in detail.scheduled:
            name = _member(beam)
            found = self._arrived.get(name)
            if found is not None:
                arrived_s, sequence_id, attempt = found
                age_us = _microseconds(detail.ended_s - arrived_s)
                yield SequenceStep(sequence_id, attempt, start, num_tokens, num_output.pop(name, 0), age_us)


def _member(core_sequence_id: str) -> str:
    """Returns the sequence id of a beam, whose own id appends a space and more; other ids are returned unchanged."""
    return core_sequence_id.partition(" ")[0]


def _split(core_sequence_id: str) -> tuple[str, int]:
    sequence_id, _, attempt = core_sequence_id.rpartition("#")
    return sequence_id, int(attempt)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * _MICROSECONDS))
