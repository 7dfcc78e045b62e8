"""Divides the memory: the KV cache gets the usable memory minus weights, rows and the largest step.

    CPU    the KV cache gets a share of the configured size, but at most a share of the free memory that remains after
           the steps and the rows
    CUDA   the KV cache gets a share of the device memory, less what is already used (weights and others), the largest
           step and the graphs

Memory cannot run out later, because nothing else grows. The sizes are measured (`profile`, `memory`). Called by the
workers at start-up.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from antiphon.services.engine.adapters.delta import adapter_bytes
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.worker.batch.state_table import table_bytes
from antiphon.services.engine.worker.capacity.context import context_length
from antiphon.services.engine.worker.capacity.host_cache import plan_host_blocks
from antiphon.services.engine.worker.capacity.kv_cache import (
    Budget,
    KvPlan,
    bytes_per_block,
    plan_kv_cache,
)
from antiphon.services.engine.worker.capacity.memory import free_bytes, held_bytes
from antiphon.services.engine.worker.capacity.paging import paging_of, sequence_tokens
from antiphon.services.engine.worker.capacity.profile import (
    StepBounds,
    StepBytes,
    largest_step,
    make_probe,
    measure_step,
)
from antiphon.services.engine.worker.capacity.states import (
    SLOTS_OF_ROW,
    rows_with_states,
    running_state_bytes,
    snapshot_bytes_per_block,
)
from antiphon.shared.config import EngineSettings

logger = logging.getLogger(__name__)

FREE_SHARE_MAX = 0.7
"""Maximum share of free main memory for the KV cache; the rest is for swap space and the other processes."""
HEAP_BYTES_MAX = 256 * 2**20
"""The heap may keep at most this many bytes of freed step memory, and never more than one step needs."""
_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory plan, sizes in bytes. On a CPU all of it is main memory, on a GPU only the rows and the swap space."""

    kv: KvPlan
    num_host_blocks: int
    held_bytes: int
    """Main memory of this process when the plan was made: weights, libraries."""
    cache_bytes: int
    host_bytes: int
    rows_bytes: int
    step_bytes: int
    """Peak of the largest step, and captured graphs."""
    states_bytes: int = 0
    """Recurrent states of running sequences, and their snapshots."""
    weights_bytes: int = 0
    """The weights, on the device or in main memory; part of `held_bytes` on a CPU, unless a mapped file has them."""

    @property
    def total_bytes(self) -> int:
        """Upper bound of the process's memory on a CPU."""
        filled = self.held_bytes + self.cache_bytes + self.states_bytes + self.host_bytes + self.rows_bytes
        return filled + self.heap_bytes + self.step_bytes

    @property
    def heap_bytes(self) -> int:
        """Free memory that the heap may keep between steps."""
        return heap_bytes(self.step_bytes)

    def __str__(self) -> str:
        parts = {
            "KV cache": self.cache_bytes,
            **({"recurrent states": self.states_bytes} if self.states_bytes else {}),
            "a step": self.step_bytes,
            "rows": self.rows_bytes,
            "swap space": self.host_bytes,
            "weights": self.weights_bytes,
            "held already": self.held_bytes,
        }
        return "memory, MiB: " + ", ".join(f"{name} {size / _MIB:.0f}" for name, size in parts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The worker's properties and operations that planning needs."""

    description: DecoderDescription
    """The model, with the head size that the KV cache uses."""
    device: torch.device
    cache_dtype: torch.dtype
    make_state: Callable[[KvPlan, int], None]
    """Function that replaces KV cache, rows and swap space. Arguments: the KV plan and the number of host blocks."""
    run: Callable[[StepPlan], object]
    context_token_bytes: Callable[[int], int]
    """Bytes besides the cache that attention needs for each token of context, given the step's number of tokens."""
    kept_bytes: int = 0
    """Permanent memory allocated after the KV cache: captured graphs."""
    mapped_bytes: int = 0
    """Size of mapped files that every step reads. The operating system counts their pages as free, but they must stay
    in the page cache.
    """
    reserve: Callable[[StepBounds], int | None] = lambda bounds: None
    """Allocates the buffers of the largest forward pass and returns their bytes; None if they must be measured."""
    measures: bool = True
    """Whether to measure steps. False under Triton's interpreter, where a step takes half a minute."""
    weights_bytes: int = 0
    ranks: Communicator = ALONE_RANK
    """All ranks get as many blocks as the one with the least memory. On a CPU they share the machine's memory."""


def plan_measured(settings: EngineSettings, backend: Backend) -> MemoryPlan:
    """Measures steps, plans the memory and creates the worker's final state. Returns the plan."""
    step = _measure(settings, backend) if backend.measures else StepBytes(0, 0, 0)
    step = replace(step, fixed=step.fixed + backend.kept_bytes)
    mapped = backend.mapped_bytes
    plan = plan_memory(settings, backend.description, backend.cache_dtype, backend.device, step, mapped, backend.ranks)
    plan = replace(plan, weights_bytes=backend.weights_bytes)
    backend.make_state(plan.kv, plan.num_host_blocks)
    logger.info("%s", plan)
    return plan


def _measure(settings: EngineSettings, backend: Backend) -> StepBytes:
    bounds = largest_step(settings, backend.description, backend.device.type == "cpu")
    probe = make_probe(bounds, backend.description, settings.cache.block_size, backend.device)
    backend.make_state(probe.kv, 0)
    per_token, passing = backend.context_token_bytes(bounds.num_tokens), backend.reserve(bounds)
    step = measure_step(probe, backend.run, per_token, backend.device, passing)
    # The KV cache of the trial step is freed, because the caller measures the free memory next.
    backend.make_state(KvPlan(1, 1), 0)
    return step


def plan_memory(
    settings: EngineSettings,
    description: DecoderDescription,
    dtype: torch.dtype,
    device: torch.device,
    step: StepBytes,
    mapped_bytes: int = 0,
    ranks: Communicator = ALONE_RANK,
) -> MemoryPlan:
    """Returns the sizes of KV cache and swap space, while only the weights are on the device.

    `dtype` is the type of the KV cache. Raises `ServiceError` or `SettingsError` if flags ask for more memory than is
    available.
    """
    on_cpu = device.type == "cpu"
    block_size, num_rows = settings.cache.block_size, settings.scheduler.max_num_seqs
    kv_bytes, snapshots = (size(description, block_size, dtype) for size in (bytes_per_block, snapshot_bytes_per_block))
    block_bytes = kv_bytes + snapshots
    context = context_length(settings, description)
    if on_cpu and settings.scheduler.max_model_len is None:
        states = min(running_state_bytes(description, num_rows), _asked_bytes(settings, ranks.local_size) // 2)
        longest = _longest_context(settings, description, block_bytes, step, mapped_bytes + states, ranks.local_size)
        context = ranks.smallest(min(context, longest))
    rows, step_bytes = rows_bytes(settings, description, context), step.at(context)
    needed = rows + step_bytes + heap_bytes(step_bytes) + mapped_bytes
    budget = cpu_budget(settings, needed, ranks.local_size) if on_cpu else cuda_budget(settings, device, step_bytes)
    if on_cpu and budget.most_bytes < (asked := _asked_bytes(settings, ranks.local_size)):
        text = "of the %.1f GiB that --kv-cache-memory-gb gives the KV cache, at most %.1f are free"
        logger.warning(text, asked / _GIB, budget.most_bytes / _GIB)
    max_rows = rows_with_states(description, num_rows, ranks.smallest(budget.asked_bytes))
    states = running_state_bytes(description, max_rows or num_rows)
    budget = Budget(budget.asked_bytes - states, budget.most_bytes - states)
    kv = plan_kv_cache(settings, description, dtype, budget, context, on_cpu=on_cpu, snapshot_bytes=snapshots)
    kv = KvPlan(ranks.smallest(kv.num_blocks), ranks.smallest(kv.max_model_len), max_rows)
    if max_rows is not None:
        logger.warning(
            "at most %d sequences run at once, because the recurrent states of one take %.0f MiB",
            max_rows, SLOTS_OF_ROW * description.state_bytes / _MIB,
        )  # fmt: skip
    cache = kv.num_blocks * kv_bytes
    states += kv.num_blocks * snapshots
    promised = needed + cache + states if on_cpu else rows
    num_host_blocks = plan_host_blocks(settings, description, kv, dtype, promised, ranks.local_size)
    num_host_blocks = ranks.smallest(num_host_blocks)
    return MemoryPlan(
        kv=kv,
        num_host_blocks=num_host_blocks,
        held_bytes=held_bytes(),
        cache_bytes=cache,
        host_bytes=num_host_blocks * kv_bytes,
        states_bytes=states,
        rows_bytes=rows,
        step_bytes=step_bytes,
    )


def _longest_context(
    settings: EngineSettings,
    description: DecoderDescription,
    block_bytes: int,
    step: StepBytes,
    mapped_bytes: int,
    num_ranks: int,
) -> int:
    """Returns the longest context, in tokens, that the free memory of a CPU allows, of which `num_ranks` have a share.

    Each token of context takes memory in the KV cache, in the rows and in a step.
    """
    rows = rows_bytes(settings, description, 0)
    free = max(0, free_bytes() - mapped_bytes - rows - step.fixed - heap_bytes(step.fixed))
    rows_per_token = rows_bytes(settings, description, settings.cache.block_size) - rows
    per_block = block_bytes + rows_per_token + 2 * settings.cache.block_size * step.per_token
    num_blocks = int(free * FREE_SHARE_MAX) // per_block // num_ranks
    return paging_of(settings, description).capacity(num_blocks, sequence_tokens(settings, on_cpu=True))


def rows_bytes(settings: EngineSettings, description: DecoderDescription, context: int) -> int:
    """Returns the main memory of all rows, in bytes, with contexts of up to `context` tokens."""
    paging = paging_of(settings, description)
    return table_bytes(settings.scheduler.max_num_seqs, context, paging, description.vocab_size)


def kept_adapter_bytes(settings: EngineSettings, description: DecoderDescription, dtype: torch.dtype) -> int:
    """Returns the memory of cached adapters: `--max-cpu-loras` of the maximum rank, and the prompt adapters."""
    size, adapters = prompt_adapter_bytes(settings, description, dtype), settings.adapters
    if adapters.enable_lora:
        size += (adapters.max_cpu_loras or 0) * adapter_bytes(description, adapters.max_lora_rank, dtype.itemsize)
    return size


def prompt_adapter_bytes(settings: EngineSettings, description: DecoderDescription, dtype: torch.dtype) -> int:
    """Returns the memory of the vectors of all prompt adapters that an engine may keep."""
    adapters = settings.adapters
    if not adapters.enable_prompt_adapter:
        return 0
    rows = (adapters.max_prompt_adapters or 0) * adapters.max_prompt_adapter_token
    return rows * description.hidden_size * dtype.itemsize


def cpu_budget(settings: EngineSettings, needed_bytes: int, num_ranks: int = 1) -> Budget:
    """Returns the budget of one rank's KV cache in main memory, from which rows and steps need `needed_bytes`."""
    most = int(max(0, free_bytes() - needed_bytes * num_ranks) * FREE_SHARE_MAX) // num_ranks
    return Budget(min(_asked_bytes(settings, num_ranks), most), most)


def _asked_bytes(settings: EngineSettings, num_ranks: int) -> int:
    return int(settings.cache.kv_cache_memory_gb * settings.cache.gpu_memory_utilization * _GIB) // num_ranks


def cuda_budget(settings: EngineSettings, device: torch.device, step_bytes: int) -> Budget:
    """Returns the budget of a KV cache on a device.

    The weights must be loaded, and steps must have been computed, so that the libraries are loaded too.
    """
    torch.cuda.empty_cache()
    return device_budget(settings, *torch.cuda.mem_get_info(device), step_bytes)


def device_budget(settings: EngineSettings, free_bytes: int, total_bytes: int, step_bytes: int) -> Budget:
    """Returns the usable share of the device memory, less the memory already in use and the memory of a step."""
    share = int(total_bytes * settings.cache.gpu_memory_utilization) - (total_bytes - free_bytes) - step_bytes
    return Budget(max(0, share), max(0, free_bytes - step_bytes))


def heap_bytes(step_bytes: int) -> int:
    """Returns the free memory, in bytes, that the heap may keep between steps."""
    return min(HEAP_BYTES_MAX, step_bytes)
