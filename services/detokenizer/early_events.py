"""Holds token events whose stream is not open yet, for a limited time and in a limited number. Pure.

A gateway opens a stream and submits its sequence at the same time, so the first tokens can arrive before `OpenBatch`.
Without this buffer, missing first tokens would be requested only when the next tokens show the gap. If there are no
next tokens, because one step has computed the whole sequence, they would be requested only when the gateway asks the
engine for the sequence's progress.
"""

from collections import OrderedDict
from dataclasses import dataclass

from antiphon.shared import limits
from antiphon.shared.messages import TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEvent:
    """A token event with the sender and the step of its message. `held_at`: time of its arrival, monotonic seconds."""

    event: TokenEvent
    engine_id: str
    engine_instance_id: str
    step: int
    held_at: float


class EarlyEvents:
    """Holds events by sequence. Remembers recently closed streams, so that their late tokens are not held."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, list[EarlyEvent]] = OrderedDict()
        self._num_held = 0
        self._closed: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return self._num_held

    def hold(self, early: EarlyEvent) -> bool:
        """Holds an event. Returns False if its stream was already closed or the buffer is full."""
        sequence_id = early.event.sequence_id
        if early.event.attempt <= self._closed.get(sequence_id, 0) or self._num_held >= limits.EARLY_EVENTS_MAX:
            return False
        self._held.setdefault(sequence_id, []).append(early)
        self._num_held += 1
        return True

    def take(self, sequence_id: str, attempt: int) -> list[EarlyEvent]:
        """Removes the events of a stream that is now open and returns them in order of arrival.

        Events of other attempts are dropped.
        """
        held = self._held.pop(sequence_id, [])
        self._num_held -= len(held)
        return [early for early in held if early.event.attempt == attempt]

    def close(self, sequence_id: str, attempt: int) -> None:
        """Records that a stream has ended at `attempt`."""
        self._closed[sequence_id] = max(attempt, self._closed.get(sequence_id, 0))
        self._closed.move_to_end(sequence_id)
        if len(self._closed) > limits.CLOSED_STREAMS_MAX:
            self._closed.popitem(last=False)

    def expire(self, now: float) -> int:
        """Drops all events of sequences whose first event was held longer than EARLY_EVENT_S. Returns their number."""
        dropped = 0
        while self._held:
            sequence_id, held = next(iter(self._held.items()))
            if now - held[0].held_at <= limits.EARLY_EVENT_S:
                break
            del self._held[sequence_id]
            dropped += len(held)
        self._num_held -= dropped
        return dropped
