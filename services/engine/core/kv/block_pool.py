"""The pool of KV blocks: reference counts, free list, content hashes.

The pool does not know sequences or tokens: the scheduler holds blocks, and `prefix_cache` registers their hashes. A
block is either held (reference count of at least 1) or on the free list. A free block may keep its hash and can then be
found and held again. The free list is in eviction order: `allocate` takes from its head, and a block with a hash that
is taken loses the hash, that is, its content is evicted. A freed block without a hash goes to the head, because
reusing it loses no cached content. Freed blocks with a hash go to the tail, the last block of a table first, so that
the end of a prefix is evicted before its beginning.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class BlockWatcher(Protocol):
    """Follows which blocks with a content hash the pool has. Called on the thread that steps the engine."""

    def stored(self, block_hash: bytes) -> None:
        """A block has got this hash."""
        ...

    def removed(self, block_hash: bytes) -> None:
        """The block with this hash was evicted."""
        ...


class BlockPool:
    """All blocks of the KV cache, numbered 0 to num_blocks - 1. Every operation takes O(1) time for each block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.on_reuse: Callable[[int], None] | None = None
        """Called with each block that `allocate` gives other content."""
        self.watchers: tuple[BlockWatcher, ...] = ()
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # The free list is a doubly linked ring of block numbers; `num_blocks` is the sentinel between tail and head.
        self._ring_end = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` free blocks, each with one reference and no hash. Returns None, and takes none, if too few."""
        if count > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(count):
            block = self._next[self._ring_end]
            self._unlink(block)
            self._evict(block)
            if self.on_reuse is not None:
                self.on_reuse(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each block. A free block leaves the free list and keeps its hash."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Removes one reference from each block of a table, last block first. Blocks without references become free."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was freed more often than it was taken"
            if self._refs[block] == 0:
                at_head = self._hashes[block] is None
                self._link_before(block, self._next[self._ring_end] if at_head else self._ring_end)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Registers the content hash of a held block. Returns False, without effect, if another block has that hash."""
        assert self._refs[block] > 0, f"block {block} is free"
        assert self._hashes[block] is None, f"block {block} has a name"
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        for watcher in self.watchers:
            watcher.stored(block_hash)
        return True

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block with this content hash, held or free; None if there is none."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        """Returns whether the block has no references."""
        return self._refs[block] == 0

    def ref_count(self, block: int) -> int:
        """Returns the number of block tables and transfers that hold the block."""
        return self._refs[block]

    def hash_of(self, block: int) -> bytes | None:
        """Returns the block's content hash; None if it has none."""
        return self._hashes[block]

    @property
    def num_named(self) -> int:
        """Number of blocks with a content hash."""
        return len(self._by_hash)

    def content(self) -> list[bytes]:
        """Returns the content hashes of all blocks that have one, in the order in which they were registered."""
        return list(self._by_hash)

    def eviction_order(self) -> Iterator[int]:
        """Returns the free blocks in the order in which `allocate` takes them."""
        block = self._next[self._ring_end]
        while block != self._ring_end:
            yield block
            block = self._next[block]

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
            for watcher in self.watchers:
                watcher.removed(block_hash)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link_before(self, block: int, after: int) -> None:
        before = self._prev[after]
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_free += 1
