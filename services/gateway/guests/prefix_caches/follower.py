"""Follows the content of one engine's prefix cache by its numbered events. Pure.

It begins with a snapshot. Events that come before the snapshot is complete, or after a gap, are held until what is
missing has arrived; the caller sends what `wish` returns.
"""

from antiphon.services.gateway.path.prefixes import KnownBlocks
from antiphon.shared import limits
from antiphon.shared.blocks import block_of, is_removal, unpack_block_events
from antiphon.shared.messages import BlockEvents, BlockSnapshot

ANEW = -1
"""The position that asks for a snapshot."""


class Follower:
    """What is known of one engine. `known` is empty until the first snapshot is complete. Times: monotonic seconds."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: blocks of the engine, which bounds what is known."""
        self.known = KnownBlocks()
        self.is_synced = False
        """Whether a snapshot is complete."""
        self.num_gaps = 0
        """How often events were missing."""
        self.num_snapshots = 0
        self._num_blocks = num_blocks
        self._position = ANEW
        self._held: dict[int, tuple[int, ...]] = {}
        """Events that came too early, by the position of the first."""
        self._pieces: set[int] = set()
        """Numbers of the pieces that have arrived of the snapshot at the position `_pieces_at`."""
        self._pieces_at = ANEW
        self._content: set[int] = set()
        """The blocks of these pieces. They are added as they arrive, because adding all at once takes long."""
        self._heard_s = self._asked_s = -limits.BLOCK_RENEWAL_S

    @property
    def position(self) -> int:
        """Number of the next event; ANEW without a complete snapshot."""
        return self._position

    def wish(self, now_s: float) -> int | None:
        """Returns the position from which to ask the engine for events now; None: nothing is due."""
        lacks = self._position == ANEW or bool(self._held)
        waited_s = now_s - (max(self._asked_s, self._heard_s) if self._pieces else self._asked_s)
        if waited_s < (limits.BLOCK_RETRY_S if lacks else limits.BLOCK_RENEWAL_S):
            return None
        self._asked_s = now_s
        if self._position == ANEW:
            self._drop_pieces()
        return self._position

    def on_events(self, message: BlockEvents) -> None:
        """Applies events, or holds them if others before them are missing. Raises ValueError if they are malformed."""
        events = unpack_block_events(message.events)
        if self._position != ANEW and message.position <= self._position:
            self._apply(message.position, events)
            self._apply_held()
            return
        if self._position != ANEW and not self._held:
            self.num_gaps += 1
            self._asked_s = -limits.BLOCK_RENEWAL_S
        if len(self._held) >= limits.BLOCK_BATCHES_HELD:
            self._begin_anew()
        self._held[message.position] = events

    def on_snapshot(self, message: BlockSnapshot, now_s: float) -> None:
        """Takes a piece of a snapshot, and what was held if the snapshot is complete. Raises ValueError."""
        names = unpack_block_events(message.names)
        if message.position < max(self._pieces_at, self._position):
            return  # of a snapshot before the latest
        if message.position != self._pieces_at:
            self._pieces_at = message.position
            self._drop_pieces()
        self._heard_s = now_s
        self._pieces.add(message.part)
        self._content.update(names)
        if len(self._content) > 2 * self._num_blocks:
            self._drop_pieces()  # the engine cannot have so many
        if len(self._pieces) < message.num_parts:
            return
        self.known.present = self._content
        self._drop_pieces()
        self._position, self.is_synced = message.position, True
        self.num_snapshots += 1
        self._apply_held()

    def _drop_pieces(self) -> None:
        self._pieces, self._content = set(), set()

    def _apply(self, position: int, events: tuple[int, ...]) -> None:
        """Applies events of which the first is the next one or an earlier one."""
        present, new = self.known.present, events[self._position - position :]
        for event in new:
            if is_removal(event):
                present.discard(block_of(event))
            else:
                present.add(event)
        self._position += len(new)
        if len(present) > 2 * self._num_blocks:
            present.clear()  # the engine cannot have so many: what it sends is wrong
            self._begin_anew()

    def _apply_held(self) -> None:
        while self._held and (first := min(self._held)) <= self._position:
            self._apply(first, self._held.pop(first))

    def _begin_anew(self) -> None:
        """Asks for a snapshot. Until it is complete, what was known is the best estimate."""
        self._position = self._pieces_at = ANEW
        self._held.clear()
        self._drop_pieces()
