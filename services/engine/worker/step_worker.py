"""What the workers share that keep their state in main memory: cache, swap space and rows, made to a measured size.

Knows no model: a subclass loads one, then prepares the state, and computes flat steps. The GPU's worker keeps its state
on the device and is none of these.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch

from services.engine.core.plan import EngineFacts, StepPlan, StepResult, default_batched_tokens
from services.engine.models.description import DecoderDescription
from services.engine.worker.budget import Backend, MemoryPlan, plan_measured
from services.engine.worker.host_cache import copy_blocks
from services.engine.worker.inputs import FlatStep, flatten
from services.engine.worker.kv_cache import KvPlan, allocate_kv_cache
from services.engine.worker.memory import HeapGuard
from services.engine.worker.profile import StepBounds
from services.engine.worker.state_table import StateTable
from shared.config import EngineSettings

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What cache and rows are made for, whatever their size."""

    settings: EngineSettings
    description: DecoderDescription
    """The model as the cache holds it."""
    dtype: torch.dtype
    """The cache's."""
    device: torch.device
    eos: frozenset[int]
    configuration: str
    """See `EngineFacts.configuration`."""


class StepWorker(ABC):
    """A `ModelWorker` but for its model, `run` and `close`."""

    _heap_guard: HeapGuard | None = None

    def facts(self) -> EngineFacts:
        """See `ModelWorker`."""
        return self._facts

    @property
    def memory(self) -> MemoryPlan:
        """What was planned at start-up."""
        return self._memory

    @abstractmethod
    def _run(self, plan: StepPlan) -> StepResult:
        """Carries out one plan while no other is under way."""

    def _context_token_bytes(self, num_tokens: int) -> int:
        """See `Backend`; nothing where attention reads keys and values where they are."""
        return 0

    def _reserve(self, bounds: StepBounds) -> int | None:
        """See `Backend`."""
        return None

    def _mapped_bytes(self) -> int:
        """See `Backend`."""
        return 0

    def _prompt_tokens(self) -> int | None:
        """See `EngineFacts.step_prompt_tokens`."""
        return None

    def _begin(self, plan: StepPlan) -> FlatStep | None:
        """What a plan does before anything is computed, and what is to be computed, if there is something."""
        copy_blocks(plan, self._cache, self._host_cache)
        self._table.apply(plan)
        return None if plan.empty else flatten(plan, self._table, self._facts.block_size)

    def _after_step(self) -> None:
        """Whoever subclasses calls this when a step has ended."""
        if self._heap_guard is not None:
            self._heap_guard.after_step()

    def _prepare_state(self, spec: StateSpec) -> None:
        """With the model loaded: measures steps in a small state of their own, then sizes and makes the one to use."""
        make_state = partial(self._make_state, spec)
        backend = Backend(
            spec.description,
            spec.device,
            spec.dtype,
            make_state,
            self._run,
            self._context_token_bytes,
            mapped_bytes=self._mapped_bytes(),
            reserve=self._reserve,
        )
        self._memory = plan_measured(spec.settings, backend)
        if spec.device.type == "cpu":
            self._heap_guard = HeapGuard(self._memory.heap_bytes)

    def _make_state(self, spec: StateSpec, kv: KvPlan, num_host_blocks: int) -> None:
        """The cache and the rows, and with them the facts."""
        settings, description, dtype = spec.settings, spec.description, spec.dtype
        block_size, vocab_size = settings.block_size, description.vocab_size
        self._cache = allocate_kv_cache(description, kv.num_blocks, block_size, dtype, spec.device)
        self._host_cache = allocate_kv_cache(description, num_host_blocks, block_size, dtype, _CPU)
        self._facts = EngineFacts(
            kv.num_blocks,
            block_size,
            kv.max_model_len,
            vocab_size,
            spec.eos,
            num_host_blocks,
            default_batched_tokens(spec.device.type == "cpu", settings.max_num_seqs),
            self._prompt_tokens(),
            configuration=spec.configuration,
            computes_on_host=spec.device.type == "cpu",
        )
        self._table = StateTable(settings.max_num_seqs, kv.max_model_len, block_size, vocab_size, spec.eos)

    def _drop_state(self) -> None:
        """Cache, swap space and rows go."""
        del self._cache, self._host_cache, self._table
