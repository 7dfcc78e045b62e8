"""Which slots of recurrent states are snapshots: each belongs to a full KV block, whose hash finds both.

A snapshot that nobody holds rests; the one that has rested longest is the first to be given away. Used by `states`.
"""

from collections import OrderedDict
from collections.abc import Set


class Snapshots:
    """The blocks that have a snapshot, and their slots."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, slot: int) -> bool:
        """Whether a slot is a snapshot."""
        return slot in self._block_of

    def of(self, block: int) -> int | None:
        """Returns the slot of a block's snapshot; None if it has none."""
        return self._slot_of.get(block)

    def usable(self, blocks: list[int]) -> list[int]:
        """Returns the blocks of a computed prefix up to the last one with a snapshot."""
        count = len(blocks)
        while count and blocks[count - 1] not in self._slot_of:
            count -= 1
        return blocks[:count]

    def resting(self) -> Set[int]:
        """Returns the slots that nobody holds, the one that has rested longest first."""
        return self._resting.keys()

    def add(self, block: int, slot: int) -> None:
        """Makes a slot the snapshot of a block, which must not have one."""
        self._slot_of[block], self._block_of[slot] = slot, block

    def rest(self, slot: int) -> None:
        """Records that nobody holds a snapshot any more."""
        self._resting[slot] = None

    def wake(self, slot: int) -> None:
        """Records that a snapshot is held."""
        self._resting.pop(slot, None)

    def move(self, block: int, target: int) -> None:
        """Gives the snapshot of a block, if it has one, to another one with the same content that has none."""
        if block in self._slot_of and target not in self._slot_of:
            self.add(target, self._slot_of.pop(block))

    def remove(self, slot: int) -> None:
        """Makes a snapshot an ordinary slot."""
        del self._slot_of[self._block_of.pop(slot)]
        self.wake(slot)
