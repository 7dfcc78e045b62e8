"""Puts one sequence's token events in order: each position is taken exactly once, whatever the bus does to messages.

Pure. An event stands at `event.position`, the sequence at `position`, the number of tokens taken:

    event.position <  position   overlap: what is known is dropped after a comparison, the rest is taken
    event.position == position   taken
    event.position >  position   gap: held (boundedly) until what is missing has come; `has_gap` says so
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from shared.limits import HELD_EVENTS_MAX
from shared.messages import TokenEvent


class Fresh(NamedTuple):
    """An event whose turn has come; its first `skip` tokens were known already."""

    event: TokenEvent
    skip: int


class Sequencer:
    """`token_ids` are the output tokens taken so far; `position` is where the next one belongs.

    `divergences` counts overlaps that contradict what was taken (which stays the truth), `duplicates` events without
    anything new, `dropped` events that found no place behind a gap.
    """

    __slots__ = ("_held", "divergences", "dropped", "duplicates", "token_ids")

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids = array("I", token_ids)
        self.divergences = 0
        self.duplicates = 0
        self.dropped = 0
        self._held: dict[int, TokenEvent] = {}

    @property
    def position(self) -> int:
        """Where the next token belongs."""
        return len(self.token_ids)

    @property
    def has_gap(self) -> bool:
        """True while something before a held event is missing."""
        return bool(self._held)

    def push(self, event: TokenEvent) -> list[Fresh]:
        """What can be taken now, in order. Raises OverflowError for a token id that is no u32."""
        if event.position > len(self.token_ids):
            self._hold(event)
            return []
        fresh = self._take(event)
        ready = [fresh] if fresh is not None else []
        while self._held and (first := min(self._held)) <= len(self.token_ids):
            fresh = self._take(self._held.pop(first))
            if fresh is not None:
                ready.append(fresh)
        return ready

    def _take(self, event: TokenEvent) -> Fresh | None:
        known = len(self.token_ids) - event.position
        if known:
            return self._take_overlap(event, known)
        if not event.token_ids and event.finish_reason is None:
            self.duplicates += 1
            return None
        self.token_ids.extend(event.token_ids)
        return Fresh(event, 0)

    def _take_overlap(self, event: TokenEvent, known: int) -> Fresh | None:
        if event.position < 0:
            self.dropped += 1
            return None
        ours = self.token_ids[event.position : event.position + len(event.token_ids)]
        if tuple(ours) != event.token_ids[: len(ours)]:
            self.divergences += 1
        if len(event.token_ids) > known:
            self.token_ids.extend(event.token_ids[known:])
            return Fresh(event, known)
        # An end that lies behind us is old, unless the engine gave the sequence up.
        at_end = len(event.token_ids) == known or event.finish_reason in ("abort", "error")
        if event.finish_reason is None or not at_end:
            self.duplicates += 1
            return None
        return Fresh(event, len(event.token_ids))

    def _hold(self, event: TokenEvent) -> None:
        held = self._held.get(event.position)
        if held is None and len(self._held) >= HELD_EVENTS_MAX:
            self.dropped += 1
        elif held is None or _tells_more(event, held):
            self._held[event.position] = event


def _tells_more(event: TokenEvent, than: TokenEvent) -> bool:
    return (len(event.token_ids), event.finish_reason is not None) > (
        len(than.token_ids),
        than.finish_reason is not None,
    )
