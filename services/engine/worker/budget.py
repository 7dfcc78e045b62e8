"""What memory goes to what: the KV cache gets what weights, rows and the largest step leave of what may be used.

    CPU    used: a share of the configured cache, at most a share of what is free once steps and rows have theirs
    CUDA   used: a share of the device; the weights and whatever else is there already are taken off, and a step

Running out afterwards is impossible: nothing else grows. The numbers are measured (`profile`, `memory`).
Called by the torch worker at start-up.
"""

from dataclasses import dataclass

import torch

from services.engine.models.description import DecoderDescription
from services.engine.worker.host_cache import plan_host_blocks
from services.engine.worker.kv_cache import Budget, KvPlan, bytes_per_block, context_length, plan_kv_cache
from services.engine.worker.memory import free_bytes, held_bytes
from services.engine.worker.state_table import table_bytes
from shared.config import EngineSettings

FREE_SHARE_MAX = 0.7
"""Most of the free memory of a CPU that the cache may take; the rest is for swap space and the other processes."""
HEAP_BYTES_MAX = 256 * 2**20
"""Free pages of earlier steps that the heap may keep, at most a step's worth."""
_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes, in bytes. On a CPU all of it is main memory, else that is rows and swap space."""

    kv: KvPlan
    num_host_blocks: int
    held_bytes: int
    """This process's main memory when the plan was made: weights, libraries."""
    cache_bytes: int
    host_bytes: int
    rows_bytes: int
    step_bytes: int
    """The largest step's peak."""

    @property
    def total_bytes(self) -> int:
        """On a CPU: what the process never exceeds."""
        filled = self.held_bytes + self.cache_bytes + self.host_bytes + self.rows_bytes
        return filled + self.heap_bytes + self.step_bytes

    @property
    def heap_bytes(self) -> int:
        """Free pages that the heap may keep between steps."""
        return _heap_bytes(self.step_bytes)

    def __str__(self) -> str:
        parts = {
            "KV cache": self.cache_bytes,
            "a step": self.step_bytes,
            "rows": self.rows_bytes,
            "swap space": self.host_bytes,
            "held already": self.held_bytes,
        }
        return "memory, MiB: " + ", ".join(f"{name} {size / _MIB:.0f}" for name, size in parts.items())


def plan_memory(
    settings: EngineSettings, description: DecoderDescription, dtype: torch.dtype, device: torch.device, step_bytes: int
) -> MemoryPlan:
    """Sizes cache and swap space, with nothing but the weights on the device. `dtype`: the cache's.

    Raises `ServiceError` and `SettingsError` for flags that ask for more than there is.
    """
    on_cpu, block_size = device.type == "cpu", settings.block_size
    context = context_length(settings, description)
    rows = table_bytes(settings.max_num_seqs, context, block_size, description.vocab_size)
    needed = rows + step_bytes + _heap_bytes(step_bytes)
    budget = cpu_budget(settings, needed) if on_cpu else cuda_budget(settings, device, step_bytes)
    kv = plan_kv_cache(settings, description, dtype, budget)
    block_bytes = bytes_per_block(description, block_size, dtype)
    cache = kv.num_blocks * block_bytes
    num_host_blocks = plan_host_blocks(settings, description, kv, dtype, needed + cache if on_cpu else rows)
    return MemoryPlan(kv, num_host_blocks, held_bytes(), cache, num_host_blocks * block_bytes, rows, step_bytes)


def cpu_budget(settings: EngineSettings, needed_bytes: int) -> Budget:
    """For the cache in main memory, of which rows and steps need some too."""
    most = int(max(0, free_bytes() - needed_bytes) * FREE_SHARE_MAX)
    return Budget(min(int(settings.kv_cache_memory_gb * settings.gpu_memory_utilization * _GIB), most), most)


def cuda_budget(settings: EngineSettings, device: torch.device, step_bytes: int) -> Budget:
    """For the cache on a device whose weights are loaded and that has computed steps, so that its libraries are too.

    The allocator is held to the share as well: rather than grow beyond it, it gives back what it keeps between steps.
    """
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(settings.gpu_memory_utilization, device)
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * settings.gpu_memory_utilization) - (total - free) - step_bytes
    return Budget(max(0, share), max(0, free - step_bytes))


def _heap_bytes(step_bytes: int) -> int:
    return min(HEAP_BYTES_MAX, step_bytes)
