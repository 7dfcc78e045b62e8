"""Trace spans of a sequence in the engine: queue, prefill, decode. Reported when the sequence ends.

Nothing is kept while tracing is off.
"""

from dataclasses import dataclass

from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.bus.transport import Headers
from antiphon.shared.clock import Clock
from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Names


@dataclass(slots=True, kw_only=True)
class _Life:
    headers: Headers | None
    num_prompt_tokens: int
    submitted_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0


class SequenceTraces:
    """Times of each live sequence that is traced, by the core's sequence id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.lives: dict[str, _Life] = {}

    def submitted(self, sequence: str, num_prompt_tokens: int, headers: Headers | None) -> None:
        """Records that a sequence has entered the queue. Does nothing without tracing."""
        if telemetry.enabled():
            self.lives[sequence] = _Life(
                headers=headers, num_prompt_tokens=num_prompt_tokens, submitted_ns=self._clock.time_ns()
            )

    def step(self, report: StepReport) -> None:
        """Records the sequences that joined in a step, their first tokens and their token counts."""
        for sequence in report.joined:
            life = self.lives.get(sequence)
            if life is not None and not life.scheduled_ns:
                life.scheduled_ns = report.started_ns
        for outcome in report.outcomes:
            life = self.lives.get(outcome.sequence_id)
            if life is not None:
                life.first_token_ns = life.first_token_ns or report.ended_ns
                life.num_tokens += len(outcome.token_ids)
                life.num_cached_tokens = outcome.num_cached_tokens

    def ended(self, sequence: str, reason: str) -> None:
        """Reports the spans of a sequence that has ended."""
        life = self.lives.pop(sequence, None)
        if life is None:
            return
        now = self._clock.time_ns()
        scheduled, first = life.scheduled_ns or now, life.first_token_ns or now
        telemetry.record_span(Names.QUEUE, life.submitted_ns, scheduled, parent=life.headers)
        if life.scheduled_ns:
            prefill = {
                Names.USAGE_INPUT_TOKENS: life.num_prompt_tokens,
                Names.USAGE_CACHE_READ_INPUT_TOKENS: life.num_cached_tokens,
            }
            telemetry.record_span(Names.PREFILL, scheduled, first, parent=life.headers, attributes=prefill)
        if life.first_token_ns:
            decode = {Names.USAGE_OUTPUT_TOKENS: life.num_tokens, Names.RESPONSE_FINISH_REASONS: (reason,)}
            telemetry.record_span(Names.DECODE, first, now, parent=life.headers, attributes=decode)
