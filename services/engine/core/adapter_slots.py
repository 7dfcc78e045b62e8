"""The adapter slots of a worker: which LoRA adapter is in which slot, and how many sequences with a row use it.

A step can use as many different adapters as there are slots. A sequence with an adapter holds the adapter's slot as
long as it has a row, so that a slot is not refilled while a plan in flight reads it. An unused slot keeps its adapter
until the slot is needed for another one; the least recently used slot is refilled first. Used only by `rows`.
"""

from collections import OrderedDict

NO_SLOT = -1


class AdapterSlots:
    """`num_slots` slots, numbered from 0. An adapter is named by its version (`SequenceSpec.adapter`)."""

    def __init__(self, num_slots: int) -> None:
        self._num_users = [0] * num_slots
        self._slots: dict[str, int] = {}
        self._versions = [""] * num_slots
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        """Slots that no sequence uses, the least recently used first."""
        self.filled: dict[int, str] = {}
        """The slots filled since the last `announce`."""

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def num_users(self) -> int:
        """Number of sequences that hold a slot."""
        return sum(self._num_users)

    def has_room(self, version: str) -> bool:
        """Whether a sequence with this adapter ("": with none) can get a slot now."""
        return not version or version in self._slots or bool(self._idle)

    def take(self, version: str) -> int:
        """Returns the slot of an adapter for one more sequence. There must be room."""
        slot = self._slots.get(version)
        if slot is None:
            slot = next(iter(self._idle))
            self._slots.pop(self._versions[slot], None)
            self._slots[version], self._versions[slot], self.filled[slot] = slot, version, version
        self._idle.pop(slot, None)
        self._num_users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Records that a sequence no longer uses the slot that `take` returned."""
        self._num_users[slot] -= 1
        assert self._num_users[slot] >= 0, f"adapter slot {slot} was released twice"
        if not self._num_users[slot]:
            self._idle[slot] = None

    def announce(self) -> tuple[tuple[int, str], ...]:
        """Returns (slot, version) of each slot in `filled`. To be called only for a plan that will be run."""
        filled = tuple(self.filled.items())
        self.filled.clear()
        return filled
