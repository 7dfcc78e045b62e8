"""Host memory for preempted sequences: which of its blocks hold whose KV, and the copies that the next plan must make.

A preempted sequence is swapped out if the host has room for all its computed blocks and at least one full block would
have to be computed again; otherwise it is recomputed. Blocks that others hold as well do not count for that: they are
likely to be found again through the prefix cache, which is always asked first when the sequence comes back.

Copies run in the order of plans, out before in. A copy out is kept until a plan is really carried out. Host blocks that
are copied in become free only with that plan, since its copies out come first. Used by `scheduler` alone.
"""

from services.engine.core.block_pool import BlockPool
from services.engine.core.counters import Tally
from services.engine.core.sequence import Sequence


class SwapSpace:
    """The host's blocks, numbered like the device's but a pool of their own."""

    def __init__(self, num_blocks: int, block_size: int, device: BlockPool, tally: Tally) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._device = device
        self._tally = tally
        self._out: dict[int, int] = {}
        """Host block to the device block that is copied to it; a later copy to the same block replaces an earlier."""
        self._in: list[tuple[int, int]] = []

    def store(self, sequence: Sequence) -> bool:
        """Swaps out a sequence that no plan holds and that still has its blocks; False: it must be recomputed."""
        computed = sequence.num_computed_tokens
        full = sequence.block_table[: computed // self._block_size]
        if all(self._device.ref_count(block) > 1 for block in full):
            return False
        count = -(-computed // self._block_size)
        host_blocks = self.pool.allocate(count)
        if host_blocks is None:
            return False
        sequence.host_blocks = host_blocks
        sequence.num_host_tokens = computed
        self._out.update(zip(host_blocks, sequence.block_table, strict=False))
        self._tally.swapped_out_blocks += count
        return True

    def bring_back(self, sequence: Sequence, first: int) -> None:
        """Copies host blocks from the `first` on to the same places of the block table. `first` may be behind all."""
        for index in range(first, len(sequence.host_blocks)):
            self._in.append((sequence.host_blocks[index], sequence.block_table[index]))
        self._tally.swapped_in_blocks += max(0, len(sequence.host_blocks) - first)
        self.drop(sequence, sequence.host_blocks[first:])

    def drop(self, sequence: Sequence, in_use: list[int] | tuple[()] = ()) -> None:
        """Forgets what is stored of a sequence; blocks that the next plan reads are free only after it."""
        keep = set(in_use)
        self.pool.free([block for block in sequence.host_blocks if block not in keep])
        sequence.host_blocks = []
        sequence.num_host_tokens = 0

    def announce(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(device, host) copies out and (host, device) copies in, for a plan that will be carried out."""
        out, back = tuple((device, host) for host, device in self._out.items()), tuple(self._in)
        self.pool.free([host for host, _ in back])
        self._out.clear()
        self._in.clear()
        return out, back
