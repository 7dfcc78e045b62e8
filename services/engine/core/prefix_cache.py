"""Finds computed prefixes and makes newly computed ones findable.

Content is known by the hash chain of `shared.blocks`; the blocks themselves are `block_pool`'s. A sequence keeps the
hashes that it came with or that were computed, so no block is hashed twice, not even after preemption. A block is
published only when all its tokens are computed. Two sequences that compute the same block at the same time each keep
their own: the first to be applied is published, the other stays nameless and is taken first when it is free again.
"""

from services.engine.core.block_pool import BlockPool
from services.engine.core.sequence import Sequence
from shared.blocks import child_hash, root_hash
from shared.codec import pack_ids


class PrefixCache:
    """The names of one pool's blocks. When disabled nothing is hashed, found or published."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled

    def lookup(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix, short of the last token: something must be left to sample from.

        They are not held yet: the caller takes them (`BlockPool.share`) before it allocates anything.
        """
        hits: list[int] = []
        for index in range(self._cacheable_blocks(sequence)):
            block = self._pool.find(self._hash(sequence, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def first_miss(self, sequence: Sequence, num_hits: int) -> bytes | None:
        """The hash whose publication would lengthen a lookup that gave `num_hits` blocks; None: no hash would."""
        return self._hash(sequence, num_hits) if num_hits < self._cacheable_blocks(sequence) else None

    def know(self, sequence: Sequence, num_blocks: int) -> None:
        """Has the hashes of the leading blocks worked out, for blocks that were not found by them."""
        if self._enabled and num_blocks:
            self._hash(sequence, num_blocks - 1)

    def publish(self, sequence: Sequence) -> None:
        """Names the blocks that have been filled and computed since the last call."""
        # Guesses that were right are computed before they are known here.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self._block_size
        if not self._enabled or num_full <= sequence.num_published_blocks:
            return
        for index in range(sequence.num_published_blocks, num_full):
            self._pool.register(sequence.block_table[index], self._hash(sequence, index))
        sequence.num_published_blocks = num_full

    def _cacheable_blocks(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self._block_size if self._enabled else 0

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
            start = len(hashes) * self._block_size
            hashes.append(child_hash(parent, pack_ids(sequence.tokens[start : start + self._block_size])))
        return hashes[index]
