"""One sequence as its owner sees it: a pure state machine over positions, epochs and time.

The owner is the only authority on what the client has been shown. `token_ids` is append-only; a text event is taken in
if it comes from the current placement and continues or overlaps what is there, and a gap is reported so that the stream
is rebuilt from what is known. No bus, no asyncio, no clock: the conductor passes times in and acts on the answers.

    NEW ──place──► PLACING ──accepted──► RUNNING ──finish──► DONE
                      ▲                     │
                      └──────lost───────────┘   (epoch + 1, with the tokens so far)
"""

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from shared import limits
from shared.messages import FinishReason, PositionLogprobs, SequenceMark, TextEvent


class Phase(Enum):
    """Where a sequence is in its life."""

    NEW = auto()
    PLACING = auto()
    RUNNING = auto()
    DONE = auto()


class Address(NamedTuple):
    """One incarnation of a service."""

    id: str
    boot: str


class Verdict(Enum):
    """What became of a text event."""

    TAKEN = auto()
    STALE = auto()
    """From an older placement, or nothing new in it."""
    GAP = auto()
    """Something before it is missing: rebuild the stream."""
    DIVERGED = auto()
    """It contradicts tokens that the client may have seen; what was shown stays the truth."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What an event added."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    text_offset: int


@dataclass(slots=True)
class SequenceOwner:
    """The owner's record of one sequence."""

    request_id: str
    phase: Phase = Phase.NEW
    epoch: int = 0
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
    listed_at: float = 0.0
    behind_since: float | None = None
    counters: dict[str, int] = field(default_factory=lambda: {"stale": 0, "gap": 0, "diverged": 0, "rebuilt": 0})

    def start_placement(self, engine: Address, detokenizer: Address, now: float) -> int:
        """A new epoch on these two; returns it."""
        assert self.phase is not Phase.DONE
        self.phase = Phase.PLACING
        self.epoch += 1
        self.engine, self.detokenizer = engine, detokenizer
        self.carried_logprob = self.cumulative_logprob
        self.behind_since = None
        self.progress_at = self.listed_at = now
        return self.epoch

    def accepted(self, now: float) -> None:
        """The engine took the sequence. Its first tokens may have been quicker than its answer."""
        if self.phase is Phase.PLACING:
            self.phase = Phase.RUNNING
        self.progress_at = self.listed_at = now

    def lost(self) -> None:
        """The engine is gone, or no longer knows the sequence: it needs a new placement."""
        assert self.phase is Phase.RUNNING
        assert self.engine is not None
        self.phase = Phase.PLACING
        self.losses += 1
        self.lost_engines.add(self.engine)

    def hopeless(self, alive: Set[Address]) -> bool:
        """Too much was lost under it to try again. An engine that is alive was not dead, only silent."""
        return len(self.lost_engines - alive) >= limits.DEATHS_MAX or self.losses >= limits.LOSSES_MAX

    def touch(self, now: float) -> None:
        """Time in which nothing could be heard does not count as silence."""
        self.progress_at = self.listed_at = now

    def moved(self, detokenizer: Address, now: float) -> None:
        """The stream was rebuilt there."""
        self.detokenizer = detokenizer
        self.counters["rebuilt"] += 1
        self.behind_since = None
        self.progress_at = now

    def take(self, event: TextEvent, engine: Address, now: float) -> tuple[Verdict, Gain | None]:
        """Applies one text event."""
        if self.phase is Phase.DONE or event.epoch != self.epoch or engine != self.engine:
            return self._count("stale", Verdict.STALE), None
        overlap = len(self.token_ids) - event.position
        text_overlap = self.text_length - event.text_offset
        if overlap < 0 or text_overlap < 0:
            return self._count("gap", Verdict.GAP), None
        known = tuple(self.token_ids[event.position : event.position + len(event.token_ids)])
        if event.token_ids[: len(known)] != known:
            return self._count("diverged", Verdict.DIVERGED), None
        gain = Gain(event.text[text_overlap:], event.token_ids[overlap:], event.logprobs[overlap:], self.text_length)
        if not (gain.text or gain.token_ids or event.finish_reason):
            return self._count("stale", Verdict.STALE), None
        self._apply(event, gain, now)
        return Verdict.TAKEN, gain

    def mark(self, mark: SequenceMark, now: float) -> None:
        """The engine's heartbeat says how far it is."""
        if mark.epoch != self.epoch or self.phase is Phase.DONE:
            return
        self.listed_at = now
        if mark.high_water > len(self.token_ids) or mark.finished:
            self.behind_since = now if self.behind_since is None else self.behind_since
        else:
            self.behind_since = None

    def stalled(self, now: float) -> bool:
        """Tokens exist that never came: the stream must be rebuilt."""
        if self.phase is not Phase.RUNNING or self.behind_since is None:
            return False
        return now - max(self.behind_since, self.progress_at) > limits.STALL_S

    def forgotten(self, now: float) -> bool:
        """The engine is alive but no longer lists the sequence: it must be placed anew."""
        return self.phase is Phase.RUNNING and now - max(self.listed_at, self.progress_at) > 2 * limits.LEASE_S

    def _apply(self, event: TextEvent, gain: Gain, now: float) -> None:
        self.token_ids.extend(gain.token_ids)
        self.text_length += len(gain.text)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if gain.token_ids:
            self.cumulative_logprob = self.carried_logprob + event.cumulative_logprob
        self.progress_at = now
        self.behind_since = None
        if event.finish_reason is not None:
            self.phase = Phase.DONE
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def _count(self, what: str, verdict: Verdict) -> Verdict:
        self.counters[what] += 1
        return verdict
