"""The KV cache and the swap space as blocks in the form in which engines exchange them (`kv.layout`)."""

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.kv.layout import KvLayout
from antiphon.services.engine.kv.pieces import Bytes, NativeCopy, PiecedBlocks
from antiphon.services.engine.worker.capacity.kv_cache import KvCache


class CacheMemory:
    """A `KvMemory` of a `KvCache` on the computing device (a CPU or another device), and of the blocks of swap space.

    `native`: the C++ library's copy, if this machine has the library.
    """

    own = None
    """See `KvMemory`: the common form is that of the cache."""

    def __init__(self, cache: KvCache, host: PiecedBlocks, native: NativeCopy | None = None) -> None:
        self.layout = _layout(cache)
        self._cache, self._host, self._native = cache.parts, host, native
        self._read_from = blocks_of(cache, native) if cache.key_caches[0].device.type == "cpu" else None

    def read(self, block: int, out: Bytes) -> int:
        """See `KvMemory`."""
        if self._read_from is not None:
            return self._read_from.read(block, out)
        return _fetch(self._cache, block, out, self._native)

    def write(self, host_block: int, data: Bytes) -> int:
        """See `KvMemory`."""
        return self._host.write(host_block, data)


def packed_blocks(host: Tensor, native: NativeCopy | None = None) -> PiecedBlocks:
    """Returns the blocks of a tensor [host blocks, layers * parts of a layer, words], of which each has all layers.

    A block has for each layer its keys and then its values, or its rows of latents.
    """
    parts = host.numpy().view(np.uint8)
    return PiecedBlocks([parts[:, part] for part in range(parts.shape[1])], native)


def blocks_of(cache: KvCache, native: NativeCopy | None = None) -> PiecedBlocks:
    """Returns the blocks of a cache in the host's memory, of which each has a piece in each of the cache's tensors."""
    # `view` never copies; sizes are given because a cache may have no blocks.
    arrays = [_as_bytes(part).view(len(part), part.shape[1:].numel() * part.itemsize).numpy() for part in cache.parts]
    return PiecedBlocks(arrays, native)


def _layout(cache: KvCache) -> KvLayout:
    first = cache.parts[0]
    _, block_size, num_heads, head_dim = first.shape
    name = str(first.dtype).removeprefix("torch.")
    head_bytes = head_dim * first.dtype.itemsize
    return KvLayout(
        num_layers=len(cache.parts) // cache.parts_per_layer,
        num_kv_heads=num_heads,
        head_bytes=head_bytes,
        dtype=name,
        block_size=block_size,
        num_parts=cache.parts_per_layer,
    )


def _fetch(cache: tuple[Tensor, ...], block: int, out: Bytes, native: NativeCopy | None) -> int:
    """Reads a block of a cache on a device, with one copy from the device for all layers."""
    parts = torch.stack([_as_bytes(part[block, : out.shape[2]]) for part in cache])
    return PiecedBlocks([parts.cpu().numpy().reshape(1, -1)], native).read(0, out)


def _as_bytes(values: Tensor) -> Tensor:
    """Returns a view of a contiguous tensor with bytes in the last dimension."""
    return values.view(torch.uint8)
