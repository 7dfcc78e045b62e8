"""The transfer layout of KV blocks, which allows engines with different backends to exchange blocks.

A block of n tokens is, for each layer, its keys and then its values, [n, kv_heads, head_dim] each, in the cache's type:

    [layers, 2, n, kv_heads, head_bytes]    bytes, contiguous; head_bytes = head_dim * size of a number

In a model with latent attention, a layer has one part in place of two, the latents:
[layers, 1, n, 1, bytes of a row].
Backends whose cache has another layout (padded heads, another order of dimensions, device memory) convert blocks
(`KvMemory`).
"""

import zlib
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_ROW_WORDS = 512


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """The shape and type of an engine's blocks. Engines can exchange blocks only if their layouts are equal."""

    num_layers: int
    num_kv_heads: int
    head_bytes: int
    dtype: str
    """Type of the numbers, such as `bfloat16`."""
    block_size: int
    num_parts: int = 2
    """Number of parts of a layer: 2 for keys and values, 1 for latents."""

    def shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """Returns the shape of a block with `num_tokens` tokens, in bytes."""
        return self.num_layers, self.num_parts, num_tokens, self.num_kv_heads, self.head_bytes

    def num_bytes(self, num_tokens: int) -> int:
        """Returns the size of a block with `num_tokens` tokens."""
        return self.num_layers * self.num_parts * num_tokens * self.num_kv_heads * self.head_bytes


def checksum(data: Bytes) -> int:
    """Returns a checksum of a contiguous block: the CRC-32 of its row sums and column sums as a table of 64-bit words.

    It detects damage within one row or one column, and a wrong order of rows. It takes a fifth of the time of a CRC-32
    over all bytes, which would take longer than the transfer through shared memory.
    """
    flat = data.reshape(-1)
    num_rows = flat.size // (8 * _ROW_WORDS)
    table = flat[: num_rows * 8 * _ROW_WORDS].view("<u8").reshape(num_rows, _ROW_WORDS)
    rest = zlib.crc32(flat[num_rows * 8 * _ROW_WORDS :].data)
    sums = (table.sum(axis=axis, dtype="<u8") for axis in (0, 1))
    return zlib.crc32(np.concatenate(list(sums)).data, rest)


class KvMemory(Protocol):
    """A worker's KV cache and swap space as blocks of the common layout. Both methods may be called on any thread."""

    @property
    def layout(self) -> KvLayout:
        """The common layout of this worker's blocks."""
        ...

    def read(self, block: int, out: Bytes) -> None:
        """Copies the first tokens of a block of the KV cache to `out`, which has the shape `layout.shape(n)`.

        No step may write to these tokens meanwhile.
        """
        ...

    def write(self, host_block: int, data: Bytes) -> None:
        """Copies `data`, of the shape `layout.shape(n)`, to the first tokens of a host block.

        No plan may use the host block meanwhile.
        """
        ...
