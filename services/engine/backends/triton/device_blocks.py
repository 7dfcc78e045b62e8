"""The KV cache on a GPU as one tensor, the swap space in main memory, and the block copies of plans.

    cache   [parts, num_blocks, block bytes]; the l-th layer that attends has its keys in part 2 l, its values in part
            2 l + 1. With latent attention a layer has one part, its rows of latents. Layers with heads of their own
            may share parts (`DecoderDescription.slabs`), as do the l-th layers of all groups (`kv_groups`)
    host    [num_host_blocks, parts, block bytes]; the data of a block in all layers is contiguous

Blocks that are swapped out or in are packed into one contiguous buffer on the device, so that one large copy moves many
blocks. Called by the GPU worker.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from antiphon.services.engine.backends.triton.staging import sent
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.kv.pieces import NativeCopy
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.kv_cache import cache_of
from antiphon.services.engine.worker.capacity.kv_memory import CacheMemory, packed_blocks

_TOGETHER = 64
"""Maximum number of blocks in one packed buffer, which bounds the buffer's memory."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

Pairs = tuple[tuple[int, int], ...]


class DeviceBlocks:
    """The KV cache and the swap space. `kv` holds views of the cache tensor, in the shape that attention takes."""

    def __init__(
        self,
        description: DecoderDescription,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        width = description.slab_width
        block_bytes = block_size * width * dtype.itemsize
        parts = description.cache_parts * len(description.slabs)
        # Zeroed because attention also reads slots that were never written, and masks them afterwards.
        whole = torch.zeros((parts, num_blocks, block_bytes), dtype=torch.uint8, device=device)
        self.kv = cache_of(description, [part.view(dtype).view(num_blocks, block_size, width) for part in whole])
        size = next(size for size in (8, 4, 2, 1) if block_bytes % size == 0)
        self._words = whole.view(_WORDS[size])
        # Pages are allocated when first written. The array has words, because an empty one of bytes could not be viewed
        # as words afterwards.
        host = np.zeros((num_host_blocks, parts, block_bytes // size), dtype=f"i{size}")
        self._host = torch.from_numpy(host)
        self._device = device

    def memory(self, native: NativeCopy | None) -> KvMemory:
        """Returns access to the blocks for exchanges with other engines, see `KvWorker`."""
        return CacheMemory(self.kv, packed_blocks(self._host, native), native)

    def carry_out(self, plan: StepPlan) -> None:
        """Executes the block copies of a plan: device to host, host to device, then device to device."""
        for blocks, places in _portions(plan.swap_out):
            packed = self._packed(len(blocks))
            gather_blocks(self._words, self._on_device(blocks), packed)
            self._host[places] = packed.cpu()
        for places, blocks in _portions(plan.swap_in):
            scatter_blocks(sent(self._host[places], self._device), self._on_device(blocks), self._words)
        for sources, targets in _portions(plan.copies):
            copy_blocks(self._words, self._on_device(sources), self._on_device(targets))

    def _packed(self, count: int) -> Tensor:
        parts, _, words = self._words.shape
        return torch.empty((count, parts, words), dtype=self._words.dtype, device=self._device)

    def _on_device(self, blocks: Tensor) -> Tensor:
        return sent(blocks.to(torch.int32), self._device)


def _portions(pairs: Pairs) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (sources, targets), [n] int64 each, with n at most `_TOGETHER`."""
    for first in range(0, len(pairs), _TOGETHER):
        columns = torch.tensor(pairs[first : first + _TOGETHER], dtype=torch.int64)
        yield columns[:, 0], columns[:, 1]
