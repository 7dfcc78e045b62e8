"""Passes the events of an engine's prefix cache from the thread that steps to the event loop, which numbers them.

The step thread only appends to a queue. `take` numbers what it finds there and keeps the latest events in batches, so
that a follower that missed some can have them again. The number of an event is its position.
"""

from collections import deque
from collections.abc import Iterator

from antiphon.shared import limits
from antiphon.shared.blocks import block_name, pack_block_events, removed_block

Batch = tuple[int, bytes]
"""Position of the first event, and the events (`blocks.pack_block_events`)."""
Snapshot = tuple[int, list[bytes]]
"""Position of the first event after the snapshot, and the hashes of all blocks."""
EVENT_BYTES = 8


class BlockLog:
    """The events of one engine, a `BlockWatcher`. `stored`, `removed`, `put_snapshot`: on the step thread.

    If the event loop leaves more than BLOCK_EVENTS_MAX events untaken, all of them are dropped, and the positions make
    a jump that no follower can close without a snapshot.
    """

    def __init__(self) -> None:
        self.end = 0
        """Position of the next event that `take` will find."""
        self.dropped = 0
        """How often events were dropped."""
        self._untaken: deque[int | list[bytes]] = deque()
        self._overflowed = False
        self._kept: deque[Batch] = deque()
        self._num_kept = 0

    def stored(self, block_hash: bytes) -> None:
        """See BlockWatcher."""
        self._append(block_name(block_hash))

    def removed(self, block_hash: bytes) -> None:
        """See BlockWatcher."""
        self._append(removed_block(block_name(block_hash)))

    def put_snapshot(self, content: list[bytes]) -> None:
        """Adds the hashes of all blocks at this moment."""
        self._untaken.append(content)

    @property
    def num_untaken(self) -> int:
        """Number of events and snapshots that `take` would find. From any thread."""
        return len(self._untaken)

    def take(self) -> tuple[list[Batch], Snapshot | None]:
        """Returns the events since the last call as batches of at most BLOCK_EVENTS_BATCH, and the latest snapshot."""
        events, snapshot, untaken = list[int](), None, self._untaken
        batches = list[Batch]()
        while untaken:
            one = untaken.popleft()
            if isinstance(one, list):
                snapshot = (self.end + len(events), one)
                continue
            events.append(one)
        if self._overflowed:
            # No number of the lost events is known, so the jump only has to be longer than what is kept.
            self.dropped += 1
            self.end += limits.BLOCK_EVENTS_MAX + len(events)
            self._forget()
            self._overflowed = False
            return [], None
        size = limits.BLOCK_EVENTS_BATCH
        for start in range(0, len(events), size):
            part = events[start : start + size]
            batches.append((self.end, pack_block_events(part)))
            self.end += len(part)
        self._keep(batches)
        return batches, snapshot

    def since(self, position: int) -> Iterator[Batch] | None:
        """Returns the batches with the events from `position` on; None if they are not kept any more."""
        first = self._kept[0][0] if self._kept else self.end
        if not first <= position <= self.end:
            return None
        return (batch for batch in tuple(self._kept) if batch[0] + len(batch[1]) // EVENT_BYTES > position)

    def restart(self) -> None:
        """Forgets all events, as nobody follows them any more."""
        self.take()
        self.end += limits.BLOCK_EVENTS_MAX
        self._forget()

    def _append(self, event: int) -> None:
        if len(self._untaken) < limits.BLOCK_EVENTS_MAX:
            self._untaken.append(event)
        else:
            self._overflowed = True

    def _keep(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._kept.append(batch)
            self._num_kept += len(batch[1]) // EVENT_BYTES
        while self._num_kept > limits.BLOCK_EVENTS_KEPT:
            self._num_kept -= len(self._kept.popleft()[1]) // EVENT_BYTES

    def _forget(self) -> None:
        self._kept.clear()
        self._num_kept = 0
