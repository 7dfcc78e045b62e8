"""The transfer layout of KV blocks, which allows engines with different backends to exchange blocks.

A block of n tokens is, for each layer, its keys and then its values, [n, kv_heads, head_dim] each, in the cache's type:

    [layers, 2, n, kv_heads, head_bytes]    bytes, contiguous; head_bytes = head_dim * size of a number

In a model with latent attention, a layer has one part in place of two, the latents:
[layers, 1, n, 1, bytes of a row]. In a model with several groups of layers, the layers are those of the block's group;
each group takes as many (`DecoderDescription.kv_groups`).
Backends whose cache has another layout (padded heads, another order of dimensions, device memory) convert blocks
(`KvMemory`).
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from antiphon.services.engine.kv.pieces import Bytes, PiecedBlocks


class KvLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
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


@dataclass(frozen=True, slots=True)
class OwnForm:
    """Whole blocks as they are in a backend's cache, which engines with the same cache exchange without a conversion.

    Engines whose forms have the same name, and whose layouts are equal, have the same bytes for the same block. In a
    partly filled block, the bytes after its tokens may have any value.
    """

    name: str
    cache: PiecedBlocks
    host: PiecedBlocks


class KvMemory(Protocol):
    """A worker's KV cache and swap space as blocks of the common layout. All methods may be called on any thread."""

    @property
    def layout(self) -> KvLayout:
        """The common layout of this worker's blocks."""
        ...

    @property
    def own(self) -> OwnForm | None:
        """Another form of the blocks, which is faster to read and to write; None: there is none."""
        ...

    def read(self, block: int, out: Bytes) -> int:
        """Copies the first tokens of a block of the KV cache to `out`, which has the shape `layout.shape(n)`.

        `out` is contiguous. No step may write to these tokens meanwhile. Returns the checksum of `out`.
        """
        ...

    def write(self, host_block: int, data: Bytes) -> int:
        """Copies `data`, of the shape `layout.shape(n)`, to the first tokens of a host block.

        No plan may use the host block meanwhile. Returns the checksum of what was copied. The caller compares it with
        that of the sender, and does not let anything use the block if they differ.
        """
        ...


def place_bytes(memory: KvMemory) -> int:
    """Returns the bytes that a receiver needs for a block: room for each of its forms."""
    common = memory.layout.num_bytes(memory.layout.block_size)
    return common if memory.own is None else max(common, memory.own.cache.num_bytes)
