"""KV blocks by number: who holds them, which are free, what cached content they have.

Knows nothing of sequences or tokens: the scheduler holds blocks, `prefix_cache` gives them names. A block is either
held (reference count of at least one) or on the free list; a free block may still have a name and then be found and
held again. The free list is in eviction order: `allocate` takes from its head, and a named block taken there loses its
name: it is evicted. Blocks without a name go to the head when freed, as nothing is lost with them; named ones to the
tail, the last of a table first, so that the tail of a prefix is evicted before what it hangs on.
"""

from collections.abc import Iterator, Sequence


class BlockPool:
    """All blocks of the KV cache, numbered 0 to num_blocks - 1. Every operation is O(1) for each block named."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # A ring of block numbers; the number after the last block is the sentinel between tail and head.
        self._ring_end = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks, each with one reference and no name; None, and no change, if there are too few."""
        if count > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(count):
            block = self._next[self._ring_end]
            self._unlink(block)
            self._evict(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each; a free one leaves the free list with its name."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block of a table; those without any are free, the last one evicted first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was freed more often than it was taken"
            if self._refs[block] == 0:
                at_head = self._hashes[block] is None
                self._link_before(block, self._next[self._ring_end] if at_head else self._ring_end)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Names a held block by its content; False, and no change, if another block has that name."""
        assert self._refs[block] > 0, f"block {block} is free"
        assert self._hashes[block] is None, f"block {block} has a name"
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        """True while nobody holds the block."""
        return self._refs[block] == 0

    def ref_count(self, block: int) -> int:
        """How many tables hold the block."""
        return self._refs[block]

    def hash_of(self, block: int) -> bytes | None:
        """The block's name."""
        return self._hashes[block]

    @property
    def num_named(self) -> int:
        """Blocks that can be found by content."""
        return len(self._by_hash)

    def eviction_order(self) -> Iterator[int]:
        """The free blocks, next one to be taken first."""
        block = self._next[self._ring_end]
        while block != self._ring_end:
            yield block
            block = self._next[block]

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link_before(self, block: int, after: int) -> None:
        before = self._prev[after]
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_free += 1
