"""The swap space: KV blocks in main memory for preempted sequences. Also executes the block copies of plans.

The number of host blocks is decided here at start-up. The core decides what each block holds. Called by the workers.
"""

import torch
from torch import Tensor

from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.kernels.storage import as_moved
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.kv_cache import KvCache, KvPlan, bytes_per_block
from antiphon.services.engine.worker.capacity.memory import free_bytes
from antiphon.services.engine.worker.capacity.paging import paging_of
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError

DEFAULT_SWAP_GIB = 4.0
DEFAULT_FREE_SHARE = 0.5
"""The default size of the swap space is at most this share of the free memory. Only pages that are written take memory.
"""
_GIB = 2**30


def plan_host_blocks(
    settings: EngineSettings,
    description: DecoderDescription,
    kv: KvPlan,
    dtype: torch.dtype,
    promised_bytes: int = 0,
    num_ranks: int = 1,
) -> int:
    """Returns the number of host blocks, at most as many as `max_num_seqs` sequences of full length can use.

    `promised_bytes` of the free memory are reserved for other uses: the rows and, on a CPU, the KV cache and the steps.
    The `num_ranks` processes that compute the model on this machine share the rest.
    Raises `SettingsError` if `--swap-space` asks for more than the rest of the free memory.
    """
    free = max(0, free_bytes() - promised_bytes)
    block_bytes = bytes_per_block(description, settings.cache.block_size, dtype)
    useful = settings.scheduler.max_num_seqs * paging_of(settings, description).most_blocks(kv.max_model_len, 1)
    if settings.cache.swap_space is None:
        asked = min(DEFAULT_SWAP_GIB * _GIB, free * DEFAULT_FREE_SHARE) / num_ranks
        return min(useful, int(asked) // block_bytes)
    asked = settings.cache.swap_space * _GIB
    if asked > free:
        raise SettingsError(
            f"--swap-space: {settings.cache.swap_space:g} GiB is more than the {free / _GIB:.1f} GiB of memory "
            "that are free here. Lower it; 0 has preempted sequences computed again instead."
        )
    return min(useful, int(asked / num_ranks) // block_bytes)


def copy_blocks(plan: StepPlan, cache: KvCache, host: KvCache) -> None:
    """Executes the block copies of a plan: device to host, host to device, then device to device."""
    for pairs, source, target in (
        (plan.swap_out, cache, host),
        (plan.swap_in, host, cache),
        (plan.copies, cache, cache),
    ):
        if pairs:
            _copy(pairs, source.parts, target.parts)


def _copy(pairs: tuple[tuple[int, int], ...], sources: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    """Copies the (source, target) block pairs in every layer's key and value cache."""
    numbers = torch.tensor(pairs, dtype=torch.int64)
    of_source, of_target = (numbers[:, column].to(each[0].device) for column, each in enumerate((sources, targets)))
    for source, target in zip(sources, targets, strict=True):
        moved = as_moved(source).index_select(0, of_source).to(target.device)
        as_moved(target).index_copy_(0, of_target, moved)
