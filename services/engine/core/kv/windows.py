"""The columns: blocks of the groups of layers that see a window only, beside the blocks of the first group (`paging`).

All groups take their blocks from the same pool. A sequence holds the columns from `Sequence.window_first` to the end of
its block table; those before are freed when all results are applied that could read them. A freed column is cached as
other blocks are, under its block's name and the number of the group. So a cached prefix is usable if the columns that
its next token reads are cached too. Used by `residency`, the prefix cache, `reuse`, `swap` and `kv_transfer`.
"""

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.paging import Paging
from antiphon.services.engine.core.sequence import Sequence


class Windows:
    """The columns of all sequences. False in a model without windowed groups; its methods then do nothing."""

    def __init__(self, paging: Paging, pool: BlockPool) -> None:
        self.paging = paging
        self.groups = paging.num_windowed
        self._pool = pool

    def __bool__(self) -> bool:
        return self.groups > 0

    # --- what can be reused -------------------------------------------------------------------------------------------

    def names(self, block_name: bytes) -> list[bytes]:
        """Returns the names of the blocks of a column."""
        return [block_name + group.to_bytes(2, "little") for group in range(self.groups)]

    def usable(self, sequence: Sequence, hits: list[int]) -> list[int]:
        """Returns the longest prefix of cached blocks that is followed by a token whose columns are cached."""
        count = len(hits)
        while self and count:
            first = self._first_after(count)
            missing = [index for index in range(first, count) if self._find(sequence, index) is None]
            if not missing:
                break
            # A prefix that ends behind the missing column, but not before it, would read it too.
            count = missing[-1]
        return hits[:count]

    def cached(self, sequence: Sequence, num_hits: int) -> tuple[int, list[int]]:
        """Returns the first column that the token after a `usable` prefix reads, and the blocks from there on."""
        first = self._first_after(num_hits)
        columns = [self._find(sequence, index) or [] for index in range(first, num_hits)] if self else []
        return first, [block for column in columns for block in column]

    def held(self, sequence: Sequence, num_tokens: int) -> tuple[int, list[int], tuple[int, ...]] | None:
        """Returns what a token after the first `num_tokens` of a running sequence reads of the columns that it holds.

        These are: the first column, the blocks of the columns of full blocks, and the column of a partly filled one.
        None if the sequence does not hold them all.
        """
        if not self:
            return 0, [], ()
        first, (full, rest) = self.paging.first_read(num_tokens), divmod(num_tokens, self.paging.block_size)
        if first < sequence.window_first:
            return None
        copied = tuple(self.columns(sequence, full, full + 1)) if rest else ()
        return first, self.columns(sequence, first, full), copied

    # --- what sequences hold ------------------------------------------------------------------------------------------

    def demand(self, first: int, num_held: int, num_tokens: int) -> int:
        """Returns how many blocks the columns from `first` to that of the last of `num_tokens` take.

        `num_held`: number of blocks of these that need not be allocated.
        """
        return self.groups * (self.paging.blocks_for(num_tokens) - first) - num_held if self else 0

    def start(self, sequence: Sequence, first: int, shared: list[int]) -> list[int]:
        """Gives a joining sequence its columns, beginning with the shared blocks. Returns the new blocks."""
        if not self:
            return []
        count = self.groups * (len(sequence.block_table) - first) - len(shared)
        new = self._pool.allocate(count)
        assert new is not None, "a sequence that fits found no blocks for its windows"
        sequence.window_first, sequence.window_blocks = first, shared + new
        return new

    def columns(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """Returns the blocks of the columns [first, end) of its block table, all of which it must hold."""
        start = sequence.window_first
        return sequence.window_blocks[self.groups * (first - start) : self.groups * (end - start)]

    def last(self, sequence: Sequence, count: int) -> list[int]:
        """Returns the blocks of the last `count` columns."""
        return sequence.window_blocks[len(sequence.window_blocks) - self.groups * count :]

    def publish(self, sequence: Sequence, index: int, block_name: bytes) -> None:
        """Names the blocks of a column whose tokens are all computed, if the sequence still holds it."""
        if self and index >= sequence.window_first:
            column = self.columns(sequence, index, index + 1)
            for block, name in zip(column, self.names(block_name), strict=True):
                if self._pool.hash_of(block) is None:
                    self._pool.register(block, name)

    def pass_by(self, sequence: Sequence) -> None:
        """Frees the columns that no later step of a sequence reads."""
        if not self:
            return
        first = self.paging.first_kept(sequence.num_computed_tokens)
        if (passed := self.groups * (first - sequence.window_first)) > 0:
            self._pool.free(sequence.window_blocks[:passed])
            del sequence.window_blocks[:passed]
            sequence.window_first = first

    def cut(self, sequence: Sequence, num_blocks: int, *, with_next: bool) -> tuple[int, ...]:
        """Leaves a sequence, in a list of its own, the columns of the first `num_blocks` blocks; frees none.

        Returns the column after them if `with_next`.
        """
        following = tuple(self.columns(sequence, num_blocks, num_blocks + with_next))
        sequence.window_blocks = self.columns(sequence, sequence.window_first, num_blocks)
        return following

    def release(self, sequence: Sequence) -> None:
        """Frees all columns of a sequence."""
        self._pool.free(sequence.window_blocks)
        sequence.window_blocks, sequence.window_first = [], 0

    # ------------------------------------------------------------------------------------------------------------------

    def _first_after(self, num_blocks: int) -> int:
        return self.paging.first_read(num_blocks * self.paging.block_size)

    def _find(self, sequence: Sequence, index: int) -> list[int] | None:
        """Returns the cached column of a block whose hash is known; None if not all of it is cached."""
        found = [self._pool.find(name) for name in self.names(sequence.block_hashes[index])]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == self.groups else None
