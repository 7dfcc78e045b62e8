"""What memory goes to what: the KV cache gets what weights, rows and the largest step leave of what may be used.

    CPU    used: a share of the configured cache, at most a share of what is free once steps and rows have theirs
    CUDA   used: a share of the device; the weights and whatever else is there already are taken off, a step, graphs

Running out afterwards is impossible: nothing else grows. The numbers are measured (`profile`, `memory`).
Called by the workers at start-up.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from services.engine.core.plan import StepPlan
from services.engine.models.description import DecoderDescription
from services.engine.worker.host_cache import plan_host_blocks
from services.engine.worker.kv_cache import Budget, KvPlan, bytes_per_block, context_length, plan_kv_cache
from services.engine.worker.memory import free_bytes, held_bytes
from services.engine.worker.profile import StepBounds, StepBytes, largest_step, make_probe, measure_step
from services.engine.worker.state_table import table_bytes
from shared.config import EngineSettings

logger = logging.getLogger(__name__)

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
    """The largest step's peak, and captured graphs."""

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


@dataclass(frozen=True, slots=True)
class Backend:
    """What planning needs of a worker."""

    description: DecoderDescription
    """The model as the cache holds it."""
    device: torch.device
    cache_dtype: torch.dtype
    make_state: Callable[[KvPlan, int], None]
    """Makes cache, rows and so many blocks of swap space in place of those that are there."""
    run: Callable[[StepPlan], object]
    context_token_bytes: Callable[[int], int]
    """What attention takes for a token that a step of so many tokens looks back on, beside the cache."""
    kept_bytes: int = 0
    """What is made once the cache is there and stays: captured graphs."""
    mapped_bytes: int = 0
    """Of files that every step reads: the system counts them as free, and they must stay where they are."""
    reserve: Callable[[StepBounds], int | None] = lambda bounds: None
    """Makes room for the largest step's forward pass and says how much that is; None where it has to be measured."""
    measures: bool = True
    """No for kernels under an interpreter: their steps take half a minute and tell nothing of a device."""


def plan_measured(settings: EngineSettings, backend: Backend) -> MemoryPlan:
    """Measures steps, plans, and has the state made to serve with."""
    step = _measure(settings, backend) if backend.measures else StepBytes(0, 0, 0)
    step = replace(step, fixed=step.fixed + backend.kept_bytes)
    mapped = backend.mapped_bytes
    plan = plan_memory(settings, backend.description, backend.cache_dtype, backend.device, step, mapped)
    backend.make_state(plan.kv, plan.num_host_blocks)
    logger.info("%s", plan)
    return plan


def _measure(settings: EngineSettings, backend: Backend) -> StepBytes:
    bounds = largest_step(settings, backend.description, backend.device.type == "cpu")
    probe = make_probe(bounds, backend.description, settings.block_size, backend.device)
    backend.make_state(probe.kv, 0)
    per_token, passing = backend.context_token_bytes(bounds.num_tokens), backend.reserve(bounds)
    step = measure_step(probe, backend.run, per_token, backend.device, passing)
    # The probe's cache is let go of before it is measured what there is.
    backend.make_state(KvPlan(1, 1), 0)
    return step


def plan_memory(
    settings: EngineSettings,
    description: DecoderDescription,
    dtype: torch.dtype,
    device: torch.device,
    step: StepBytes,
    mapped_bytes: int = 0,
) -> MemoryPlan:
    """Sizes cache and swap space, with nothing but the weights on the device. `dtype`: the cache's.

    Raises `ServiceError` and `SettingsError` for flags that ask for more than there is.
    """
    on_cpu = device.type == "cpu"
    block_bytes = bytes_per_block(description, settings.block_size, dtype)
    context = context_length(settings, description)
    if on_cpu and settings.max_model_len is None:
        context = min(context, _longest_context(settings, description, block_bytes, step, mapped_bytes))
    rows, step_bytes = _rows_bytes(settings, description, context), step.at(context)
    needed = rows + step_bytes + _heap_bytes(step_bytes) + mapped_bytes
    budget = cpu_budget(settings, needed) if on_cpu else cuda_budget(settings, device, step_bytes)
    kv = plan_kv_cache(settings, description, dtype, budget, context)
    cache = kv.num_blocks * block_bytes
    num_host_blocks = plan_host_blocks(settings, description, kv, dtype, needed + cache if on_cpu else rows)
    return MemoryPlan(kv, num_host_blocks, held_bytes(), cache, num_host_blocks * block_bytes, rows, step_bytes)


def _longest_context(
    settings: EngineSettings, description: DecoderDescription, block_bytes: int, step: StepBytes, mapped_bytes: int
) -> int:
    """Of a model whose own context is longer than there is memory for: the rows and a step need some for each token."""
    rows = _rows_bytes(settings, description, 0)
    free = max(0, free_bytes() - mapped_bytes - rows - step.fixed - _heap_bytes(step.fixed))
    rows_per_token = _rows_bytes(settings, description, settings.block_size) - rows
    per_block = block_bytes + rows_per_token + 2 * settings.block_size * step.per_token
    return int(free * FREE_SHARE_MAX) // per_block * settings.block_size


def _rows_bytes(settings: EngineSettings, description: DecoderDescription, context: int) -> int:
    return table_bytes(settings.max_num_seqs, context, settings.block_size, description.vocab_size)


def cpu_budget(settings: EngineSettings, needed_bytes: int) -> Budget:
    """For the cache in main memory, of which rows and steps need some too."""
    most = int(max(0, free_bytes() - needed_bytes) * FREE_SHARE_MAX)
    return Budget(min(int(settings.kv_cache_memory_gb * settings.gpu_memory_utilization * _GIB), most), most)


def cuda_budget(settings: EngineSettings, device: torch.device, step_bytes: int) -> Budget:
    """For the cache on a device whose weights are loaded and that has computed steps, so that its libraries are too."""
    torch.cuda.empty_cache()
    return device_budget(settings, *torch.cuda.mem_get_info(device), step_bytes)


def device_budget(settings: EngineSettings, free_bytes: int, total_bytes: int, step_bytes: int) -> Budget:
    """Of the share to use what others, weights, rows and libraries have not taken yet, less a step."""
    share = int(total_bytes * settings.gpu_memory_utilization) - (total_bytes - free_bytes) - step_bytes
    return Budget(max(0, share), max(0, free_bytes - step_bytes))


def _heap_bytes(step_bytes: int) -> int:
    return min(HEAP_BYTES_MAX, step_bytes)
