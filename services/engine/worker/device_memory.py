"""How much of a GPU's memory the KV cache may have: what a step of the largest size leaves, by trying one.

Called by the GPU worker at start-up.
"""

import logging
from collections.abc import Callable

import torch

from shared.config import EngineSettings

logger = logging.getLogger(__name__)

_GRAPHS_BYTES = 512 * 2**20
"""Kept for captured graphs, which share their memory: activations of the largest one, and the driver's own."""


def device_budget(settings: EngineSettings, device: torch.device, try_largest_step: Callable[[], None]) -> int:
    """Bytes for the cache on a device whose weights are loaded: the share to use, less all that else is used."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try_largest_step()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    kept = 0 if settings.enforce_eager else _GRAPHS_BYTES
    budget = int(total * settings.gpu_memory_utilization) - used - activations - kept
    gib = 2**30
    logger.info(
        "device memory: %.1f GiB, %.1f used, %.1f for activations, %.1f left for the KV cache",
        total / gib, used / gib, activations / gib, max(0, budget) / gib,
    )  # fmt: skip
    return max(0, budget)
