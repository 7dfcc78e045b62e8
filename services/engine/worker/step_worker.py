"""The common base of the torch worker and the C++ worker: KV cache, swap space and state table of a measured size.

It is independent of the model: a subclass loads the model, prepares the state, and computes flat steps. The Triton
worker does not use this class, because it keeps more of its state on the device.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from msgspec.structs import replace
from torch import Tensor

from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult, default_batched_tokens
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.kv.pieces import NativeCopy
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.kv_groups import freed_window, num_groups
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.sampling.grammar import grammar_compiler
from antiphon.services.engine.worker.batch.given import GivenRows
from antiphon.services.engine.worker.batch.inputs import FlatStep, flatten
from antiphon.services.engine.worker.batch.mask_turns import MaskTurns
from antiphon.services.engine.worker.batch.pooling import PoolingRows
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.services.engine.worker.capacity.budget import Backend, MemoryPlan, plan_measured
from antiphon.services.engine.worker.capacity.host_cache import copy_blocks
from antiphon.services.engine.worker.capacity.kv_cache import KvPlan, allocate_kv_cache
from antiphon.services.engine.worker.capacity.kv_memory import CacheMemory, blocks_of
from antiphon.services.engine.worker.capacity.memory import HeapGuard
from antiphon.services.engine.worker.capacity.profile import StepBounds
from antiphon.services.engine.worker.capacity.state_memory import PIECES_MAX, StateMemory, num_pieces
from antiphon.services.engine.worker.capacity.states import allocate_states, num_state_slots, state_interval
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.pooling import PoolingKind

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Everything that the KV cache and the state table depend on, except their sizes."""

    settings: EngineSettings
    description: DecoderDescription
    """The model, with the head size that the KV cache uses."""
    dtype: torch.dtype
    """Type of the KV cache."""
    device: torch.device
    eos: frozenset[int]
    configuration: str
    """See `EngineFacts.configuration`."""
    content: str
    """See `EngineFacts.content`."""
    numerics: str
    """See `EngineFacts.numerics`."""
    embedding_size: int
    """See `EngineFacts.embedding_size`."""
    pooling_kind: PoolingKind
    """See `EngineFacts.pooling_kind`."""
    ranks: Communicator = ALONE_RANK
    weights_bytes: int = 0
    adapter_bytes: int = 0
    """Memory of the LoRA adapters that the worker may keep."""
    model_dtype: torch.dtype | None = None
    """Type of the model's embeddings; None: `dtype`."""
    takes_images: bool = False
    """See `EngineFacts.takes_images`."""
    variant_because: str = ""
    """See `EngineFacts.variant_because`."""


class StepWorker(ABC):
    """A `ModelWorker` without the model; a subclass adds the model, `run`, `_run` and `close`."""

    _heap_guard: HeapGuard | None = None
    adapters: AdapterLibrary | None = None
    """See `AdapterWorker`."""

    def facts(self) -> EngineFacts:
        """See `ModelWorker`."""
        return self._facts

    def compile_grammar(self, grammar: Grammar) -> None:
        """See `GrammarWorker`."""
        self._grammars.compile(grammar)

    def kv_memory(self, native: NativeCopy | None = None) -> KvMemory:
        """See `KvWorker`."""
        memory, facts = self._block_memory(native), self._facts
        if not facts.state_pieces:
            return memory
        return StateMemory(memory, self._states, facts.num_blocks, facts.num_host_blocks)

    def _block_memory(self, native: NativeCopy | None) -> KvMemory:
        """Returns access to the blocks without the recurrent states."""
        return CacheMemory(self._cache, blocks_of(self._host_cache, native), native)

    def _state_pieces(self, spec: StateSpec, num_host_blocks: int) -> int:
        """See `EngineFacts.state_pieces`. On a device, among ranks, or of too many pieces, states do not travel."""
        if not num_host_blocks or not self._states or spec.device.type != "cpu" or spec.ranks.shard.size > 1:
            return 0
        pieces = num_pieces(spec.description.state_bytes, self._block_memory(None).layout)
        return pieces if pieces <= PIECES_MAX else 0

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan made at start-up."""
        return self._memory

    def release_cache(self) -> bool:
        """See `RestingWorker`. On a device the weights would stay too; ranks have their caches for each other."""
        if self._spec.device.type != "cpu" or self._spec.ranks.shard.size > 1:
            return False
        self._make_state(self._spec, KvPlan(1, 1, 1), 0)
        return True

    def restore_cache(self) -> None:
        """See `RestingWorker`."""
        self._make_state(self._spec, self._memory.kv, self._memory.num_host_blocks)

    @abstractmethod
    def _run(self, plan: StepPlan) -> StepResult:
        """Runs one plan while no other plan is in flight."""

    def _context_token_bytes(self, num_tokens: int) -> int:
        """See `Backend.context_token_bytes`; 0 if attention reads keys and values in place, without copying them."""
        return 0

    def _reserve(self, bounds: StepBounds) -> int | None:
        """See `Backend.reserve`."""
        return None

    def _mapped_bytes(self) -> int:
        """See `Backend.mapped_bytes`."""
        return 0

    def _prompt_tokens(self) -> int | None:
        """See `EngineFacts.step_prompt_tokens`."""
        return None

    def _fill_slot(self, slot: int, adapter: LoadedAdapter) -> None:
        """Puts an adapter into a slot that no step in flight uses. Subclasses with adapters implement it."""
        raise AssertionError("this worker has no adapters")

    def _vectors(self, version: str) -> Tensor:
        """Returns the vectors of a prompt adapter, [virtual tokens, hidden]."""
        return cast(Tensor, self._adapter(version).prepared)

    def _adapter(self, version: str) -> LoadedAdapter:
        adapter = None if self.adapters is None else self.adapters.find(version)
        # The new sequence of the plan still references the adapter.
        assert adapter is not None, f"the adapter {version} is not loaded"
        return adapter

    def _fill_slots(self, plan: StepPlan) -> None:
        for slot, version in plan.adapters:
            self._fill_slot(slot, self._adapter(version))

    def _begin(self, plan: StepPlan) -> FlatStep | None:
        """Fills adapter slots, copies blocks and updates the state table.

        Returns the step to compute; None if the plan computes nothing.
        """
        self._fill_slots(plan)
        if plan.copies_blocks:
            copy_blocks(plan, self._cache, self._host_cache)
        self._table.apply(plan)
        self._given.join(plan, self._vectors)
        if self._pooling.params or any(new.pooling is not None for new in plan.new):
            self._pooling.join(plan)
        if plan.empty:
            return None
        step = flatten(plan, self._table, self._facts.block_size)
        spatial = self._given.positions(plan, step.positions, step.query_start_loc[:-1])
        if spatial is not None:
            step = replace(step, spatial=spatial)
        if (spans := self._given.spans(plan)) is not None:
            step = replace(step, mutual=spans)
        if self._pooling.params and len(pooled := self._pooling.spans(plan)):
            step = replace(step, spans=pooled)
        return step

    def _after_step(self) -> None:
        """Limits the growth of the heap. Subclasses call it when a step has ended."""
        if self._heap_guard is not None:
            self._heap_guard.after_step()

    def _prepare_state(self, spec: StateSpec) -> None:
        """Measures steps in a small temporary state, then creates the final state. The model must be loaded."""
        self._spec = spec
        self._grammars = grammar_compiler(spec.settings, spec.eos, spec.description.vocab_size)
        make_state = partial(self._make_state, spec)
        backend = Backend(
            description=spec.description,
            device=spec.device,
            cache_dtype=spec.dtype,
            make_state=make_state,
            run=self._run,
            context_token_bytes=self._context_token_bytes,
            kept_bytes=spec.adapter_bytes,
            mapped_bytes=self._mapped_bytes(),
            reserve=self._reserve,
            weights_bytes=spec.weights_bytes,
            ranks=spec.ranks,
        )
        self._memory = plan_measured(spec.settings, backend)
        if spec.device.type == "cpu":
            self._heap_guard = HeapGuard(self._memory.heap_bytes)

    def _make_state(self, spec: StateSpec, kv: KvPlan, num_host_blocks: int) -> None:
        """Creates the KV cache, the swap space, the state table and the facts that depend on their sizes."""
        settings, description, dtype = spec.settings, spec.description, spec.dtype
        block_size, vocab_size = settings.cache.block_size, description.vocab_size
        self._cache = allocate_kv_cache(description, kv.num_blocks, block_size, dtype, spec.device)
        self._host_cache = allocate_kv_cache(description, num_host_blocks, block_size, dtype, _CPU)
        num_rows = settings.scheduler.max_num_seqs
        num_states = num_state_slots(description, kv.max_rows or num_rows, kv.num_blocks, block_size, dtype)
        self._states = allocate_states(description, num_states, spec.device)
        self._facts = EngineFacts(
            num_blocks=kv.num_blocks,
            block_size=block_size,
            max_model_len=kv.max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=spec.eos,
            num_host_blocks=num_host_blocks,
            num_states=num_states,
            max_rows=kv.max_rows,
            has_draft_layer=description.num_draft_layers > 0,
            num_windowed_groups=num_groups(description) - 1,
            window=freed_window(description),
            state_pieces=self._state_pieces(spec, num_host_blocks),
            state_interval=state_interval(description, block_size, dtype),
            step_tokens=default_batched_tokens(spec.device.type == "cpu", settings.scheduler.max_num_seqs),
            step_prompt_tokens=self._prompt_tokens(),
            configuration=spec.configuration,
            content=spec.content,
            numerics=spec.numerics,
            computes_on_host=spec.device.type == "cpu",
            embedding_size=spec.embedding_size,
            pooling_kind=spec.pooling_kind,
            generates=description.has_head,
            takes_images=spec.takes_images,
            mutual_images=spec.takes_images and description.mutual_images,
            variant_because=spec.variant_because,
            num_stages=spec.ranks.shard.pp_size,
        )
        self._pooling = PoolingRows(spec.embedding_size)
        self._given = GivenRows(
            description,
            spec.model_dtype or dtype,
            spec.device,
            mutual=self._facts.mutual_images,
            embeds=spec.ranks.stage is None or spec.ranks.is_first,
        )
        self._table = StateTable(
            settings.scheduler.max_num_seqs,
            kv.max_model_len,
            block_size,
            vocab_size,
            spec.eos,
            self._grammars,
            MaskTurns(spec.ranks),
            num_groups=num_groups(description),
        )

    def _drop_state(self) -> None:
        """Frees the KV cache, the swap space and the state table."""
        del self._cache, self._host_cache, self._states, self._table
