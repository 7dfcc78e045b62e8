"""What the engine knows of each sequence beyond the core: epoch, owner, sink, and every token it gave. Pure.

It is the replay buffer (`Resend`, `Retarget`), the fence (an epoch below the highest seen is refused, a cancelled
sequence leaves a tombstone) and the orphan list (a sequence that no live gateway claims is dropped). The actor calls it
on its event loop; the core is told by the commands it returns.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from shared import limits
from shared.messages import GatewayStatus, SequenceMark, Submit, SubmitStatus, TokenEvent, TokenLogprobs

ORPHAN_CLAIM_S = 2 * limits.LEASE_S
"""A gateway that is alive but no longer lists a sequence for this long has let it go."""


@dataclass(slots=True)
class Entry:
    """One sequence at one epoch. `token_ids[i]` is the output token at position `first_position + i`."""

    request_id: str
    epoch: int
    gateway_id: str
    gateway_boot: str
    sink: str
    first_position: int
    carried_logprob: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: TokenEvent | None = None
    claimed_at: float = 0.0

    @property
    def high_water(self) -> int:
        """Output tokens that exist, carried ones included."""
        return self.first_position + len(self.token_ids)

    @property
    def finished(self) -> bool:
        """True once the sequence has ended; its tokens wait for `Done`."""
        return self.last is not None and self.last.finish_reason is not None


class Ledger:
    """Every sequence of this engine, and the tombstones of those that are gone."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tombstones: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._finished = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_live(self) -> int:
        """Sequences that still generate or wait to."""
        return len(self._entries) - self._finished

    def get(self, request_id: str, epoch: int) -> Entry | None:
        """The entry of a sequence at exactly this epoch."""
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.epoch == epoch else None

    def judge(self, submit: Submit) -> SubmitStatus:
        """Whether a submit may run. `accepted` does not enter it yet: see `enter`."""
        tombstone = self._tombstones.get(submit.request_id)
        if tombstone is not None and submit.epoch <= tombstone[0]:
            return "tombstoned"
        entry = self._entries.get(submit.request_id)
        if entry is not None and submit.epoch <= entry.epoch:
            return "duplicate" if submit.epoch == entry.epoch else "stale_epoch"
        if self.num_live >= limits.ENGINE_WAITING_MAX or len(self._entries) >= limits.RETAINED_SEQUENCES_MAX:
            return "busy"
        return "accepted"

    def enter(self, submit: Submit, first_position: int, now: float) -> None:
        """Starts an entry; the caller has ended an older epoch's."""
        assert submit.request_id not in self._entries, submit.request_id
        self._entries[submit.request_id] = Entry(
            submit.request_id, submit.epoch, submit.gateway_id, submit.gateway_boot, submit.sink, first_position,
            claimed_at=now,
        )  # fmt: skip

    def append(self, event: TokenEvent) -> Entry | None:
        """Takes in what a step gave. None when the sequence is gone or was already ended by a stop string."""
        entry = self.get(event.request_id, event.epoch)
        if entry is None or entry.finished:
            return None
        assert event.position == entry.high_water, (event, entry.high_water)
        entry.token_ids.extend(event.token_ids)
        entry.logprobs.extend(event.logprobs)
        entry.last = event
        self._finished += entry.finished
        return entry

    def replay(self, entry: Entry, position: int) -> TokenEvent | None:
        """One event with every token from `position` on; None when there is nothing to send."""
        if entry.last is None or (position >= entry.high_water and not entry.finished):
            return None
        start = max(position, entry.first_position) - entry.first_position
        last = entry.last
        return TokenEvent(
            entry.request_id,
            entry.epoch,
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

    def end_by_stop_string(self, request_id: str, epoch: int) -> bool:
        """Ends a sequence but keeps its tokens. True when it was still running."""
        entry = self.get(request_id, epoch)
        if entry is None or entry.finished:
            return False
        end = TokenEvent(request_id, epoch, entry.high_water, (), "abort")
        entry.last = end if entry.last is None else _with_end(entry.last, end)
        self._finished += 1
        return True

    def bury(self, request_id: str, epoch: int, now: float) -> bool:
        """Forgets a sequence at this epoch or below and refuses it from now on. True when it was still running."""
        entry = self._entries.get(request_id)
        running = False
        if entry is not None and entry.epoch <= epoch:
            running = not entry.finished
            self._finished -= entry.finished
            del self._entries[request_id]
        self._tombstones[request_id] = (max(epoch, self._tombstones.get(request_id, (0, 0.0))[0]), now)
        self._tombstones.move_to_end(request_id)
        return running

    def claim(self, gateway_id: str, boot: str, status: GatewayStatus, now: float) -> None:
        """A gateway says which sequences it still owns."""
        for live in status.live:
            entry = self.get(live.request_id, live.epoch)
            if entry is not None and (entry.gateway_id, entry.gateway_boot) == (gateway_id, boot):
                entry.claimed_at = now

    def expire(self, now: float, heard: dict[tuple[str, str], float]) -> list[Entry]:
        """Entries that nobody owns: not claimed by a gateway that was heard since, or whose gateway fell silent.

        `heard` maps (gateway id, boot) to the time of its last heartbeat. Old tombstones go too.
        """
        while self._tombstones:
            request_id, (_, buried_at) = next(iter(self._tombstones.items()))
            if now - buried_at < limits.TOMBSTONE_S and len(self._tombstones) <= limits.TOMBSTONES_MAX:
                break
            del self._tombstones[request_id]
        return [entry for entry in self._entries.values() if _orphaned(entry, now, heard)]

    def marks(self) -> tuple[SequenceMark, ...]:
        """How far each sequence is, for heartbeats."""
        return tuple(SequenceMark(e.request_id, e.epoch, e.high_water, e.finished) for e in self._entries.values())


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
        event.request_id,
        event.epoch,
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
        end.request_id, end.epoch, end.position, (), end.finish_reason, None, (), last.num_cached_tokens,
        last.cumulative_logprob,
    )  # fmt: skip


def _orphaned(entry: Entry, now: float, heard: dict[tuple[str, str], float]) -> bool:
    last_heard = heard.get((entry.gateway_id, entry.gateway_boot), entry.claimed_at)
    if now - max(last_heard, entry.claimed_at) > limits.ORPHAN_S:
        return True
    return last_heard - entry.claimed_at > ORPHAN_CLAIM_S
