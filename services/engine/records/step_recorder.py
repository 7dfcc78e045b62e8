"""Collects the events of an engine's steps (`StepEvents`) for the gateways, which record requests.

Nothing is collected, and the step loop computes no details, while no recorded sequence is live (`Submit.recorded`).
Times are differences of this process's monotonic clock.
"""

from collections.abc import Sequence

from antiphon.services.engine.sequence_table import of_core
from antiphon.services.engine.steps.loop import StepDetail, StepReport
from antiphon.shared import limits
from antiphon.shared.clock import Clock
from antiphon.shared.messages import KvOrigin, SequenceRef, SequenceSteps, StepEvent
from antiphon.shared.observability.step_rows import pack_sequence, pack_step

_MICROSECONDS = 1e6


class _Live:
    """A live recorded sequence: its arrival in microseconds, its id on the bus, its attempt, and its unsent rows."""

    __slots__ = ("arrived_us", "attempt", "origin", "rows", "sequence_id")

    def __init__(self, arrived_us: float, sequence_id: str, attempt: int) -> None:
        self.arrived_us, self.sequence_id, self.attempt = arrived_us, sequence_id, attempt
        self.origin: KvOrigin | None = None
        """Not sent yet."""
        self.rows = bytearray()
        """See `antiphon.shared.observability.step_rows`."""


class StepRecorder:
    """The live recorded sequences, and the steps that have not been sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}
        """By the id of the sequence in the core."""
        self._steps: list[StepEvent] = []
        self._computed: list[_Live] = []
        """The sequences of the collected steps, which may have ended since."""
        self._oldest_s = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether any live sequence is recorded."""
        return bool(self._live)

    def submitted(self, sequence: str) -> None:
        """Records the arrival of a sequence whose steps are recorded."""
        self._live[sequence] = _Live(self._clock.monotonic() * _MICROSECONDS, *of_core(sequence))

    def ended(self, sequence: str) -> None:
        """Forgets a sequence that has ended. Does nothing for one that is not recorded."""
        self._live.pop(sequence, None)

    def add(self, report: StepReport) -> bool:
        """Adds the steps of a report. Returns whether it is time to send the collected steps.

        To be called before the sequences that end in the report are passed to `ended`.
        """
        if not self._steps:
            self._oldest_s = self._clock.monotonic()
        num_output = {outcome.sequence_id: len(outcome.token_ids) for outcome in report.outcomes}
        for outcome in report.outcomes:
            if outcome.kv_origin is not None and (live := self._live.get(outcome.sequence_id)) is not None:
                live.origin = outcome.kv_origin
        for detail, last in zip(report.details, _last_here(report.details), strict=True):
            event = self._event(detail)
            self._steps.append(event)
            self._add_rows(detail, event, num_output, last)
        is_late = self._clock.monotonic() - self._oldest_s >= limits.STEP_EVENTS_S
        return is_late or len(self._steps) >= limits.STEP_EVENTS_MAX

    def take(self) -> tuple[list[StepEvent], list[SequenceSteps]]:
        """Returns the collected steps and what they did for each recorded sequence, and forgets them."""
        steps, self._steps = self._steps, []
        computed, self._computed = self._computed, []
        found = [SequenceSteps(one.sequence_id, one.attempt, bytes(one.rows), one.origin) for one in computed]
        for one in computed:
            one.rows.clear()
            one.origin = None
        return steps, found

    def _event(self, detail: StepDetail) -> StepEvent:
        return StepEvent(
            step=detail.step,
            duration_us=_microseconds(detail.ended_s - detail.started_s),
            num_tokens=sum(num_tokens for _, _, num_tokens in detail.scheduled),
            num_running=detail.num_running,
            num_waiting=detail.num_waiting,
            num_free_blocks=detail.num_free_blocks,
            num_sequences=len(detail.scheduled),
            preempted=self._recorded(detail.preempted) if detail.preempted else (),
        )

    def _recorded(self, sequences: Sequence[str]) -> tuple[SequenceRef, ...]:
        return tuple(SequenceRef(*of_core(name)) for name in map(_member, sequences) if name in self._live)

    def _add_rows(
        self, detail: StepDetail, event: StepEvent, num_output: dict[str, int], last: frozenset[str] | None
    ) -> None:
        """Adds a step's row of each recorded sequence. `last`: see `_last_here`."""
        step, duration_us, ended_us = event.step, event.duration_us, detail.ended_s * _MICROSECONDS
        whole = pack_step(event.num_sequences, event.num_tokens, event.num_waiting, event.num_free_blocks)
        for name, start, num_tokens in detail.scheduled:
            live = self._live.get(name)
            if live is None:
                name = _member(name)
                live = self._live.get(name)
                if live is None:
                    continue
            age_us = max(0, round(ended_us - live.arrived_us))
            # A report of several steps has each sequence's output merged: it is counted at the sequence's last step.
            output = num_output.pop(name, 0) if last is None or name in last else 0
            if not live.rows:
                self._computed.append(live)
            live.rows += pack_sequence(step, age_us, duration_us, start, num_tokens, output) + whole


def _last_here(details: Sequence[StepDetail]) -> list[frozenset[str] | None]:
    """Returns for each step its sequences that are in none of the later steps; None: all of its sequences."""
    if len(details) == 1:
        return [None]
    seen, found = set[str](), list[frozenset[str] | None]()
    for detail in reversed(details):
        names = {_member(beam) for beam, _, _ in detail.scheduled}
        found.append(frozenset(names - seen))
        seen |= names
    return found[::-1]


def _member(core_sequence_id: str) -> str:
    """Returns the id of a beam's sequence: the part of the beam's id before a space. Other ids are unchanged."""
    return core_sequence_id.partition(" ")[0]


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * _MICROSECONDS))
