"""The CPU worker: runs each plan as one call to the C++ library, including sampling for greedy rows.

    launch    copies KV blocks, updates the state table, builds the step's arrays and queues the step in the library
    collect   waits for the oldest step, writes its tokens to the state table and returns the result

The library starts the next step as soon as the previous one has ended, and takes greedy tokens directly from the
previous step. Planning and the handling of results therefore overlap with computation and cost only a share of a core.
If tokens are sampled in Python, draft tokens are verified or KV blocks are copied, the worker first waits for the steps
in flight.

The worker shares its state table, memory planning and sampler with the torch worker, which runs the models and settings
that this one cannot (`cannot_serve`). Called by the step loop, from one thread.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from antiphon.services.engine.adapters.delta import LoadedAdapter, Place
from antiphon.services.engine.backends.cpu.answer import AnswerSizes, StepAnswer, TokenEmbeddings
from antiphon.services.engine.backends.cpu.compile import CompileError
from antiphon.services.engine.backends.cpu.decoder import (
    CONVOLUTION_MAX,
    HEAD_DIM_MAX,
    STATE_DIM_MAX,
    STREAMS_MAX,
    NativeDecoder,
)
from antiphon.services.engine.backends.cpu.kv_memory import PanelMemory
from antiphon.services.engine.backends.cpu.library import load_library
from antiphon.services.engine.backends.cpu.lora import NativeAdapters, NativeDelta
from antiphon.services.engine.backends.cpu.native import Library
from antiphon.services.engine.backends.cpu.packed import open_cache
from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.kv.pieces import NativeCopy
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace
from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.quantization.choice import WeightForm, weight_form
from antiphon.services.engine.worker.batch.acceptance import accept
from antiphon.services.engine.worker.batch.inputs import FlatStep
from antiphon.services.engine.worker.batch.pooling import pooling_kind, with_vectors
from antiphon.services.engine.worker.batch.predicting import predicted
from antiphon.services.engine.worker.batch.sampler import SamplingBatch
from antiphon.services.engine.worker.capacity.budget import kept_adapter_bytes
from antiphon.services.engine.worker.capacity.kv_cache import KvPlan, padded_heads
from antiphon.services.engine.worker.capacity.profile import StepBounds
from antiphon.services.engine.worker.configuration import configuration_hash, content_hash, numerics
from antiphon.services.engine.worker.draft_layer import drafting_description
from antiphon.services.engine.worker.dtypes import choose_cache_dtype, choose_dtype
from antiphon.services.engine.worker.extras import check_extras, check_offload, make_library, serves_adapters
from antiphon.services.engine.worker.interface import UNDER_WAY_MAX, WeightMemory
from antiphon.services.engine.worker.loading.kv_scales import with_kv_scales
from antiphon.services.engine.worker.loading.model_files import eos_token_ids, read_config, useful_threads
from antiphon.services.engine.worker.step_worker import StateSpec, StepWorker
from antiphon.shared.config import EngineSettings

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_MIB = 2**20
_SERVED_DTYPES = (torch.bfloat16, torch.float32)


def load_cpu_worker(settings: EngineSettings, model_dir: Path) -> "CpuWorker | None":
    """Returns a loaded worker; None if there is no library or it cannot run this model with these settings."""
    reason = cannot_serve(settings, model_dir)
    if reason is None:
        try:
            return CpuWorker(settings, model_dir, load_library(settings.execution.compile_cache))
        except (CompileError, OSError) as error:
            reason = str(error)
    logger.warning("the fast CPU backend is not used: %s. PyTorch's operations compute instead", reason)
    return None


def cannot_serve(settings: EngineSettings, model_dir: Path) -> str | None:
    """Returns the reason why the C++ worker cannot run this model with these settings; None if it can."""
    config = read_config(model_dir)
    if not has_family(config):
        return "this architecture runs through transformers"
    if choose_dtype(settings.execution.dtype, weight_dtype(config), _CPU) not in _SERVED_DTYPES:
        return f"it has no --dtype {settings.execution.dtype}"
    description = find_family(config).describe(config)
    if settings.enable_mm and description.mutual_images:
        return "the tokens of an image attend to each other in this model, and it computes causal attention only"
    if settings.enable_mm and description.image_layers:
        return "images of this model add embeddings to the outputs of layers, which it does not"
    recurrent = description.recurrent
    if recurrent is not None and not 2 <= recurrent.kernel_size <= CONVOLUTION_MAX:
        return f"it computes convolutions over 2 to {CONVOLUTION_MAX} tokens, not over {recurrent.kernel_size}"
    if isinstance(recurrent, GatedDelta | ChannelDelta) and max(recurrent.key_dim, recurrent.value_dim) > STATE_DIM_MAX:
        return f"the heads of linear attention have more than {STATE_DIM_MAX} dimensions"
    if isinstance(recurrent, StateSpace | ChannelSpace) and recurrent.state_dim > STATE_DIM_MAX:
        return f"the states of state spaces have more than {STATE_DIM_MAX} dimensions"
    if description.streams is not None and description.streams.count > STREAMS_MAX:
        return f"the model has more than {STREAMS_MAX} residual streams"
    if description.head_dim > HEAD_DIM_MAX:
        return f"the model's heads have more than {HEAD_DIM_MAX} dimensions"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A step that was launched and has not been collected."""

    plan: StepPlan
    step: FlatStep
    answer: StepAnswer
    batch: SamplingBatch | None
    """Sampling parameters; None if every row takes its most likely token and there are no draft tokens."""
    places: NDArray[np.int64]
    """Positions reserved for the step's tokens in their rows; empty if tokens are appended once they are known."""


class CpuWorker(StepWorker):
    """A `PipelinedWorker` that computes with the C++ library."""

    def __init__(self, settings: EngineSettings, model_dir: Path, library: Library) -> None:
        """Loads the model. Raises `ServiceError` for a model or settings that cannot work."""
        check_offload(settings, _CPU)
        threads = settings.execution.threads or useful_threads(model_dir)
        torch.set_num_threads(threads)
        config = read_config(model_dir)
        family = find_family(config)
        self._description = drafting_description(settings, model_dir, config)
        self._dtype = choose_dtype(settings.execution.dtype, weight_dtype(config), _CPU)
        cache_dtype = choose_cache_dtype(settings.cache.kv_cache_dtype, self._dtype)
        layout = family.layout(self._description)
        form = with_kv_scales(weight_form(settings, model_dir, config, _CPU, native=True), settings, model_dir, config)
        has_drafts = self._description.num_draft_layers > 0
        cache = open_cache(settings.execution.weight_cache, model_dir, self._dtype, form, drafts=has_drafts)
        check_extras(settings, config)
        num_slots = settings.adapters.num_lora_slots
        self._decoder = NativeDecoder(
            library,
            self._description,
            model_dir,
            layout,
            self._dtype,
            settings.cache.block_size,
            threads,
            form,
            cache,
            lora=(num_slots, settings.adapters.max_lora_rank if num_slots else 0),
            cache_dtype=cache_dtype,
        )
        if not form.is_plain:
            self._log_weights(form)
        self._copy_block = library.copy_block
        self._slots = NativeAdapters(self._decoder.model, self._description, self._dtype, num_slots)
        if serves_adapters(settings):
            self.adapters = make_library(settings, config, self._slots.prepare)
        self._under_way: deque[_UnderWay | StepResult] = deque()
        self._freed_tensors = False
        """Whether KV blocks were copied or tokens sampled in Python since the last check of the heap. Other steps leave
        nothing on the heap: the library has its own memory."""
        backend = f"cpp {library.name} {form.name}{self._description.kv_kind}"
        configuration = configuration_hash(model_dir, backend, self._dtype, cache_dtype)
        self._prepare_state(
            StateSpec(
                settings=settings,
                description=padded_heads(self._description),
                dtype=cache_dtype,
                device=_CPU,
                eos=eos_token_ids(model_dir, self._description),
                configuration=configuration,
                numerics=numerics(backend, self._dtype, cache_dtype),
                content=content_hash(model_dir, f"{form.name}{self._description.kv_kind}", self._dtype),
                embedding_size=self._description.hidden_size,
                pooling_kind=pooling_kind(model_dir),
                weights_bytes=self._decoder.weights_bytes,
                adapter_bytes=kept_adapter_bytes(settings, self._description, self._dtype),
                model_dtype=self._dtype,
                takes_images=settings.enable_mm,
            )
        )

    def _log_weights(self, form: WeightForm) -> None:
        """Logs the memory that quantization saves."""
        decoder = self._decoder
        sizes = decoder.quantized_bytes / _MIB, decoder.quantized_from_bytes / _MIB
        logger.info("quantization: %s, weights %.1f MiB instead of %.1f", form.name, *sizes)

    def close(self) -> None:
        """See `ModelWorker`."""
        self._decoder.close()
        del self._decoder
        self._drop_state()

    def _block_memory(self, native: NativeCopy | None) -> PanelMemory:
        """See `StepWorker`. The worker's own library copies if no other is given."""
        copy = native or self._copy_block
        return PanelMemory(self._cache, self._host_cache, self._description, self._dtype, copy)

    def weight_memory(self) -> list[WeightMemory]:
        """See `WeighableWorker`."""
        return self._decoder.weights

    def _fill_slot(self, slot: int, adapter: LoadedAdapter) -> None:
        self._slots.fill(slot, cast(Mapping[Place, NativeDelta], adapter.prepared))

    def _reserve(self, bounds: StepBounds) -> int:
        return self._decoder.model.reserve(bounds.num_tokens, bounds.num_logits)

    def _mapped_bytes(self) -> int:
        return self._decoder.mapped_bytes

    def _prompt_tokens(self) -> int:
        return self._decoder.model.prompt_tokens()

    def _make_state(self, spec: StateSpec, kv: KvPlan, num_host_blocks: int) -> None:
        super()._make_state(spec, kv, num_host_blocks)
        self._sizes = AnswerSizes(
            self._facts.vocab_size, self._facts.embedding_size, spec.settings.scheduler.max_num_seqs
        )
        if self._description.layer_kv_heads and self._cache.slabs is not None:
            self._decoder.set_slabs(*self._cache.slabs)
        else:
            for place, layer in enumerate(self._description.attention_layers):
                values = self._cache.value_caches[place] if self._cache.value_caches else None
                self._decoder.set_cache(layer, self._cache.key_caches[place], values)
        recurrent = self._description.recurrent
        for layer, states in zip(sorted(recurrent.layers) if recurrent else (), self._states, strict=True):
            self._decoder.set_states(layer, states)

    def takes_another(self) -> bool:
        """See `PipelinedWorker`."""
        return len(self._under_way) < UNDER_WAY_MAX and not self._chooses_here()

    def launch(self, plan: StepPlan) -> None:
        """See `PipelinedWorker`."""
        if self._waits_for_results(plan):
            self._under_way = deque(map(self._landed, self._under_way))
        step = self._begin(plan)
        self._freed_tensors |= plan.copies_blocks
        if step is None:
            self._under_way.append(StepResult(step=plan.step))
            return
        batch = None
        drafts = self._facts.has_draft_layer and plan.drafts
        if self._table.needs_choice(step.rows) or step.has_draft_tokens or drafts:
            batch = self._table.sampling(step.rows, step.offsets)
        answer = StepAnswer(batch, step, self._sizes, self._embeddings(step), keeps=drafts)
        self._decoder.model.launch(answer.native(step))
        if batch is not None:
            # The library computes meanwhile, so the computation of grammar masks does not lengthen the step.
            batch = self._table.with_adjustments(batch, step.rows, step.offsets)
        places = self._table.reserve(step.rows) if batch is None else step.rows[:0]
        self._under_way.append(_UnderWay(plan=plan, step=step, answer=answer, batch=batch, places=places))

    def _embeddings(self, step: FlatStep) -> TokenEmbeddings | None:
        """Returns the embeddings of the step's virtual tokens."""
        virtual = step.virtual
        if virtual is None:
            return None
        addresses, tables = np.zeros(len(step.ids), dtype=np.int64), list[torch.Tensor]()
        places = zip(virtual.tokens.tolist(), virtual.rows.tolist(), virtual.indices.tolist(), strict=True)
        for token, row, position in places:
            table = self._given.table(row)
            tables.append(table)
            addresses[token] = table[position].data_ptr()
        return TokenEmbeddings(addresses, tables)

    def collect(self) -> StepResult:
        """See `PipelinedWorker`."""
        result = self._landed(self._under_way.popleft())
        if self._freed_tensors:
            self._freed_tensors = False
            self._after_step()
        return result

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelWorker`. All launched plans must have been collected."""
        return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        assert not self._under_way, "a plan is under way"
        self.launch(plan)
        return self.collect()

    def _waits_for_results(self, plan: StepPlan) -> bool:
        """Whether the steps in flight must end before this plan starts.

        This is so if the plan copies blocks, or if tokens of a step in flight are still to be sampled or verified.
        """
        return plan.copies_blocks or self._chooses_here()

    def _chooses_here(self) -> bool:
        """Whether tokens of a step in flight will be sampled or verified in Python after the step has ended."""
        return any(isinstance(earlier, _UnderWay) and earlier.batch is not None for earlier in self._under_way)

    def _landed(self, earlier: "_UnderWay | StepResult") -> StepResult:
        """Returns the result of the library's oldest step. Waits for the step unless `earlier` is already a result."""
        if isinstance(earlier, StepResult):
            return earlier
        self._decoder.model.collect()
        result = self._sampled(earlier)
        if self._pooling.params:
            result = with_vectors(result, self._pooling.take(earlier.plan, earlier.answer.sums))
        if not (self._facts.has_draft_layer and earlier.plan.drafts):
            return result
        # No other step is in flight, as this one has chosen tokens here.
        return predicted(earlier.plan, earlier.step, result, self._table, self._facts.block_size, self._draft_pass)

    def _draft_pass(self, step: FlatStep, sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `predicting.RunPass`."""
        answer = StepAnswer(None, step, self._sizes, self._embeddings(step), sources=sources)
        self._decoder.model.step(answer.native(step))
        return answer.best

    def _sampled(self, earlier: _UnderWay) -> StepResult:
        """Samples the tokens of a step that has ended and appends them to the rows."""
        plan, step = earlier.plan, earlier.step
        sampled, reported = earlier.answer.sampled(earlier.batch), earlier.answer.reported(step)
        self._freed_tensors |= earlier.batch is not None or bool(reported)
        if step.has_draft_tokens or sampled.waiting:
            return replace(accept(plan, sampled, self._table), prompt_logprobs=reported)
        if earlier.batch is None:
            self._table.fill(step.rows, earlier.places, sampled.token_ids)
        else:
            self._table.append(step.rows, sampled.token_ids)
        return sampled.result(plan.step, reported)
