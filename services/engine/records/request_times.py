"""Measures how long sequences wait, are prefilled and decode in this engine, for the metrics.

Durations are differences of this process's monotonic clock. The wait lasts from the arrival until the sequence joins
the batch (a sequence that is preempted before its first token joins several times; the last time counts). The prefill
lasts from then to the first token, and the decoding from the first to the last token.
"""

from dataclasses import dataclass

from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.clock import Clock
from antiphon.shared.messages import EngineHistograms
from antiphon.shared.observability.histograms import PREEMPTIONS, REQUEST_SECONDS, STEP_TOKENS, Histogram


@dataclass(slots=True)
class _Life:
    arrived_s: float
    placed_s: float | None = None
    first_s: float | None = None
    num_preemptions: int = 0


class RequestTimes:
    """The times of the live sequences, by the core's sequence id, and the histograms of those that have ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lives: dict[str, _Life] = {}
        self._step_tokens = Histogram(STEP_TOKENS)
        self._queue, self._prefill, self._decode, self._inference = (Histogram(REQUEST_SECONDS) for _ in range(4))
        self._preemptions = Histogram(PREEMPTIONS)

    def submitted(self, sequence: str) -> None:
        """Records the arrival of a sequence."""
        self._lives[sequence] = _Life(self._clock.monotonic())

    def step(self, report: StepReport) -> None:
        """Records the tokens of a step, and the sequences that joined or got their first token in it."""
        if report.num_tokens:
            self._step_tokens.observe(report.num_tokens)
        duration_s, now = (report.ended_ns - report.started_ns) / 1e9, self._clock.monotonic()
        for sequence in report.joined:
            if (life := self._lives.get(sequence)) is not None and life.first_s is None:
                life.placed_s = max(life.arrived_s, now - duration_s)
        for sequence in report.preempted:
            if (life := self._lives.get(sequence)) is not None:
                life.num_preemptions += 1
        for outcome in report.outcomes:
            if (life := self._lives.get(outcome.sequence_id)) is not None and life.first_s is None:
                life.first_s = now

    def forget(self, sequence: str) -> None:
        """Drops a sequence that continues on another engine or in a later attempt."""
        self._lives.pop(sequence, None)

    def ended(self, sequence: str) -> None:
        """Adds the times of an ended sequence to the histograms, without phases that it has not reached."""
        life, now = self._lives.pop(sequence, None), self._clock.monotonic()
        if life is None or life.placed_s is None:
            return
        self._preemptions.observe(life.num_preemptions)
        self._queue.observe(life.placed_s - life.arrived_s)
        self._inference.observe(now - life.placed_s)
        if life.first_s is not None:
            self._prefill.observe(max(0.0, life.first_s - life.placed_s))
            self._decode.observe(now - life.first_s)

    def histograms(self) -> EngineHistograms:
        """Returns the counts so far."""
        return EngineHistograms(
            step_tokens=self._step_tokens.counts(),
            queue_s=self._queue.counts(),
            inference_s=self._inference.counts(),
            prefill_s=self._prefill.counts(),
            decode_s=self._decode.counts(),
            preemptions=self._preemptions.counts(),
        )
