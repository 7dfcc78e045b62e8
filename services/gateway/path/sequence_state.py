"""The state machine of one sequence in its gateway: its phase, attempt and output. Pure: no bus, no clock.

Only the gateway knows what the client has received. `token_ids` is append-only. A text event is applied if it comes
from the current placement and continues or overlaps the known output. If output before the event is missing, the event
is reported as a gap, and the stream is rebuilt from the known output. The request actor passes times (monotonic
seconds) and performs the effects.

    WAITING ──start_placement──► PLACING ──accepted──► RUNNING ──finish──► DONE
       ▲                            │                     │
       └──────────────── unplaced ──┴─ lost, taken_away ──┘   (the next placement has attempt + 1 and the tokens so far)
"""

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from antiphon.shared import limits
from antiphon.shared.messages import FinishReason, KvSource, PositionLogprobs, SequenceMark, TextEvent, TokenEvent


class Phase(Enum):
    """Phase of a sequence, see the diagram of the module."""

    WAITING = auto()
    """The prompt is being tokenized, or the sequence is in the queue for an engine."""
    PLACING = auto()
    """The sequence was sent to an engine and a detokenizer, which have not both answered."""
    RUNNING = auto()
    DONE = auto()


class Address(NamedTuple):
    """Service id and instance id: the address of one service process."""

    id: str
    instance_id: str


class ApplyResult(Enum):
    """Result of applying a text event."""

    APPLIED = auto()
    STALE = auto()
    """The event comes from an older placement or has no new output."""
    GAP = auto()
    """Output before the event is missing; the stream must be rebuilt."""
    DIVERGED = auto()
    """The event contradicts tokens that the client may have received. It is not applied."""


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one sequence since its previous update. The update with a `finish_reason` is the last one."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    text_offset: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Further log probabilities of the prompt, sent before the first output, only in the first sequence of a prompt.
    The first token of the prompt has the log probability NaN.
    """
    vector: bytes = b""
    """Of a pooling request: see `TokenEvent.vector`."""


class Prefill(NamedTuple):
    """The prefill engine of a sequence, and the source of its KV for the decode engine."""

    engine: Address
    source: KvSource
    leads: bool = True
    """Whether the engine computes the prompt for this sequence; if not, for another choice of the same prompt."""


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """The gateway's record of one sequence. `engine` and `detokenizer` are None while the sequence has no placement.

    A pooling sequence never has a detokenizer.
    """

    sequence_id: str
    index: int = 0
    """Index of the sequence in its request."""
    num_prompt_logprobs: int = 0
    """Number of prompt tokens whose log probabilities the client requested. They arrive before the first output."""
    num_reported: int = 0
    """Number of prompt tokens whose log probabilities have arrived."""
    phase: Phase = Phase.WAITING
    attempt: int = 0
    engine: Address | None = None
    detokenizer: Address | None = None
    prefill: Prefill | None = None
    """The engine that computes the prompt for `engine`, until the first output has arrived; None if there is none."""
    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prefills: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """For each attempt that gave output: the attempt, the output tokens that it began with, and the cached tokens."""
    cumulative_logprob: float = 0.0
    carried_logprob: float = 0.0
    last_from: int = 0
    """Position of the first of the tokens that arrived last."""
    last_from_logprob: float = 0.0
    """Cumulative log probability of the tokens before `last_from`."""
    losses: int = 0
    lost_engines: set[Address] = field(default_factory=set[Address])
    """Engines that ran the sequence and were lost: dead, stalled, silent for a lease, or no longer holding it. If the
    sequence got `DEATH_TOKENS` tokens between two losses, the earlier engines are removed, because then the sequence
    was not the cause of their loss."""
    lost_at: int = 0
    """Number of output tokens at the last loss."""
    engines: list[str] = field(default_factory=list[str])
    """Ids of the engines on which the sequence was placed, in order."""
    placed_at: float | None = None
    """Time of the first placement."""
    progress_at: float = 0.0
    behind_since: float | None = None

    def start_placement(
        self, engine: Address, detokenizer: Address | None, now: float, prefill: Prefill | None = None
    ) -> int:
        """Starts a placement on these members. Returns the new attempt."""
        assert self.phase is Phase.WAITING, self.phase
        self.phase = Phase.PLACING
        self.attempt += 1
        self.engine, self.detokenizer = engine, detokenizer
        self.engines.append(engine.id)
        self.prefill = prefill
        self.carried_logprob = self.cumulative_logprob
        self.behind_since = None
        self.progress_at = now
        self.placed_at = now if self.placed_at is None else self.placed_at
        return self.attempt

    def accepted(self, now: float) -> None:
        """Records that the engine has accepted the sequence.

        Its output may have arrived, or even ended, before this answer.
        """
        if self.phase is Phase.PLACING:
            self.phase = Phase.RUNNING
        self.progress_at = now

    def unplaced(self) -> None:
        """Records that the placement has failed; the sequence waits for the next placement."""
        assert self.phase is Phase.PLACING, self.phase
        self.phase, self.engine, self.detokenizer = Phase.WAITING, None, None

    def lost(self) -> None:
        """Records that the engine is lost or has dropped the sequence, which waits for a new placement."""
        assert self.phase is Phase.RUNNING, self.phase
        assert self.engine is not None
        self.losses += 1
        if len(self.token_ids) >= self.lost_at + limits.DEATH_TOKENS:
            self.lost_engines.clear()
        self.lost_at = len(self.token_ids)
        self.lost_engines.add(self.engine)
        self.phase, self.engine, self.detokenizer = Phase.WAITING, None, None

    def taken_away(self) -> None:
        """Records that the sequence leaves a draining engine and waits for a new placement.

        This does not count as a loss.
        """
        assert self.phase is Phase.RUNNING, self.phase
        self.phase, self.engine, self.detokenizer = Phase.WAITING, None, None

    def retry_limit_reached(self, spared: Set[Address]) -> bool:
        """Whether the sequence has lost too many engines to be placed again.

        `spared`: engines that are alive now, and those that are silent but not known to have ended. The sequence has
        not killed them, so they do not count towards DEATHS_MAX.
        """
        return len(self.lost_engines - spared) >= limits.DEATHS_MAX or self.losses >= limits.LOSSES_MAX

    def touch(self, now: float) -> None:
        """Restarts the silence timer, after the gateway could not receive messages for some time."""
        self.progress_at = now

    def moved(self, detokenizer: Address, now: float) -> None:
        """Records that the stream was rebuilt on `detokenizer`."""
        self.detokenizer = detokenizer
        self.behind_since = None
        self.progress_at = now

    def apply_event(self, event: TextEvent, engine: Address, now: float) -> tuple[ApplyResult, SequenceUpdate | None]:
        """Applies one text event. Returns the result, and the new output if the event was applied."""
        # A waiting sequence has no engine.
        if event.attempt != self.attempt or engine != self.engine or self.phase is Phase.DONE:
            return ApplyResult.STALE, None
        if event.prompt_logprobs:
            return self._apply_prompt(event, now)
        if self.needs_prompt_logprobs and event.finish_reason != "error":
            return ApplyResult.GAP, None
        overlap = len(self.token_ids) - event.position
        text_overlap = self.text_length - event.text_offset
        if overlap < 0 or text_overlap < 0:
            return ApplyResult.GAP, None
        known = self.token_ids[event.position : event.position + len(event.token_ids)] if overlap else []
        if known and event.token_ids[:overlap] != tuple(known):
            return ApplyResult.DIVERGED, None
        text, token_ids, text_offset = event.text[text_overlap:], event.token_ids[overlap:], self.text_length
        if not (text or token_ids or event.finish_reason):
            return ApplyResult.STALE, None
        if not self.prefills or self.prefills[-1][0] != self.attempt:
            self.prefills.append((self.attempt, len(self.token_ids), event.num_cached_tokens))
        self.text_length += len(text)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if token_ids:
            self.last_from, self.last_from_logprob = len(self.token_ids), self.cumulative_logprob
            self.token_ids.extend(token_ids)
            self.cumulative_logprob = self.carried_logprob + event.cumulative_logprob
        self.progress_at, self.behind_since = now, None
        if event.finish_reason is not None:
            self.phase = Phase.DONE
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        return ApplyResult.APPLIED, SequenceUpdate(
            index=self.index, text=text, token_ids=token_ids, logprobs=event.logprobs[overlap:],
            text_offset=text_offset, finish_reason=event.finish_reason, stop_reason=event.stop_reason,
            num_cached_tokens=self.num_cached_tokens, cumulative_logprob=self.cumulative_logprob,
        )  # fmt: skip

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt have yet to arrive."""
        return self.num_reported < self.num_prompt_logprobs

    def _apply_prompt(self, event: TextEvent, now: float) -> tuple[ApplyResult, SequenceUpdate | None]:
        """Applies an event with a part of the prompt's log probabilities."""
        overlap = self.num_reported - event.prompt_start
        if overlap < 0:
            return ApplyResult.GAP, None
        new = event.prompt_logprobs[overlap:]
        if not new:
            return ApplyResult.STALE, None
        self.num_reported += len(new)
        self.progress_at = now
        return ApplyResult.APPLIED, SequenceUpdate(
            index=self.index,
            text="",
            text_offset=self.text_length,
            num_cached_tokens=self.num_cached_tokens,
            cumulative_logprob=self.cumulative_logprob,
            prompt_logprobs=new,
        )

    def apply_vector(self, event: TokenEvent, engine: Address, now: float) -> bool:
        """Applies the only event of a pooling sequence. Returns False for an event of another placement or a repeat."""
        stale = self.phase in (Phase.WAITING, Phase.DONE) or event.attempt != self.attempt or engine != self.engine
        if stale or event.finish_reason is None:
            return False
        self.phase, self.finish_reason = Phase.DONE, event.finish_reason
        self.num_cached_tokens = event.num_cached_tokens
        self.prefills.append((self.attempt, 0, event.num_cached_tokens))
        self.progress_at = now
        self.behind_since = None
        return True

    def report_progress(self, mark: SequenceMark, now: float) -> bool:
        """Applies the engine's report of the sequence's progress.

        Returns whether some of its output has not arrived at the gateway.
        """
        if mark.attempt != self.attempt or self.phase is not Phase.RUNNING:
            return False
        if mark.num_output_tokens > len(self.token_ids) or mark.finished:
            self.behind_since = now if self.behind_since is None else self.behind_since
        else:
            self.behind_since = None
        return self.behind_since is not None

    def stalled(self, now: float) -> bool:
        """Whether reported output has not arrived for STALL_S, so that the stream must be rebuilt."""
        if self.phase is not Phase.RUNNING or self.behind_since is None:
            return False
        return now - max(self.behind_since, self.progress_at) > limits.STALL_S

    def num_prefilled_tokens(self, num_prompt_tokens: int) -> int:
        """Returns how many prompt and output tokens engines have prefilled for this sequence, in all attempts."""
        return sum(num_prompt_tokens + carried - cached for _, carried, cached in self.prefills)
