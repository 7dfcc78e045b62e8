"""The physical KV cache: decides the number of blocks and allocates the tensors.

    key_caches[layer], value_caches[layer]   [num_blocks, block_size, kv_heads, head_dim]
    slabs                                    [num_blocks, block_size, width]

The layers of several groups with block tables of their own (`DecoderDescription.kv_groups`) use the same slabs.
Layers that are narrower than others share a slab: of each token it has the numbers of one layer after those of the
other (`DecoderDescription.slabs`). Otherwise each layer's tensor is a slab.

A model with latent attention has no value caches: its key caches contain the latents.
The core decides what each block holds. Called by the workers at start-up.
"""

import contextlib
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.context import context_length
from antiphon.services.engine.worker.capacity.memory_advice import measures
from antiphon.services.engine.worker.capacity.paging import paging_of, sequence_tokens, useful_blocks
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError

logger = logging.getLogger(__name__)
_HUGE_BYTES = 4 * 2**20
"""Size from which memory is asked for in huge pages, as numpy does for its own arrays."""

_GIB = 2**30
_ALIGNMENT = 64
_WIDTH_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for the KV cache: the amount that the flags ask for, and the maximum available."""

    asked_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The number of KV blocks, and the longest context in tokens that they allow."""

    num_blocks: int
    max_model_len: int
    max_rows: int | None = None
    """Number of sequences whose recurrent states have room; None: `--max-num-seqs`."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The key and value tensors, one pair for each layer that attends; with latent attention no value tensors."""

    key_caches: tuple[Tensor, ...]
    value_caches: tuple[Tensor, ...]
    slabs: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    """The slabs of keys and those of values, [num_blocks, block_size, 1, width], if layers share them."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors in memory, layer by layer, or slab by slab, keys before values."""
        keys, values = (self.key_caches, self.value_caches) if self.slabs is None else self.slabs
        layers = (keys, values) if values else (keys,)
        return tuple(part for layer in zip(*layers, strict=True) for part in layer)

    @property
    def parts_per_layer(self) -> int:
        """Number of tensors of a layer: 2, or 1 without value tensors."""
        return 2 if self.value_caches else 1


def bytes_per_block(description: DecoderDescription, block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one block in all layers of a group (`kv_groups`)."""
    num_slabs = len(description.slabs)
    return num_slabs * description.cache_parts * block_size * description.slab_width * dtype.itemsize


def plan_kv_cache(
    settings: EngineSettings,
    description: DecoderDescription,
    dtype: torch.dtype,
    budget: Budget,
    longest: int,
    *,
    on_cpu: bool = True,
    snapshot_bytes: int = 0,
) -> KvPlan:
    """Returns the number of blocks for the budget, and the context, at most `longest` tokens, that fits into them.

    There are never more blocks than `max_num_seqs` sequences of full length can use, unless the number of blocks is
    given. `snapshot_bytes`: memory of snapshots of recurrent states for each block. A context length from the model's
    config is shortened with a warning if it does not fit. Raises `ServiceError` if a given context length does not fit,
    or if there is no memory for a given number of blocks.
    """
    asked, paging = settings.scheduler.max_model_len, paging_of(settings, description)
    wanted, step = min(context_length(settings, description), longest), sequence_tokens(settings, on_cpu=on_cpu)
    useful = useful_blocks(settings, paging, wanted, on_cpu=on_cpu)
    block_bytes = bytes_per_block(description, paging.block_size, dtype) + snapshot_bytes
    num_blocks = settings.cache.num_gpu_blocks_override or min(budget.asked_bytes // block_bytes, useful)
    if num_blocks > max(1, budget.most_bytes // block_bytes):
        raise ServiceError(
            "invalid_value",
            f"--num-gpu-blocks-override: {num_blocks} blocks need {num_blocks * block_bytes / _GIB:.2f} GiB, and there "
            f"are {budget.most_bytes / _GIB:.2f} GiB for them.",
            param="num_gpu_blocks_override",
        )
    fitting = paging.capacity(num_blocks, step)
    if fitting < wanted and (asked is not None or num_blocks < 1):
        need = paging.most_blocks(wanted, step) * block_bytes / _GIB
        raise ServiceError(
            "invalid_value",
            f"The KV cache has room for {fitting} tokens, less than the context of {wanted} tokens, which needs "
            f"{need:.2f} GiB. {measures(settings, on_cpu=on_cpu, context=wanted)}",
            param="max_model_len",
        )
    context, own = min(wanted, fitting), context_length(settings, description)
    if context < own:
        logger.warning("context shortened from %d to %d tokens: that is what there is memory for", own, context)
    return KvPlan(num_blocks, context)


def allocate_kv_cache(
    description: DecoderDescription, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KvCache:
    """Returns zeroed tensors.

    Attention also reads slots that were never written, with weight zero because of the mask; zeros keep the products
    zero.
    """
    make = zeros_on_demand if device.type == "cpu" else torch.zeros
    shape = (num_blocks, block_size, description.slab_width)
    count = description.cache_parts * len(description.slabs)
    return cache_of(description, [make(shape, dtype=dtype, device=device) for _ in range(count)])


def cache_of(description: DecoderDescription, parts: Sequence[Tensor]) -> KvCache:
    """Returns the cache whose tensors in memory, in the order of `KvCache.parts`, are [blocks, block_size, width]."""
    per_layer = description.cache_parts
    if description.layer_kv_heads:
        slabs = [tuple(part.unsqueeze(2) for part in parts[first::2]) for first in range(2)]
        return _shared_slabs(description, slabs)
    heads = (description.num_kv_heads, description.head_dim)
    keys, *values = (tuple(part.unflatten(2, heads) for part in parts[first::per_layer]) for first in range(per_layer))
    if not description.kv_groups:
        return KvCache(keys, values[0] if values else ())
    slab = {layer: place for group in description.kv_groups for place, (layer,) in enumerate(group)}
    of_layers = [tuple(one[slab[layer]] for layer in description.attention_layers) for one in (keys, values[0])]
    return KvCache(of_layers[0], of_layers[1], (keys, values[0]))


def _shared_slabs(description: DecoderDescription, slabs: Sequence[tuple[Tensor, ...]]) -> KvCache:
    """Returns the views of slabs, of keys and of values, that are the caches of layers with heads of their own."""
    views: tuple[dict[int, Tensor], ...] = ({}, {})
    numbered = (each for group in description.kv_groups or (description.slabs,) for each in enumerate(group))
    for number, layers in numbered:
        first = 0
        for layer in layers:
            own = description.of_layer(layer)
            for tensors, caches in zip(slabs, views, strict=True):
                rows = tensors[number][..., 0, first : first + own.kv_size]
                caches[layer] = rows.unflatten(-1, (own.num_kv_heads, own.head_dim))
            first += own.kv_size
    keys, values = (tuple(caches[layer] for layer in description.attention_layers) for caches in views)
    return KvCache(keys, values, (slabs[0], slabs[1]))


def padded_heads(description: DecoderDescription) -> DecoderDescription:
    """Returns the description with heads padded to the width of the heads in the C++ backend's cache."""

    def padded(width: int) -> int:
        return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE

    width, latent = padded(description.head_dim), description.latent
    if latent is not None:
        latent = replace(latent, rope_dim=width - latent.rank)
    heads = tuple((count, padded(own)) for count, own in description.layer_kv_heads)
    return replace(description, head_dim=width, latent=latent, layer_kv_heads=heads)


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros whose pages the system allocates when they are first written, so that start-up touches no page.

    They are a mapping of their own: the heap may serve an allocation from memory that was freed, which it would have to
    clear, and an engine that falls asleep gives a mapping back to the system as a whole.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, size + _ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(pages, dtype=np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[offset : offset + size]).to(device).view(dtype).view(shape)
