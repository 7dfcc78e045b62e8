"""Recurrent states on their way between engines, as pieces of the size of a block, after the block that they belong to.

So the other half of a transfer, which moves bytes, needs to know nothing of states. A piece is named after its block,
and its number is like a block's: `first` + slot * count + piece, where `first` is the number of the sender's blocks or
of the receiver's host blocks. Pure; used by `kv_transfer`.
"""

from collections import Counter

from antiphon.services.engine.core.kv.states import StatePool


class StatePieces:
    """The states that are sent or received. `count`: pieces of a state; 0: they do not travel, or there are none."""

    def __init__(self, states: StatePool, count: int, num_blocks: int, num_host_blocks: int) -> None:
        self.states, self.count = states, count if states else 0
        self._num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        self.sending: Counter[int] = Counter()
        """Slots to the number of their pieces that have not been sent."""
        self.loading: set[int] = set()
        """Slots that loads write to."""

    def boundary(self, num_tokens: int, block_size: int) -> int:
        """Returns how many of the tokens before the last one are in full blocks, so that a state can be after them."""
        return (num_tokens - 1) // block_size * block_size

    def names(self, block_name: bytes) -> list[bytes]:
        """Returns the names of the pieces of the state after a block."""
        return [block_name + piece.to_bytes(2, "little") for piece in range(self.count)]

    def to_send(self, block: int) -> list[int] | None:
        """Holds the snapshot of a block until all pieces are `sent`. Returns their numbers; None if there is none."""
        slot = self.states.hold_snapshot(block)
        if slot is None:
            return None
        self.sending[slot] += self.count
        return self._numbers(self._num_blocks, slot)

    def sent(self, number: int) -> None:
        """Records that a piece is not read any more."""
        slot = (number - self._num_blocks) // self.count
        self.sending[slot] -= 1
        if self.sending[slot] % self.count == 0:
            self.states.drop(slot)
        if not self.sending[slot]:
            del self.sending[slot]

    def to_load(self) -> tuple[int, list[int]] | None:
        """Takes a slot for a state to come. Returns it and the numbers of its pieces; None if there is none."""
        slot = self.states.take_unused()
        if slot is None:
            return None
        self.loading.add(slot)
        return slot, self._numbers(self._num_host_blocks, slot)

    def loaded(self, slot: int, *, wanted: bool) -> None:
        """Records the end of a load. The caller gives the slot to a sequence if it is `wanted`."""
        self.loading.remove(slot)
        if not wanted:
            self.states.drop(slot)

    def _numbers(self, first: int, slot: int) -> list[int]:
        return list(range(first + slot * self.count, first + (slot + 1) * self.count))
