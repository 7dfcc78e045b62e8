"""Looks up computed prefixes and publishes newly computed blocks.

Block content is identified by the hash chain of `antiphon.shared.blocks`; `block_pool` holds the blocks and their
hashes. A sequence keeps the hashes that came with it or were computed, so no block is hashed twice, even after
preemption. A block is published (its hash is registered in the pool) only when all its tokens are computed. Two
sequences that compute the same block at the same time each keep their own block: the block whose plan is applied first
is published; the other one gets no hash, so that after it is freed it is among the first blocks to be allocated again.
"""

from collections.abc import Callable

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.states import StatePool
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.blocks import child_hash, images_part, root_hash
from antiphon.shared.codec import pack_ids


class PrefixCache:
    """The prefix cache of one block pool. If disabled, nothing is hashed, found or published."""

    def __init__(self, pool: BlockPool, block_size: int, states: StatePool, windows: Windows, *, enabled: bool) -> None:
        self._pool, self._states, self._windows = pool, states, windows
        self._block_size = block_size
        self._enabled = enabled
        self.on_published: Callable[[Sequence, int, int], None] | None = None
        """Called with a sequence and the range of its blocks that have just been named, [first, end)."""

    def lookup(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of the longest cached prefix that leaves out the last token (needed for sampling).

        The lookup adds no references: the caller must call `BlockPool.share` before it allocates other blocks.
        """
        hits: list[int] = []
        for index in range(self._cacheable_blocks(sequence)):
            block = self._pool.find(self._hash(sequence, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def first_miss(self, sequence: Sequence, num_hits: int) -> bytes | None:
        """Returns the hash of the first block that a lookup with `num_hits` hits did not find; None if it found all."""
        return self._hash(sequence, num_hits) if num_hits < self._cacheable_blocks(sequence) else None

    def know(self, sequence: Sequence, num_blocks: int) -> None:
        """Computes the missing hashes of the sequence's first `num_blocks` blocks."""
        if self._enabled and num_blocks:
            self._hash(sequence, num_blocks - 1)

    def names(self, sequence: Sequence, num_tokens: int | None = None) -> list[bytes]:
        """Returns the hashes of all blocks of the first `num_tokens` tokens (default: all), a partly filled one too.

        The hash of a partly filled last block is that of its tokens. Works with the cache disabled, too.
        """
        count = sequence.num_tokens if num_tokens is None else num_tokens
        num_full = count // self._block_size
        if num_full:
            self._hash(sequence, num_full - 1)
        names = sequence.block_hashes[:num_full]
        if count % self._block_size:
            parent = names[-1] if names else root_hash(sequence.cache_salt)
            names.append(self._child(sequence, parent, num_full * self._block_size, count))
        return names

    def publish(self, sequence: Sequence) -> None:
        """Publishes the sequence's blocks that have become full and computed since the last call."""
        # Accepted draft tokens count as computed before the core appends them to the sequence's known tokens.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self._block_size
        if not self._enabled or sequence.canary or num_full <= sequence.num_published_blocks:
            return
        first_new = num_full
        for index in range(sequence.num_published_blocks, num_full):
            block, block_hash = sequence.block_table[index], self._hash(sequence, index)
            if self._pool.register(block, block_hash):
                first_new = min(first_new, index)
            elif (named := self._pool.find(block_hash)) is not None:
                self._states.snapshots.move(block, named)
            self._windows.publish(sequence, index, block_hash)
        sequence.num_published_blocks = num_full
        if self.on_published is not None and first_new < num_full:
            self.on_published(sequence, first_new, num_full)

    def _cacheable_blocks(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self._block_size if self._enabled else 0

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
            start = len(hashes) * self._block_size
            hashes.append(self._child(sequence, parent, start, start + self._block_size))
        return hashes[index]

    def _child(self, sequence: Sequence, parent: bytes, start: int, end: int) -> bytes:
        packed = pack_ids(sequence.tokens[start:end])
        if not sequence.images:
            return child_hash(parent, packed)
        return child_hash(parent, packed, images_part(((one.start, one.key) for one in sequence.images), start, end))
