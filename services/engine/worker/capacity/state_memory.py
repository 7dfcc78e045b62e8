"""The KV memory of a model with recurrent states, whose slots are addressed like blocks, as pieces of a block's size.

The number of a piece is `core.kv.state_pieces`'s: first + slot * pieces + piece, where `first` is the number of blocks
of the cache for reading, of the host for writing. The bytes of a state are those of its layers, one after the other.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.kv.layout import KvLayout, KvMemory
from antiphon.services.engine.kv.pieces import Bytes, checksum

PIECES_MAX = 2**16
"""Most pieces of a state: their numbers have two bytes in the names of pieces (`core.kv.state_pieces`)."""


def num_pieces(state_bytes: int, layout: KvLayout) -> int:
    """Returns the number of pieces of a state."""
    return -(-state_bytes // layout.num_bytes(layout.block_size))


class StateMemory:
    """A `KvMemory` of the blocks of `inner` and of the states [slots, size] float32 of each recurrent layer, on a CPU.

    Blocks have the common form only, because the pieces have no other.
    """

    own = None

    def __init__(self, inner: KvMemory, states: Sequence[Tensor], num_blocks: int, num_host_blocks: int) -> None:
        self._inner, self._num_blocks, self._num_host_blocks = inner, num_blocks, num_host_blocks
        self._states = [each.numpy().view(np.uint8) for each in states]
        self._piece = self.layout.num_bytes(self.layout.block_size)
        self._count = num_pieces(sum(each.shape[1] for each in self._states), self.layout)

    @property
    def layout(self) -> KvLayout:
        """See `KvMemory`."""
        return self._inner.layout

    def read(self, block: int, out: Bytes) -> int:
        """See `KvMemory`."""
        if block < self._num_blocks:
            return self._inner.read(block, out)
        flat, end = out.reshape(-1), 0
        for part in self._parts(block - self._num_blocks):
            flat[end : end + len(part)] = part
            end += len(part)
        flat[end:] = 0
        return checksum(out)

    def write(self, host_block: int, data: Bytes) -> int:
        """See `KvMemory`."""
        if host_block < self._num_host_blocks:
            return self._inner.write(host_block, data)
        flat, end = data.reshape(-1), 0
        for part in self._parts(host_block - self._num_host_blocks):
            part[:] = flat[end : end + len(part)]
            end += len(part)
        return checksum(data)

    def _parts(self, number: int) -> Iterator[NDArray[np.uint8]]:
        """Yields the memory of a piece."""
        slot, piece = divmod(number, self._count)
        first, end, begin = piece * self._piece, (piece + 1) * self._piece, 0
        for layer in self._states:
            size = layer.shape[1]
            low, high = max(first - begin, 0), min(end - begin, size)
            if low < high:
                yield layer[slot, low:high]
            begin += size
