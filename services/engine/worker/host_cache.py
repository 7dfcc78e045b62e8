"""The part of the KV cache in the host's memory, for preempted sequences, and the copies of blocks that plans name.

How many blocks it has is decided here at start-up; which holds what is the core's business. Called by the workers.
"""

import torch
from torch import Tensor

from services.engine.core.plan import StepPlan
from services.engine.kernels.storage import as_moved
from services.engine.models.description import DecoderDescription
from services.engine.worker.kv_cache import KvCache, KvPlan, bytes_per_block
from services.engine.worker.memory import free_bytes
from shared.config import EngineSettings, SettingsError

DEFAULT_SWAP_GIB = 4.0
DEFAULT_FREE_SHARE = 0.5
"""Most of the free memory that the default takes; pages that are never written are not taken at all."""
_GIB = 2**30


def plan_host_blocks(
    settings: EngineSettings, description: DecoderDescription, kv: KvPlan, dtype: torch.dtype, promised_bytes: int = 0
) -> int:
    """Blocks that the swap space holds, at most what all rows can use. More than is free is a SettingsError.

    `promised_bytes` of the free memory are for the cache itself and for steps, where these are in main memory too.
    """
    free = max(0, free_bytes() - promised_bytes)
    block_bytes = bytes_per_block(description, settings.block_size, dtype)
    useful = settings.max_num_seqs * -(-kv.max_model_len // settings.block_size)
    if settings.swap_space is None:
        asked = min(DEFAULT_SWAP_GIB * _GIB, free * DEFAULT_FREE_SHARE)
        return min(useful, int(asked) // block_bytes)
    asked = settings.swap_space * _GIB
    if asked > free:
        raise SettingsError(
            f"--swap-space: {settings.swap_space:g} GiB is more than the {free / _GIB:.1f} GiB of memory "
            "that are free here. Lower it; 0 has preempted sequences computed again instead."
        )
    return min(useful, int(asked) // block_bytes)


def copy_blocks(plan: StepPlan, cache: KvCache, host: KvCache) -> None:
    """A plan's copies: out to the host, in from it, then from block to block."""
    for pairs, source, target in (
        (plan.swap_out, cache, host),
        (plan.swap_in, host, cache),
        (plan.copies, cache, cache),
    ):
        if pairs:
            _copy(pairs, (*source.key_caches, *source.value_caches), (*target.key_caches, *target.value_caches))


def _copy(pairs: tuple[tuple[int, int], ...], sources: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    """(from, to) for every layer's blocks."""
    numbers = torch.tensor(pairs, dtype=torch.int64)
    of_source, of_target = (numbers[:, column].to(each[0].device) for column, each in enumerate((sources, targets)))
    for source, target in zip(sources, targets, strict=True):
        moved = as_moved(source).index_select(0, of_source).to(target.device)
        as_moved(target).index_copy_(0, of_target, moved)
