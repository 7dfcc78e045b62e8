"""The KV cache and the swap space as blocks in the form in which engines exchange them (`kv.layout`)."""

import numpy as np
import torch
from torch import Tensor

from services.engine.kv.layout import Bytes, KvLayout
from services.engine.worker.capacity.kv_cache import KvCache


class CacheMemory:
    """A `KvMemory` of two `KvCache`: the device's, on a CPU or another device, and the host's.

    `head_dim` is the number of components of a head that are transferred; the cache may have more, for alignment.
    """

    def __init__(self, cache: KvCache, host: KvCache, head_dim: int) -> None:
        first = cache.key_caches[0]
        _, block_size, num_heads, _ = first.shape
        head_bytes = head_dim * first.dtype.itemsize
        name = str(first.dtype).removeprefix("torch.")
        self.layout = KvLayout(len(cache.key_caches), num_heads, head_bytes, name, block_size, cache.parts_per_layer)
        self._cache = cache.parts
        self._host = [_as_bytes(part).numpy() for part in host.parts]
        on_host = first.device.type == "cpu"
        self._read_from = [_as_bytes(part).numpy() for part in self._cache] if on_host else None

    def read(self, block: int, out: Bytes) -> None:
        """See `KvMemory`."""
        num_tokens, width = out.shape[2], out.shape[4]
        for index, part in enumerate(out.reshape(-1, *out.shape[2:])):
            part[:] = self._block(index, block)[:num_tokens, :, :width]

    def write(self, host_block: int, data: Bytes) -> None:
        """See `KvMemory`."""
        num_tokens, width = data.shape[2], data.shape[4]
        for target, part in zip(self._host, data.reshape(-1, *data.shape[2:]), strict=True):
            target[host_block, :num_tokens, :, :width] = part

    def _block(self, index: int, block: int) -> Bytes:
        if self._read_from is not None:
            return self._read_from[index][block]
        return _as_bytes(self._cache[index][block]).cpu().numpy()


class PackedMemory:
    """A `KvMemory` of a `KvCache` on a device and of host blocks, [host blocks, layers * parts of a layer, bytes].

    A host block holds all layers, of each its keys and then its values, or its rows of latents.
    """

    def __init__(self, cache: KvCache, host: Tensor) -> None:
        first = cache.key_caches[0]
        _, block_size, num_heads, head_dim = first.shape
        name = str(first.dtype).removeprefix("torch.")
        num_layers, head_bytes = len(cache.key_caches), head_dim * first.dtype.itemsize
        self.layout = KvLayout(num_layers, num_heads, head_bytes, name, block_size, cache.parts_per_layer)
        self._cache = cache.parts
        self._host = host.numpy().view(np.uint8).reshape(-1, len(cache.parts), block_size, num_heads, head_bytes)

    def read(self, block: int, out: Bytes) -> None:
        """See `KvMemory`."""
        parts = torch.stack([_as_bytes(part[block, : out.shape[2]]) for part in self._cache])
        out[:] = parts.cpu().numpy().reshape(out.shape)

    def write(self, host_block: int, data: Bytes) -> None:
        """See `KvMemory`."""
        self._host[host_block, :, : data.shape[2]] = data.reshape(-1, *data.shape[2:])


def _as_bytes(values: Tensor) -> Tensor:
    """Returns a view of a contiguous tensor with bytes in the last dimension."""
    return values.view(torch.uint8)
