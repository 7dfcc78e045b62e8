"""The record of one request. It is bounded: events beyond a limit of `antiphon.shared.limits` are only counted."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.services.gateway.path.record import RecordedRequest, RequestFacts
from antiphon.shared import limits
from antiphon.shared.messages import KvOrigin, StepEvent, UsageOutcome
from antiphon.shared.observability.step_rows import STEP_COLUMNS

_MICROSECONDS = 1e6
TURN_SHOWN_S = 1e-3
"""A shorter wait for a turn counts as part of the admission."""
PIECE_COLUMNS = 2
"""Values for one piece of output: seconds of the gateway's clock (`RequestRecord.since_us`), number of tokens."""
ToldStep = tuple[float, StepEvent]
"""When a step was reported to the gateway (seconds of its monotonic clock), and the step."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One placement of a sequence on an engine. Times in microseconds since the arrival of the request."""

    number: int
    engine: str
    detokenizer: str
    placed_us: int
    places: int = 0
    """Maximum number of sequences in the engine's batch; 0: unknown."""
    block_size: int = 0
    """Tokens in a KV block of the engine; 0: unknown."""
    batch_size_before: int | None = None
    """Sequences in the engine's batch when the sequence had to wait for the last time; None: unknown."""
    free_blocks_before: int | None = None
    """The engine's free KV blocks at that time; None: unknown."""
    accepted_us: int | None = None
    lost_us: int | None = None
    reason: str = ""
    origin: KvOrigin | None = None
    """Where the KV of its prompt came from; None: unknown."""
    steps: "array[int]" = field(default_factory=lambda: array("Q"))
    """STEP_COLUMNS numbers for each step."""
    preempted_before: set[int] = field(default_factory=set[int])
    """Numbers of the steps before which the sequence was preempted."""

    def waited_during(self, steps: list[StepEvent]) -> None:
        """Adds the engine's load during the wait for the first step: at the third-last and second-last step before it.

        An engine plans a step when either the last or the second-last step before it has ended. The room that it found
        then was enough for the sequence to begin; the room after the step before that one was not. It is unknown which
        of the two cases applies, so the smaller room of the two counts. The last step is not used, because the sequence
        may already have had its place and its blocks when it ended.
        """
        if steps:
            self.batch_size_before = max(max(one.num_sequences, one.num_running) for one in steps)
            self.free_blocks_before = min(one.num_free_blocks for one in steps)


@dataclass(slots=True)
class SequenceRecord:
    """The record of one sequence. `arrived` and `written` have PIECE_COLUMNS numbers for each piece of output."""

    attempts: list[Attempt] = field(default_factory=list[Attempt])
    arrived: "array[float]" = field(default_factory=lambda: array("d"))
    written: "array[float]" = field(default_factory=lambda: array("d"))

    def attempt(self, number: int) -> Attempt | None:
        """Returns the attempt with this number; None if it is not recorded."""
        if self.attempts and self.attempts[-1].number == number:
            return self.attempts[-1]  # nearly all events belong to the newest attempt
        return next((one for one in reversed(self.attempts) if one.number == number), None)


class RequestRecord(RecordedRequest):
    """The record of one request.

    `received_s`: time of its arrival on the monotonic clock `now`; `created`: the same in Unix seconds.
    """

    def __init__(
        self,
        facts: RequestFacts,
        received_s: float,
        now: Callable[[], float],
        on_end: "Callable[[RequestRecord], None]",
        on_content: "Callable[[RequestRecord], None] | None" = None,
    ) -> None:
        """`on_content` is called when the content is known; None: it is not kept."""
        self.facts = facts
        self.created = time.time() - max(0.0, now() - received_s)
        self.sequences: dict[int, SequenceRecord] = {}
        self.turn_us = int(facts.turn_s * _MICROSECONDS) if facts.turn_s >= TURN_SHOWN_S else None
        self.admitted_us: int | None = None
        self.tokenizer = ""
        """The tokenizer that answered last; empty: unknown."""
        self.silent_tokenizers: list[tuple[str, float]] = []
        """The tries without an answer: name of the tokenizer, empty if unknown, and the seconds that it was given."""
        self.tokenized_us: int | None = None
        self.ended_us: int | None = None
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.detokenizer_us = 0
        self.outcome: UsageOutcome | None = None
        """None while the request is in progress."""
        self.error_code = ""
        """The code of the error that it failed with, or who cancelled it (`explanation.ENDINGS`)."""
        self.finish_reasons: tuple[str, ...] = ()
        self.num_steps = self.num_pieces = self.num_marks = 0
        """Events so far, those that were not kept included."""
        self.num_lists = 0
        """Number of the recorder's lists of finished requests that have this record."""
        self._received_s = received_s
        self._now, self._on_end, self._on_content = now, on_end, on_content
        self.keeps_content = on_content is not None
        self.data = b""
        """The content as JSON; empty if it is not kept, or not any more."""
        self.snapshot: Callable[[], bytes] | None = None
        """Returns the content of the running request so far; None: it has ended, or its content is not kept."""

    @property
    def duration_us(self) -> int:
        """Microseconds from the arrival to the end of the request, or until now."""
        return self._elapsed_us() if self.ended_us is None else self.ended_us

    @property
    def num_dropped(self) -> int:
        """Number of events that were not kept because of the limits."""
        found = self.num_steps - limits.RECORD_STEPS_MAX, self.num_pieces - 2 * limits.RECORD_PIECES_MAX
        return sum(max(0, over) for over in (*found, self.num_marks - limits.RECORD_MARKS_MAX))

    def follow(self, snapshot: Callable[[], bytes]) -> None:
        """See RecordedRequest."""
        self.snapshot = snapshot

    def content(self, data: bytes) -> None:
        """See RecordedRequest."""
        self.snapshot = None
        if data and self._on_content is not None:
            self.data = data
            self._on_content(self)

    def admitted(self) -> None:
        """See RecordedRequest."""
        self.admitted_us = self._elapsed_us()

    def tokenizer_silent(self, name: str, waited_s: float) -> None:
        """See RecordedRequest."""
        if self._has_room():
            self.silent_tokenizers.append((name, waited_s))

    def tokenizer_answered(self, name: str) -> None:
        """See RecordedRequest."""
        self.tokenizer = name

    def tokenized(self, num_prompt_tokens: int) -> None:
        """See RecordedRequest."""
        self.tokenized_us, self.prompt_tokens = self._elapsed_us(), num_prompt_tokens

    def placed(
        self, index: int, attempt: int, engine: str, detokenizer: str, places: int = 0, block_size: int = 0
    ) -> None:
        """See RecordedRequest."""
        if self._has_room():
            one = self.sequences.setdefault(index, SequenceRecord())
            one.attempts.append(
                Attempt(
                    number=attempt,
                    engine=engine,
                    detokenizer=detokenizer,
                    placed_us=self._elapsed_us(),
                    places=places,
                    block_size=block_size,
                )
            )

    def accepted(self, index: int, attempt: int) -> None:
        """See RecordedRequest."""
        if (found := self._attempt(index, attempt)) is not None:
            found.accepted_us = self._elapsed_us()

    def lost(self, index: int, attempt: int, reason: str) -> None:
        """See RecordedRequest."""
        if (found := self._attempt(index, attempt)) is not None:
            found.lost_us, found.reason = self._elapsed_us(), reason

    def stream_moved(self, index: int, detokenizer: str) -> None:
        """See RecordedRequest."""
        if (one := self.sequences.get(index)) is not None and one.attempts:
            one.attempts[-1].detokenizer = detokenizer

    def detokenized(self, work_us: int) -> None:
        """See RecordedRequest."""
        self.detokenizer_us += work_us

    def arrived(self, index: int, num_tokens: int) -> None:
        """See RecordedRequest."""
        self.completion_tokens += num_tokens
        if (one := self.sequences.get(index)) is not None:
            self._add_piece(one.arrived, num_tokens)

    def written(self, index: int, num_tokens: int) -> None:
        """See RecordedRequest."""
        if num_tokens and (one := self.sequences.get(index)) is not None:
            self._add_piece(one.written, num_tokens)

    def ended(
        self, outcome: UsageOutcome, error_code: str, prompt: int, cached: int, generated: int, reasons: tuple[str, ...]
    ) -> None:
        """See RecordedRequest."""
        self.ended_us = self._elapsed_us()
        self.outcome, self.error_code, self.finish_reasons = outcome, error_code, reasons
        self.prompt_tokens = max(prompt, self.prompt_tokens)
        self.cached_tokens, self.completion_tokens = cached, generated
        self._on_end(self)

    def closed(self) -> None:
        """See RecordedRequest."""
        self.ended_us = self._elapsed_us()

    def add_steps(
        self,
        index: int,
        attempt: int,
        rows: "array[int]",
        told: Sequence[ToldStep] = (),
        origin: KvOrigin | None = None,
    ) -> None:
        """Adds what steps of an engine did for a sequence (`antiphon.shared.observability.step_rows`).

        `told`: the engine's steps in the same message, and those before it, as far as known. `origin`: where the KV of
        the prompt came from, if the engine tells it now.
        """
        count, room = len(rows) // STEP_COLUMNS, max(0, limits.RECORD_STEPS_MAX - self.num_steps)
        self.num_steps += count
        found = self._attempt(index, attempt)
        if found is not None and origin is not None:
            found.origin = origin
        if found is None or not rows or not room:
            return
        if not found.steps:
            first, placed_s = rows[0], self._received_s + found.placed_us / _MICROSECONDS
            here = [one for told_s, one in told if told_s >= placed_s]  # the engine may have been idle before
            found.waited_during([one for one in here if first - 3 <= one.step <= first - 2])
        found.steps.extend(rows if count <= room else rows[: room * STEP_COLUMNS])

    def preempted(self, index: int, attempt: int, before_step: int) -> None:
        """An engine has taken the blocks of a sequence for others, and computes it again later."""
        if (found := self._attempt(index, attempt)) is not None and self._has_room():
            found.preempted_before.add(before_step)

    def _attempt(self, index: int, number: int) -> Attempt | None:
        one = self.sequences.get(index)
        return None if one is None else one.attempt(number)

    def since_us(self, at_s: float) -> int:
        """Returns the microseconds from the arrival of the request to a time of the gateway's clock."""
        return max(0, int((at_s - self._received_s) * _MICROSECONDS + 0.5))

    def _add_piece(self, pieces: "array[float]", num_tokens: int) -> None:
        self.num_pieces += 1
        if self.num_pieces <= 2 * limits.RECORD_PIECES_MAX:
            pieces.append(self._now())
            pieces.append(num_tokens)

    def _has_room(self) -> bool:
        self.num_marks += 1
        return self.num_marks <= limits.RECORD_MARKS_MAX

    def _elapsed_us(self) -> int:
        return self.since_us(self._now())
