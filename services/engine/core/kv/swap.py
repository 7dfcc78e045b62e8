"""The swap space for preempted sequences: assigns host blocks, and collects the copies that the next plan must make.

A preempted sequence is swapped out if there are host blocks for all its computed blocks and at least one full block
would have to be recomputed; otherwise the sequence is recomputed. A block that other sequences hold too does not count
as one to recompute, because it will likely be found in the prefix cache, which is looked up first when the sequence
resumes.

A plan's copies to the host run before its copies from the host. Copies to the host stay pending until a plan that is
not empty takes them. Host blocks that a plan copies back are freed only when that plan takes the copies; otherwise the
plan's copies to the host, which run first, could overwrite them. Host blocks can also be filled by a transfer from
another engine. Used only by `residency`, `scheduler` and `kv_transfer`.
"""

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.messages import EngineCounters


class SwapSpace:
    """The host blocks, in a pool of their own (numbered from 0), and the pending copies."""

    def __init__(
        self, num_blocks: int, block_size: int, device: BlockPool, windows: Windows, tally: EngineCounters
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._device, self._windows = device, windows
        self._tally = tally
        self.out: dict[int, int] = {}
        """The pending copies out: host block → device block. A later copy to the same host block replaces it."""
        self.back: list[tuple[int, int]] = []
        """The pending copies in: (host, device)."""

    def store(self, sequence: Sequence) -> bool:
        """Swaps out a sequence; returns False if it must be recomputed instead.

        The sequence must not be in flight and must still have its blocks.
        """
        computed = sequence.num_computed_tokens
        full = sequence.block_table[: computed // self._block_size]
        if all(self._device.ref_count(block) > 1 for block in full):
            return False
        count = -(-computed // self._block_size)
        # The last blocks of a table, and their columns, may have only tokens that are not computed.
        windows = self._windows.columns(sequence, sequence.window_first, count)
        host_blocks = self.pool.allocate(count + len(windows))
        if host_blocks is None:
            self._tally.swap_refusals += 1
            return False
        sequence.host_blocks, sequence.host_windows = host_blocks[:count], host_blocks[count:]
        sequence.num_host_tokens, sequence.num_host_skipped = computed, 0
        sequence.host_window_first = sequence.window_first
        self.out.update(zip(host_blocks, sequence.block_table[:count] + windows, strict=True))
        self._tally.swapped_out_blocks += len(host_blocks)
        return True

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` host blocks for the caller, which fills them.

        Returns None, and takes none, if there are too few.

        Pending copies of ended sequences to these blocks are dropped, because they would overwrite the new content.
        """
        host_blocks = self.pool.allocate(count)
        for block in host_blocks or ():
            self.out.pop(block, None)
        return host_blocks

    def bring_back(self, sequence: Sequence, first: int) -> None:
        """Adds copies from the host for the block table's indices from `first` on, and for all columns on the host.

        Frees the host blocks before them. `first` is at least `num_host_skipped`.
        """
        used = sequence.host_blocks[first - sequence.num_host_skipped :]
        self.back += zip(used, sequence.block_table[first:], strict=False)
        self.back += zip(sequence.host_windows, sequence.window_blocks, strict=False)
        used += sequence.host_windows
        self._tally.swapped_in_blocks += len(used)
        self.drop(sequence, used)

    def drop(self, sequence: Sequence, in_use: list[int] | tuple[()] = ()) -> None:
        """Frees a sequence's host blocks except those `in_use`: the next plan reads these; `announce` frees them."""
        keep = set(in_use)
        self.pool.free([block for block in sequence.host_blocks + sequence.host_windows if block not in keep])
        sequence.host_blocks, sequence.host_windows = [], []
        sequence.num_host_tokens = sequence.num_host_skipped = 0

    def announce(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Returns the pending (device, host) copies out and (host, device) copies in, and clears them.

        Frees the host blocks that are copied in. To be called only for a plan that will be run.
        """
        out, back = tuple((device, host) for host, device in self.out.items()), tuple(self.back)
        self.pool.free([host for host, _ in back])
        self.out.clear()
        self.back.clear()
        return out, back
