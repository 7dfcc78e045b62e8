"""The engine's table of sequences: attempt, gateway, reply subject and every generated token. No I/O and no clock.

The reply subject is that of the detokenizer that gets the tokens. The table serves three purposes:

- replay: it keeps the tokens for `Resend` and `Retarget`;
- fencing: it refuses attempts below the highest one seen, and a released sequence leaves a tombstone, which refuses
  late submits;
- leases: each entry belongs to a gateway, which must confirm from time to time that it still owns the sequence.

The actor calls the table on its event loop and sends the resulting commands to the core.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from antiphon.shared import limits
from antiphon.shared.messages import (
    PromptLogprobs,
    SequenceMark,
    SequenceRef,
    Submit,
    SubmitStatus,
    TokenEvent,
    TokenLogprobs,
)

GatewayKey = tuple[str, str]
"""Id and instance id of a gateway."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One attempt of one sequence. `token_ids[i]` is the output token at position `first_position + i`.

    `last` is the latest event; `registered_at` is in seconds of the caller's clock.
    """

    sequence_id: str
    attempt: int
    gateway: GatewayKey
    reply_subject: str
    first_position: int
    registered_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    last: TokenEvent | None = None

    @property
    def last_position(self) -> int:
        """Number of output tokens that exist, including those that came with the submit."""
        return self.first_position + len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended. Its tokens are then kept until `Done`."""
        return self.last is not None and self.last.finish_reason is not None


class SequenceTable:
    """The entries of this engine's sequences and the tombstones of released ones."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tombstones: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._leases: dict[GatewayKey, OrderedDict[str, float]] = {}
        """For each gateway, the time at which each of its sequences was last confirmed or asked about, oldest first."""
        self._finished = 0
        self._idle: dict[str, float] = {}
        """The live sequences of the idle lane, with the times at which they become ordinary ones."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_live(self) -> int:
        """Number of sequences that wait or run. May be read from any thread."""
        return len(self._entries) - self._finished

    @property
    def num_idle(self) -> int:
        """Number of live sequences in the idle lane. May be read from any thread."""
        return len(self._idle)

    def end_idle_times(self, now: float) -> None:
        """Turns the sequences whose time in the idle lane is over into ordinary ones."""
        self._idle = {name: until for name, until in self._idle.items() if until > now}

    def entries(self) -> Iterator[Entry]:
        """Returns an iterator over all entries."""
        return iter(self._entries.values())

    def get(self, sequence_id: str, attempt: int) -> Entry | None:
        """Returns the entry of a sequence at exactly this attempt; None if there is none."""
        entry = self._entries.get(sequence_id)
        return entry if entry is not None and entry.attempt == attempt else None

    def is_live(self, sequence_id: str, attempt: int) -> bool:
        """Whether the sequence waits or runs at exactly this attempt."""
        entry = self.get(sequence_id, attempt)
        return entry is not None and not entry.finished

    # --- life of an entry ---

    def admit(self, submit: Submit) -> SubmitStatus:
        """Returns whether a submit may run, or why it is refused. Changes nothing; `register` adds the entry."""
        tombstone = self._tombstones.get(submit.sequence_id)
        if tombstone is not None and submit.attempt <= tombstone[0]:
            return "tombstoned"
        entry = self._entries.get(submit.sequence_id)
        if entry is not None and submit.attempt <= entry.attempt:
            return "duplicate" if submit.attempt == entry.attempt else "stale_attempt"
        if self.num_live >= limits.ENGINE_WAITING_MAX or len(self._entries) >= limits.RETAINED_SEQUENCES_MAX:
            return "busy"
        return "accepted"

    def register(self, submit: Submit, first_position: int, now: float) -> None:
        """Creates the entry of a submit. The caller must have released an older attempt's entry before."""
        assert submit.sequence_id not in self._entries, submit.sequence_id
        gateway = submit.gateway_id, submit.gateway_instance_id
        entry = Entry(
            sequence_id=submit.sequence_id,
            attempt=submit.attempt,
            gateway=gateway,
            reply_subject=submit.reply_subject,
            first_position=first_position,
            registered_at=now,
        )
        self._entries[entry.sequence_id] = entry
        if submit.idle_s > 0:
            self._idle[entry.sequence_id] = now + submit.idle_s
        self._touch(entry, now)

    def append(self, event: TokenEvent) -> Entry | None:
        """Adds the tokens, or the log probabilities of the prompt, of an event to its entry and returns the entry.

        Returns None, and changes nothing, if the sequence is unknown or has already been ended by a stop string.
        """
        entry = self.get(event.sequence_id, event.attempt)
        if entry is None or entry.finished:
            return None
        assert event.position == entry.last_position, (event, entry.last_position)
        if event.prompt_logprobs is not None:
            entry.prompt_logprobs.append(event.prompt_logprobs)
            return entry
        entry.token_ids.extend(event.token_ids)
        entry.logprobs.extend(event.logprobs)
        entry.last = event
        if entry.finished:
            self._finished += 1
            self._idle.pop(entry.sequence_id, None)
        return entry

    def end_by_stop_string(self, sequence_id: str, attempt: int) -> bool:
        """Ends a sequence but keeps its tokens. Returns whether the sequence was still waiting or running."""
        entry = self.get(sequence_id, attempt)
        if entry is None or entry.finished:
            return False
        end = TokenEvent(
            sequence_id=sequence_id, attempt=attempt, position=entry.last_position, token_ids=(), finish_reason="abort"
        )
        entry.last = end if entry.last is None else _with_end(entry.last, end)
        self._finished += 1
        self._idle.pop(sequence_id, None)
        return True

    def release(self, sequence_id: str, attempt: int, now: float) -> bool:
        """Removes a sequence at this attempt or below and leaves a tombstone, which refuses such attempts from now on.

        Returns whether the sequence was still waiting or running.
        """
        entry = self._entries.get(sequence_id)
        running = False
        if entry is not None and entry.attempt <= attempt:
            running = not entry.finished
            self._finished -= entry.finished
            del self._entries[sequence_id]
            self._idle.pop(sequence_id, None)
            self._drop_lease(entry)
        self._tombstones[sequence_id] = (max(attempt, self._tombstones.get(sequence_id, (0, 0.0))[0]), now)
        self._tombstones.move_to_end(sequence_id)
        return running

    # --- replay ---

    def replay(self, entry: Entry, position: int) -> list[TokenEvent]:
        """Returns one event with every token from `position` on; none if there is nothing to send.

        If that includes the first token, the log probabilities of the prompt come before it, in events of their own.
        """
        if entry.last is None or (position >= entry.last_position and not entry.finished):
            return []
        start = max(position, entry.first_position) - entry.first_position
        last = entry.last
        prompt = [
            TokenEvent(
                sequence_id=entry.sequence_id,
                attempt=entry.attempt,
                position=entry.first_position,
                token_ids=(),
                prompt_logprobs=part,
            )
            for part in ([] if start else entry.prompt_logprobs)
        ]
        tokens = TokenEvent(
            sequence_id=entry.sequence_id,
            attempt=entry.attempt,
            position=entry.first_position + start,
            token_ids=tuple(entry.token_ids[start:]),
            finish_reason=last.finish_reason,
            stop_token_id=last.stop_token_id,
            logprobs=tuple(entry.logprobs[start:]),
            num_cached_tokens=last.num_cached_tokens,
            cumulative_logprob=last.cumulative_logprob,
            error_code=last.error_code,
            error_message=last.error_message,
            vector=last.vector,
        )
        return [*prompt, tokens]

    # --- leases ---

    def renew_leases(self, gateway: GatewayKey, refs: Iterable[SequenceRef], now: float) -> None:
        """Renews the leases of sequences that the gateway has confirmed. Skips sequences of other gateways."""
        for ref in refs:
            entry = self.get(ref.sequence_id, ref.attempt)
            if entry is not None and entry.gateway == gateway:
                self._touch(entry, now)

    def unconfirmed(self, now: float, heard: Mapping[GatewayKey, float]) -> dict[GatewayKey, list[SequenceRef]]:
        """Returns for each living gateway its sequences that it has not confirmed for OWNERSHIP_CHECK_S.

        At most LIVENESS_BATCH_MAX for each gateway, the longest unconfirmed first. A returned sequence is not returned
        again for another OWNERSHIP_CHECK_S. `heard` is the time of each gateway's last heartbeat.
        """
        found: dict[GatewayKey, list[SequenceRef]] = {}
        for gateway, leases in self._leases.items():
            if now - heard.get(gateway, float("-inf")) > limits.ORPHAN_S:
                continue
            due: list[SequenceRef] = []
            for sequence_id, touched_at in leases.items():
                if now - touched_at <= limits.OWNERSHIP_CHECK_S or len(due) >= limits.LIVENESS_BATCH_MAX:
                    break
                due.append(SequenceRef(sequence_id, self._entries[sequence_id].attempt))
            for ref in due:
                self._touch(self._entries[ref.sequence_id], now)
            if due:
                found[gateway] = due
        return found

    def disowned(self, gateway: GatewayKey, refs: Iterable[SequenceRef]) -> list[Entry]:
        """Returns the entries of sequences that their gateway has disowned. Skips sequences of other gateways."""
        found = (self.get(ref.sequence_id, ref.attempt) for ref in refs)
        return [entry for entry in found if entry is not None and entry.gateway == gateway]

    def expire(self, now: float, heard: Mapping[GatewayKey, float]) -> list[Entry]:
        """Returns the entries, older than ORPHAN_S, whose gateway has been silent for ORPHAN_S. Drops old tombstones.

        `heard` is the time of each gateway's last heartbeat. Tombstones are dropped after TOMBSTONE_S, or earlier if
        there are more than TOMBSTONES_MAX.
        """
        while self._tombstones:
            sequence_id, (_, released_at) = next(iter(self._tombstones.items()))
            if now - released_at < limits.TOMBSTONE_S and len(self._tombstones) <= limits.TOMBSTONES_MAX:
                break
            del self._tombstones[sequence_id]
        orphans: list[Entry] = []
        for gateway, leases in self._leases.items():
            heard_at = heard.get(gateway, float("-inf"))
            if now - heard_at > limits.ORPHAN_S:
                entries = (self._entries[sequence_id] for sequence_id in leases)
                orphans += [entry for entry in entries if now - entry.registered_at > limits.ORPHAN_S]
        return orphans

    def progress(self, refs: Iterable[SequenceRef]) -> tuple[tuple[SequenceMark, ...], tuple[SequenceRef, ...]]:
        """Returns the progress of each sequence in the table, and the sequences that are not in the table."""
        marks: list[SequenceMark] = []
        missing: list[SequenceRef] = []
        for ref in refs:
            entry = self.get(ref.sequence_id, ref.attempt)
            if entry is None:
                missing.append(ref)
            else:
                marks.append(SequenceMark(entry.sequence_id, entry.attempt, entry.last_position, entry.finished))
        return tuple(marks), tuple(missing)

    def _touch(self, entry: Entry, now: float) -> None:
        leases = self._leases.setdefault(entry.gateway, OrderedDict())
        leases[entry.sequence_id] = now
        leases.move_to_end(entry.sequence_id)

    def _drop_lease(self, entry: Entry) -> None:
        leases = self._leases[entry.gateway]
        del leases[entry.sequence_id]
        if not leases:
            del self._leases[entry.gateway]


def core_id(sequence_id: str, attempt: int) -> str:
    """Returns the id that the core uses for one attempt of a sequence.

    Each attempt is a sequence of its own in the core, because a plan in flight may still contain an older attempt.
    """
    return f"{sequence_id}#{attempt}"


def of_core(core_sequence_id: str) -> tuple[str, int]:
    """Returns the sequence id and the attempt of an id of the core."""
    sequence_id, _, attempt = core_sequence_id.rpartition("#")
    return sequence_id, int(attempt)


def split(events: tuple[TokenEvent, ...]) -> tuple[tuple[TokenEvent, ...], tuple[TokenEvent, ...]] | None:
    """Returns the events in two halves; a single event is split between its tokens. None if it has at most one token.

    The first half of a split event has no finish reason. Its cumulative log probability is exact only if the event
    lists the log probabilities of its tokens.
    """
    if len(events) > 1:
        half = len(events) // 2
        return events[:half], events[half:]
    event = next(iter(events))
    half = len(event.token_ids) // 2
    if not half:
        return None
    later = event.logprobs[half:]
    first = TokenEvent(
        sequence_id=event.sequence_id,
        attempt=event.attempt,
        position=event.position,
        token_ids=event.token_ids[:half],
        logprobs=event.logprobs[:half],
        num_cached_tokens=event.num_cached_tokens,
        cumulative_logprob=event.cumulative_logprob - sum(each.logprob for each in later),
    )
    rest = msgspec.structs.replace(
        event, position=event.position + half, token_ids=event.token_ids[half:], logprobs=later
    )
    return (first,), (rest,)


def _with_end(last: TokenEvent, end: TokenEvent) -> TokenEvent:
    return TokenEvent(
        sequence_id=end.sequence_id,
        attempt=end.attempt,
        position=end.position,
        token_ids=(),
        finish_reason=end.finish_reason,
        num_cached_tokens=last.num_cached_tokens,
        cumulative_logprob=last.cumulative_logprob,
    )
