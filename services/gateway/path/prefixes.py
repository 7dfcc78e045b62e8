"""What a gateway knows of the content of an engine's prefix cache. Pure; the router asks.

Of an engine whose cache the gateway follows (`guests.prefix_caches`) it knows the blocks, and expects those of prompts
that it has just sent there (`KnownBlocks`). Of others it only remembers what it has sent (`PrefixIndex`). Blocks have
short names (`antiphon.shared.blocks`). What is wrong here costs only time.
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field

LATEST = 16
"""Number of prompts over which `missing_share` is averaged, with falling weights."""


@dataclass(slots=True)
class PrefixIndex:
    """The blocks of the prompts sent to one engine. Beyond `capacity` the least recently added are dropped."""

    capacity: int
    _blocks: OrderedDict[Hashable, None] = field(default_factory=OrderedDict[Hashable, None])

    def add(self, blocks: Sequence[Hashable]) -> None:
        """Adds the blocks of a prompt."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def overlap(self, blocks: Sequence[Hashable]) -> int:
        """Returns the number of leading blocks of a prompt that were sent to the engine."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count


@dataclass(slots=True, kw_only=True)
class KnownBlocks:
    """The blocks of an engine whose cache is followed.

    `present` has what the engine has reported; its owner changes it. Blocks of prompts that were sent and are not
    reported yet are expected while their sequences run, and until the second heartbeat after their end.
    """

    present: set[int] = field(default_factory=set[int])
    missing_share: float = 1.0
    """Share of the blocks of the latest prompts that the engine did not have, 0 to 1."""
    _expected: dict[int, int] = field(default_factory=dict[int, int])
    """Expected blocks, each with the number of sequences that bring it."""
    _by_sequence: dict[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    _ending: list[str] = field(default_factory=list[str])
    _ended: list[str] = field(default_factory=list[str])

    def sent(self, sequence_id: str, blocks: Sequence[int]) -> None:
        """A sequence is being sent to the engine. `blocks`: those of its prompt."""
        if not blocks:
            return
        self.missing_share += (1 - self.overlap(blocks) / len(blocks) - self.missing_share) / LATEST
        missing = blocks[_prefix(self.present, blocks, 0) :]
        if not missing:
            return
        self._release(sequence_id)
        self._by_sequence[sequence_id] = missing
        for block in missing:
            self._expected[block] = self._expected.get(block, 0) + 1

    def ended(self, sequence_id: str) -> None:
        """A sequence has ended at the engine or was moved away. Idempotent."""
        if sequence_id in self._by_sequence:
            self._ending.append(sequence_id)

    def heartbeat(self) -> None:
        """A heartbeat of the engine has arrived."""
        for sequence_id in self._ended:
            self._release(sequence_id)
        self._ended, self._ending = self._ending, []

    def overlap(self, blocks: Sequence[int]) -> int:
        """Returns the number of leading blocks of a prompt that the engine has, or will have soon."""
        count = _prefix(self.present, blocks, 0)
        return _prefix(self._expected, blocks, count) if self._expected else count

    def _release(self, sequence_id: str) -> None:
        for block in self._by_sequence.pop(sequence_id, ()):
            left = self._expected[block] - 1
            if left:
                self._expected[block] = left
            else:
                del self._expected[block]


def _prefix(known: Container[int], blocks: Sequence[int], least: int) -> int:
    """Returns how many leading blocks are known if the first `least` are.

    Looks at few of them: an engine that has a block has those before it, because it evicts the end of a prefix first.
    """
    most = len(blocks)
    while least < most:
        middle = (least + most) // 2
        if blocks[middle] in known:
            least = middle + 1
        else:
            most = middle
    return least
