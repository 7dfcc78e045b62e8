"""Puts one sequence's token events in order: each position is accepted exactly once.

This holds even if messages are lost, duplicated or reordered. Pure. `event.position` is the position of an event's
first token, `position` is the number of tokens accepted so far:

    event.position <  position   overlap: known tokens are compared and dropped, the other tokens are accepted
    event.position == position   the event is accepted
    event.position >  position   gap: the event is held until the missing tokens arrive; `has_gap` is true meanwhile

At most `HELD_EVENTS_MAX` events are held.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from antiphon.shared.limits import HELD_EVENTS_MAX
from antiphon.shared.messages import TokenEvent


class Fresh(NamedTuple):
    """An accepted event. Its first `skip` tokens were already known."""

    event: TokenEvent
    skip: int


class Sequencer:
    """The order of one sequence. `token_ids` are the output tokens accepted so far.

    `divergences` counts overlaps whose tokens differ from the accepted ones, which are kept. `duplicates` counts events
    with nothing new. `dropped` counts events that were dropped because too many were held, or because of a negative
    position.
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
        """The position of the next token: the number of tokens accepted so far."""
        return len(self.token_ids)

    @property
    def has_gap(self) -> bool:
        """Whether tokens before a held event are missing."""
        return bool(self._held)

    def push(self, event: TokenEvent) -> list[Fresh]:
        """Returns the events that can be accepted now, in order.

        Raises OverflowError for a token id that is not a u32.
        """
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
        # The event has no new tokens. Its finish reason is outdated if the event ends before `position`, unless the
        # engine aborted the sequence.
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
