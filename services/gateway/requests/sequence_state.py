"""One sequence as its gateway sees it: a pure state machine over positions, attempts and time.

The gateway is the only authority on what the client has been shown. `token_ids` is append-only; a text event is applied
if it comes from the current placement and continues or overlaps what is there, and a gap is reported so that the stream
is rebuilt from what is known. No bus, no asyncio, no clock: the request actor passes times in and acts on the answers.

    WAITING ──start_placement──► PLACING ──accepted──► RUNNING ──finish──► DONE
       ▲                            │                     │
       └──────────────── unplaced ──┴──────── lost ───────┘   (the next placement has attempt + 1 and the tokens so far)
"""

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from shared import limits
from shared.messages import FinishReason, PositionLogprobs, SequenceMark, TextEvent


class Phase(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    """For its prompt, or in the queue for an engine."""
    PLACING = auto()
    """Sent to an engine and a detokenizer that have not both answered."""
    RUNNING = auto()
    DONE = auto()


class Address(NamedTuple):
    """One incarnation of a service."""

    id: str
    instance_id: str


class ApplyResult(Enum):
    """What became of a text event."""

    APPLIED = auto()
    STALE = auto()
    """From an older placement, or nothing new in it."""
    GAP = auto()
    """Something before it is missing: rebuild the stream."""
    DIVERGED = auto()
    """It contradicts tokens that the client may have seen; what was shown stays the truth."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What an event added."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    text_offset: int


@dataclass(slots=True)
class SequenceState:
    """The gateway's record of one sequence. `engine` and `detokenizer` are None while it has no placement."""

    sequence_id: str
    phase: Phase = Phase.WAITING
    attempt: int = 0
    engine: Address | None = None
    detokenizer: Address | None = None
    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    carried_logprob: float = 0.0
    losses: int = 0
    lost_engines: set[Address] = field(default_factory=set[Address])
    """Engines that were lost while they ran it: dead, or silent for a while."""
    progress_at: float = 0.0
    behind_since: float | None = None
    counters: dict[str, int] = field(default_factory=lambda: {"stale": 0, "gap": 0, "diverged": 0, "rebuilt": 0})

    def start_placement(self, engine: Address, detokenizer: Address, now: float) -> int:
        """A new attempt on these two; returns it."""
        assert self.phase is Phase.WAITING, self.phase
        self.phase = Phase.PLACING
        self.attempt += 1
        self.engine, self.detokenizer = engine, detokenizer
        self.carried_logprob = self.cumulative_logprob
        self.behind_since = None
        self.progress_at = now
        return self.attempt

    def accepted(self, now: float) -> None:
        """The engine took the sequence. Its first tokens may have been quicker than its answer."""
        if self.phase is Phase.PLACING:
            self.phase = Phase.RUNNING
        self.progress_at = now

    def unplaced(self) -> None:
        """The placement failed: the sequence waits for the next one."""
        assert self.phase is Phase.PLACING, self.phase
        self.phase, self.engine, self.detokenizer = Phase.WAITING, None, None

    def lost(self) -> None:
        """The engine is gone, or no longer holds the sequence: it waits for a new placement."""
        assert self.phase is Phase.RUNNING, self.phase
        assert self.engine is not None
        self.losses += 1
        self.lost_engines.add(self.engine)
        self.phase, self.engine, self.detokenizer = Phase.WAITING, None, None

    def retry_limit_reached(self, alive: Set[Address]) -> bool:
        """Too much was lost under it to try again. An engine that is alive was not dead, only silent."""
        return len(self.lost_engines - alive) >= limits.DEATHS_MAX or self.losses >= limits.LOSSES_MAX

    def touch(self, now: float) -> None:
        """Time in which nothing could be heard does not count as silence."""
        self.progress_at = now

    def moved(self, detokenizer: Address, now: float) -> None:
        """The stream was rebuilt there."""
        self.detokenizer = detokenizer
        self.counters["rebuilt"] += 1
        self.behind_since = None
        self.progress_at = now

    def apply_event(self, event: TextEvent, engine: Address, now: float) -> tuple[ApplyResult, Delta | None]:
        """Applies one text event."""
        if self.phase in (Phase.WAITING, Phase.DONE) or event.attempt != self.attempt or engine != self.engine:
            return self._count("stale", ApplyResult.STALE), None
        overlap = len(self.token_ids) - event.position
        text_overlap = self.text_length - event.text_offset
        if overlap < 0 or text_overlap < 0:
            return self._count("gap", ApplyResult.GAP), None
        known = tuple(self.token_ids[event.position : event.position + len(event.token_ids)])
        if event.token_ids[: len(known)] != known:
            return self._count("diverged", ApplyResult.DIVERGED), None
        delta = Delta(event.text[text_overlap:], event.token_ids[overlap:], event.logprobs[overlap:], self.text_length)
        if not (delta.text or delta.token_ids or event.finish_reason):
            return self._count("stale", ApplyResult.STALE), None
        self._apply(event, delta, now)
        return ApplyResult.APPLIED, delta

    def report_progress(self, mark: SequenceMark, now: float) -> bool:
        """The engine says how far the sequence is. True while text of it is missing here."""
        if mark.attempt != self.attempt or self.phase is not Phase.RUNNING:
            return False
        if mark.high_water > len(self.token_ids) or mark.finished:
            self.behind_since = now if self.behind_since is None else self.behind_since
        else:
            self.behind_since = None
        return self.behind_since is not None

    def stalled(self, now: float) -> bool:
        """Tokens exist that never came: the stream must be rebuilt."""
        if self.phase is not Phase.RUNNING or self.behind_since is None:
            return False
        return now - max(self.behind_since, self.progress_at) > limits.STALL_S

    def _apply(self, event: TextEvent, delta: Delta, now: float) -> None:
        self.token_ids.extend(delta.token_ids)
        self.text_length += len(delta.text)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if delta.token_ids:
            self.cumulative_logprob = self.carried_logprob + event.cumulative_logprob
        self.progress_at = now
        self.behind_since = None
        if event.finish_reason is not None:
            self.phase = Phase.DONE
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def _count(self, what: str, result: ApplyResult) -> ApplyResult:
        self.counters[what] += 1
        return result
