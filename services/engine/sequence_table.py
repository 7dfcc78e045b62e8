"""What the engine knows of each sequence beyond the core: attempt, gateway, sink, and every token it gave. Pure.

It is the replay buffer (`Resend`, `Retarget`), the fence (an attempt below the highest seen is refused, a cancelled
sequence leaves a tombstone) and the list of leases: an entry belongs to a gateway, which confirms it now and then. The
actor calls it on its event loop; the core is told by the commands that the actor derives from the answers.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from shared import limits
from shared.messages import SequenceMark, SequenceRef, Submit, SubmitStatus, TokenEvent, TokenLogprobs

GatewayKey = tuple[str, str]
"""Id and instance id of a gateway."""


@dataclass(slots=True)
class Entry:
    """One sequence at one attempt. `token_ids[i]` is the output token at position `first_position + i`."""

    sequence_id: str
    attempt: int
    gateway: GatewayKey
    sink: str
    first_position: int
    registered_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: TokenEvent | None = None

    @property
    def last_position(self) -> int:
        """Output tokens that exist, carried ones included."""
        return self.first_position + len(self.token_ids)

    @property
    def finished(self) -> bool:
        """True once the sequence has ended; its tokens wait for `Done`."""
        return self.last is not None and self.last.finish_reason is not None


class SequenceTable:
    """Every sequence of this engine, and the tombstones of those that are gone."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tombstones: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._leases: dict[GatewayKey, OrderedDict[str, float]] = {}
        """By gateway: when each of its sequences was last confirmed or asked about, the longest ago first."""
        self._finished = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_live(self) -> int:
        """Sequences that still generate or wait to. May be read from any thread."""
        return len(self._entries) - self._finished

    def entries(self) -> Iterator[Entry]:
        """Every entry."""
        return iter(self._entries.values())

    def get(self, sequence_id: str, attempt: int) -> Entry | None:
        """The entry of a sequence at exactly this attempt."""
        entry = self._entries.get(sequence_id)
        return entry if entry is not None and entry.attempt == attempt else None

    # --- life of an entry ---

    def admit(self, submit: Submit) -> SubmitStatus:
        """Whether a submit may run. `accepted` does not enter it yet: see `register`."""
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
        """Starts an entry; the caller has released an older attempt's."""
        assert submit.sequence_id not in self._entries, submit.sequence_id
        gateway = submit.gateway_id, submit.gateway_instance_id
        entry = Entry(submit.sequence_id, submit.attempt, gateway, submit.sink, first_position, now)
        self._entries[entry.sequence_id] = entry
        self._touch(entry, now)

    def append(self, event: TokenEvent) -> Entry | None:
        """Takes in what a step gave. None when the sequence is gone or was already ended by a stop string."""
        entry = self.get(event.sequence_id, event.attempt)
        if entry is None or entry.finished:
            return None
        assert event.position == entry.last_position, (event, entry.last_position)
        entry.token_ids.extend(event.token_ids)
        entry.logprobs.extend(event.logprobs)
        entry.last = event
        self._finished += entry.finished
        return entry

    def end_by_stop_string(self, sequence_id: str, attempt: int) -> bool:
        """Ends a sequence but keeps its tokens. True when it was still running."""
        entry = self.get(sequence_id, attempt)
        if entry is None or entry.finished:
            return False
        end = TokenEvent(sequence_id, attempt, entry.last_position, (), "abort")
        entry.last = end if entry.last is None else _with_end(entry.last, end)
        self._finished += 1
        return True

    def release(self, sequence_id: str, attempt: int, now: float) -> bool:
        """Forgets a sequence at this attempt or below and refuses it from now on. True when it was still running."""
        entry = self._entries.get(sequence_id)
        running = False
        if entry is not None and entry.attempt <= attempt:
            running = not entry.finished
            self._finished -= entry.finished
            del self._entries[sequence_id]
            self._drop_lease(entry)
        self._tombstones[sequence_id] = (max(attempt, self._tombstones.get(sequence_id, (0, 0.0))[0]), now)
        self._tombstones.move_to_end(sequence_id)
        return running

    # --- tokens again ---

    def replay(self, entry: Entry, position: int) -> TokenEvent | None:
        """One event with every token from `position` on; None when there is nothing to send."""
        if entry.last is None or (position >= entry.last_position and not entry.finished):
            return None
        start = max(position, entry.first_position) - entry.first_position
        last = entry.last
        return TokenEvent(
            entry.sequence_id,
            entry.attempt,
            entry.first_position + start,
            tuple(entry.token_ids[start:]),
            last.finish_reason,
            last.stop_token_id,
            tuple(entry.logprobs[start:]),
            last.num_cached_tokens,
            last.cumulative_logprob,
            last.error_code,
            last.error_message,
        )

    # --- leases ---

    def renew_leases(self, gateway: GatewayKey, refs: Iterable[SequenceRef], now: float) -> None:
        """The gateway has confirmed that it owns these."""
        for ref in refs:
            entry = self.get(ref.sequence_id, ref.attempt)
            if entry is not None and entry.gateway == gateway:
                self._touch(entry, now)

    def unconfirmed(self, now: float, heard: Mapping[GatewayKey, float]) -> dict[GatewayKey, list[SequenceRef]]:
        """By living gateway: sequences that it has not confirmed for OWNERSHIP_CHECK_S, to be asked about now.

        The longest unconfirmed first, at most LIVENESS_BATCH_MAX; they are returned again after as long a time.
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
        """Those of the sequences that are this gateway's: it has said that it does not own them."""
        found = (self.get(ref.sequence_id, ref.attempt) for ref in refs)
        return [entry for entry in found if entry is not None and entry.gateway == gateway]

    def expire(self, now: float, heard: Mapping[GatewayKey, float]) -> list[Entry]:
        """Entries whose gateway has been silent for ORPHAN_S. `heard`: time of each gateway's last heartbeat.

        Old tombstones are dropped, too.
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
        """How far each of the sequences is, and which of them are not held."""
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


def split(events: tuple[TokenEvent, ...]) -> tuple[tuple[TokenEvent, ...], tuple[TokenEvent, ...]] | None:
    """The events in two halves; one event alone is cut between its tokens. None for what cannot be cut.

    The first half of an event has no end. Its sum of log probabilities is exact where the event lists them.
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
        event.sequence_id,
        event.attempt,
        event.position,
        event.token_ids[:half],
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
        end.sequence_id, end.attempt, end.position, (), end.finish_reason, None, (), last.num_cached_tokens,
        last.cumulative_logprob,
    )  # fmt: skip
