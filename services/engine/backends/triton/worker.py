"""The GPU worker: runs the decoder with Triton kernels and CUDA graphs, and takes a plan while another one runs.

    launch    copies blocks, fills rows, stages the step's arrays and copies them in one piece, starts the graph or the
              kernels, samples, starts the copy of the tokens to the host; does not wait for the step
    collect   waits for that copy; writes the tokens to the rows and into the result

A sampled token stays on the device for the next step of its sequence, so a plan may schedule a sequence whose last
token the host does not know yet. `launch` waits for a step with draft tokens, because the accepted tokens determine the
next step's input. Runs on CPU tensors under Triton's interpreter, for tests. Called by the step loop, from one thread.
"""

import logging
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.backends.offload import make_offload
from antiphon.services.engine.backends.triton.adapters import ServedAdapters
from antiphon.services.engine.backends.triton.autotune.tuning import tune_as_asked
from antiphon.services.engine.backends.triton.device_blocks import DeviceBlocks
from antiphon.services.engine.backends.triton.device_inputs import (
    DeviceStep,
    HostStep,
    empty_step,
    flatten_for_device,
    place,
    send,
    staging_bytes,
    with_given,
)
from antiphon.services.engine.backends.triton.device_sampler import DeviceSampler, DraftTokens, StagedSampling
from antiphon.services.engine.backends.triton.graph_sizes import GraphSize
from antiphon.services.engine.backends.triton.graphs import Capture, CudaCapture, StepGraphs, captured_by_all
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Integers, work_kinds
from antiphon.services.engine.backends.triton.kernels.step_inputs import known_ids
from antiphon.services.engine.backends.triton.operations import TritonOperations
from antiphon.services.engine.backends.triton.results import HostCopies, Sums, UnderWay
from antiphon.services.engine.backends.triton.same_bits import variant_because
from antiphon.services.engine.backends.triton.staging import Staging, aligned, sent
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.kv.pieces import NativeCopy
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.models.kv_groups import freed_window, num_groups
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.parallel.shard import local_description
from antiphon.services.engine.quantization.choice import weight_form
from antiphon.services.engine.sampling.grammar import grammar_compiler
from antiphon.services.engine.worker.batch.acceptance import accept
from antiphon.services.engine.worker.batch.given import GivenRows
from antiphon.services.engine.worker.batch.mask_turns import MaskTurns
from antiphon.services.engine.worker.batch.pooling import PoolingRows, pooling_kind, span_sums, with_vectors
from antiphon.services.engine.worker.batch.prompt_logprobs import ReportedLogits, report_logits
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.services.engine.worker.capacity.budget import Backend, plan_measured, prompt_adapter_bytes
from antiphon.services.engine.worker.capacity.context import context_length, served_description
from antiphon.services.engine.worker.capacity.graphs import GraphBounds, graph_bounds, graphs_bytes
from antiphon.services.engine.worker.capacity.kv_cache import KvPlan
from antiphon.services.engine.worker.capacity.profile import largest_step
from antiphon.services.engine.worker.capacity.states import allocate_states, num_state_slots, state_interval
from antiphon.services.engine.worker.configuration import configuration_hash, content_hash, hardware, numerics
from antiphon.services.engine.worker.draft_layer import no_draft_layer
from antiphon.services.engine.worker.dtypes import choose_cache_dtype, choose_dtype
from antiphon.services.engine.worker.extras import check_extras
from antiphon.services.engine.worker.interface import UNDER_WAY_MAX
from antiphon.services.engine.worker.loading.kv_scales import with_kv_scales
from antiphon.services.engine.worker.loading.model_files import eos_token_ids, read_config
from antiphon.services.engine.worker.loading.weights import load_weights
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.pooling import PoolingKind

logger = logging.getLogger(__name__)


class TritonWorker:
    """A `PipelinedWorker` for GPUs."""

    adapters: AdapterLibrary | None = None
    """See `AdapterWorker`."""

    @torch.inference_mode()
    def __init__(
        self, settings: EngineSettings, model_dir: Path, device: torch.device, ranks: Communicator = ALONE_RANK
    ) -> None:
        """Loads the model, or the part given by `ranks.shard`; pipeline stages are not supported.

        Raises `ServiceError` or `SettingsError` for a model or settings that cannot work.
        """
        assert ranks.stage is None
        self._device, self._ranks, self._copies = device, ranks, HostCopies(device)
        config = read_config(model_dir)
        check_extras(settings, config)
        family = find_family(config)
        whole = served_description(settings, config)
        no_draft_layer(
            settings, "Triton's kernels do not predict tokens; PyTorch's operations do (--cuda-backend torch)"
        )
        self._description = local_description(whole, ranks.shard)
        self._dtype = choose_dtype(settings.execution.dtype, weight_dtype(config), device)
        self._cache_dtype = choose_cache_dtype(settings.cache.kv_cache_dtype, self._dtype)
        form = weight_form(settings, model_dir, config, device, native=True)
        form = with_kv_scales(form, settings, model_dir, config)
        backend = f"triton {hardware(device)} {form.name} {ranks.shard.tp_size}{whole.kv_kind}"
        self._configuration = configuration_hash(model_dir, backend, self._dtype, self._cache_dtype)
        self._content = content_hash(model_dir, f"{form.name}{whole.kv_kind}", self._dtype)
        deterministic = settings.execution.deterministic
        form_of_sums = " deterministic" if deterministic else ""
        self._numerics = numerics(f"{backend}{form_of_sums}", self._dtype, self._cache_dtype)
        operations = TritonOperations(
            context_length(settings, whole), self._dtype, ranks.shard, deterministic=deterministic
        )
        self._offload = make_offload(settings, self._description.num_layers, device)
        weights = load_weights(
            *(model_dir, whole, family.layout(whole), self._dtype, device, operations, form, ranks),
            *(() if self._offload is None else (self._offload.take,)),
        )
        like = torch.empty(0, dtype=self._dtype, device=device)
        rows_max = largest_step(settings, self._description).num_tokens
        tune_as_asked(settings, operations.products, rows_max, like, ranks)
        if self._offload is not None:
            weights = self._offload.finish(weights)
        self._weights_bytes = weights.nbytes
        self._served = ServedAdapters(settings, config, self._description, like, ranks.shard)
        self.adapters = self._served.library
        self._model = Decoder(self._description, self._served.adapted(weights), operations)
        itemsizes = self._dtype.itemsize, self._cache_dtype.itemsize
        self._kinds = work_kinds(self._description, *itemsizes, one_form=deterministic)
        self._pooling_kind: PoolingKind = pooling_kind(model_dir)
        self._under_way: deque[UnderWay | StepResult] = deque()
        self._sums: deque[Sums] = deque()
        """The sums of the steps in `_under_way`, in the same order."""
        self._graphs: StepGraphs | None = None
        eos = eos_token_ids(model_dir, self._description)
        self._grammars = grammar_compiler(settings, eos, self._description.vocab_size)
        self._prepare_state(settings, eos)

    def facts(self) -> EngineFacts:
        """See `ModelWorker`."""
        return self._facts

    def compile_grammar(self, grammar: Grammar) -> None:
        """See `GrammarWorker`."""
        self._grammars.compile(grammar)

    def kv_memory(self, native: NativeCopy | None = None) -> KvMemory:
        """See `KvWorker`."""
        return self._blocks.memory(native)

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelWorker`. All plans launched before must have been collected."""
        assert not self._under_way, "a plan is under way"
        self.launch(plan)
        return self.collect()

    def takes_another(self) -> bool:
        """See `PipelinedWorker`."""
        return len(self._under_way) < UNDER_WAY_MAX and not any(map(self._waited_for, self._under_way))

    def _waited_for(self, step: "UnderWay | StepResult") -> bool:
        """Whether the next step depends on the tokens of a step under way: its masks, or which sequences go on."""
        if isinstance(step, StepResult):
            return not all(step.token_ids)
        return self._table.needs_tokens(step.rows)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See `PipelinedWorker`."""
        self._served.fill_slots(plan)
        self._blocks.carry_out(plan)
        self._table.apply(plan)
        self._given.join(plan, self._served.vectors)
        self._pooling.join(plan)
        for sequence in plan.new:
            self._num_known[sequence.row] = len(sequence.token_ids)
        if plan.empty:
            self._under_way.append(StepResult(step=plan.step))
            self._sums.append(Sums(plan))
            return
        self._sampler.join(plan.new, self._table)
        self._staging.begin()
        step = flatten_for_device(plan, self._table, _with_drafts(self._num_known, plan), self._facts.block_size)
        step = with_given(step, plan, self._given)
        size = None if self._graphs is None else self._graphs.find(step)
        placed = place(step, self._tables, self._kinds, self._staging, size)
        sampling = self._stage_sampling(step)
        send(plan, self._table, self._tables, self._staging)
        logits = self._compute(plan, placed, size, needs_logits=len(step.logit_tokens) > 0)
        if logits is None:
            self._under_way.append(StepResult(step=plan.step))
            return
        self._choose(plan, step, logits, sampling, self._reported(step, placed, logits))

    def collect(self) -> StepResult:
        """See `PipelinedWorker`."""
        result = self._collect_samples()
        sums = self._sums.popleft()
        return with_vectors(result, self._pooling.take(sums.plan, sums.wait()))

    def _collect_samples(self) -> StepResult:
        step = self._under_way.popleft()
        if isinstance(step, StepResult):
            return step
        step.wait()
        sampled = step.sampled()
        self._table.fill(step.rows, step.places, sampled.token_ids)
        self._num_known[step.rows] = np.maximum(self._num_known[step.rows], step.places + 1)
        return sampled.result(step.plan.step, step.prompt_logprobs())

    def close(self) -> None:
        """See `ModelWorker`."""
        self._under_way.clear()
        self._sums.clear()
        del self._graphs, self._model, self._served
        del self._blocks, self._states, self._sampler, self._staging, self._tables, self._table
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # --- start-up -----------------------------------------------------------------------------------------------------

    def _prepare_state(self, settings: EngineSettings, eos: frozenset[int]) -> None:
        """Allocates buffers for the largest step, measures steps, and gives the rest of the memory to the KV cache."""
        d, bounds, block_size = self._description, largest_step(settings, self._description), settings.cache.block_size
        self._sampler = DeviceSampler(bounds.num_rows, d.vocab_size, self._device)
        num_slots = self._served.num_slots
        sizes = bounds.num_tokens, bounds.num_rows, bounds.context
        has_states = d.recurrent is not None
        room = staging_bytes(
            *(*sizes, len(self._kinds), block_size, num_slots),
            has_states=has_states,
            num_groups=num_groups(d),
            takes_images=settings.enable_mm,
        )
        self._staging = Staging(self._device, room)
        shape = num_groups(d), bounds.num_rows, aligned(-(-bounds.context // block_size))
        self._tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        on_device = self._device.type == "cuda"
        # Copies of weights are not captured. Ranks decide alike, because they have the same settings.
        captures = on_device and not settings.execution.enforce_eager and self._offload is None
        captured = graph_bounds(settings, d, bounds)
        graph_bytes = graphs_bytes(d, captured, self._dtype.itemsize) if captures else 0
        backend = Backend(
            description=d,
            device=self._device,
            cache_dtype=self._cache_dtype,
            make_state=partial(self._make_state, settings, eos),
            run=self.run,
            # Attention reads keys and values in the cache; what is computed of latents fits a memory of fixed size.
            context_token_bytes=lambda _: 0,
            kept_bytes=graph_bytes + prompt_adapter_bytes(settings, d, self._dtype),
            measures=on_device,
            weights_bytes=self._weights_bytes,
            ranks=self._ranks,
        )
        self.memory = plan_measured(settings, backend)
        if captures:
            free_bytes, _ = torch.cuda.mem_get_info()
            alone = self._ranks.shard.size == 1
            self._graphs = self._capture(captured, CudaCapture() if alone else captured_by_all(self._ranks))
            taken = free_bytes - torch.cuda.mem_get_info()[0]
            logger.info("the graphs take %.0f MiB, planned were %.0f", taken / 2**20, graph_bytes / 2**20)

    def _capture(self, bounds: GraphBounds, capture: Capture) -> StepGraphs:
        kinds = (heads for _, heads in self._kinds)
        return StepGraphs(bounds, kinds, self._prepare_empty, self._logits, self._forward, capture)

    def _make_state(self, settings: EngineSettings, eos: frozenset[int], kv: KvPlan, num_host_blocks: int) -> None:
        """Creates KV cache, swap space, recurrent states, the state table and the facts that depend on their sizes."""
        d, rows, block_size = self._description, settings.scheduler.max_num_seqs, settings.cache.block_size
        self._blocks = DeviceBlocks(d, kv.num_blocks, num_host_blocks, block_size, self._cache_dtype, self._device)
        num_states = num_state_slots(d, kv.max_rows or rows, kv.num_blocks, block_size, self._cache_dtype)
        self._states = allocate_states(d, num_states, self._device)
        self._facts = EngineFacts(
            num_blocks=kv.num_blocks,
            block_size=block_size,
            max_model_len=kv.max_model_len,
            vocab_size=d.vocab_size,
            eos_token_ids=eos,
            num_host_blocks=num_host_blocks,
            num_windowed_groups=num_groups(d) - 1,
            window=freed_window(d),
            num_states=num_states,
            max_rows=kv.max_rows,
            state_interval=state_interval(d, block_size, self._cache_dtype),
            computes_on_host=self._device.type == "cpu",
            configuration=self._configuration,
            content=self._content,
            numerics=self._numerics,
            embedding_size=d.hidden_size,
            pooling_kind=self._pooling_kind,
            generates=d.has_head,
            takes_images=settings.enable_mm,
            mutual_images=settings.enable_mm and d.mutual_images,
            variant_because=variant_because(settings, d),
        )
        self._pooling = PoolingRows(d.hidden_size)
        self._given = GivenRows(d, self._dtype, self._device, mutual=self._facts.mutual_images)
        self._table = StateTable(
            rows,
            kv.max_model_len,
            block_size,
            d.vocab_size,
            eos,
            self._grammars,
            MaskTurns(self._ranks),
            num_groups=num_groups(d),
        )
        self._num_known = np.zeros(rows, dtype=np.int64)

    def _prepare_empty(self, size: GraphSize) -> DeviceStep:
        self._staging.begin()
        step = empty_step(bool(self._states), len(self._tables))
        placed = place(step, self._tables, self._kinds, self._staging, size)
        self._staging.upload()
        return placed

    # --- a step -------------------------------------------------------------------------------------------------------

    def _stage_sampling(self, step: HostStep) -> StagedSampling | None:
        if not len(step.rows):
            return None
        batch = self._table.sampling(step.rows, step.offsets, with_counts=False)
        return self._sampler.stage(batch, step.rows, self._staging)

    def _compute(
        self, plan: StepPlan, step: DeviceStep, size: GraphSize | None, *, needs_logits: bool
    ) -> Tensor | None:
        """Runs the model and returns the logits; None unless needed. Starts copying pooled vectors to the host."""
        spans = self._pooling.spans(plan)
        if self._graphs is not None and size is not None and size.is_decode:
            self._sums.append(Sums(plan))
            return self._graphs.replay(size)
        hidden = self._forward(step) if self._graphs is None or size is None else self._graphs.replay(size)
        if len(spans):
            self._sums.append(Sums(plan, self._copies.begin(span_sums(hidden, spans)), self._copies.end()))
        else:
            self._sums.append(Sums(plan))
        if not needs_logits:
            return None
        return self._model.logits(hidden if step.logit_tokens is None else hidden.index_select(0, step.logit_tokens))

    def _forward(self, step: DeviceStep) -> Tensor:
        known_ids(step.ids, step.sources, self._sampler.last)
        return self._model.forward(step.ids, step.positions, self._step_inputs(step))

    def _logits(self, step: DeviceStep) -> Tensor:
        return self._model.logits(self._forward(step))

    def _step_inputs(self, step: DeviceStep) -> StepInputs:
        self._served.begin(step.adapters)
        kv = self._blocks.kv
        return StepInputs(
            slot_mapping=step.slots,
            attention=step.attention,
            key_caches=kv.key_caches,
            value_caches=kv.value_caches,
            states=step.states,
            state_caches=self._states,
            given=step.given,
        )

    def _reported(self, step: HostStep, placed: DeviceStep, logits: Tensor) -> ReportedLogits | None:
        if step.report is None or placed.reported_ids is None:
            return None
        found = report_logits(logits[len(step.rows) :], placed.reported_ids, step.report.num_top)
        return ReportedLogits(*map(self._copies.begin, found))

    def _choose(
        self,
        plan: StepPlan,
        step: HostStep,
        logits: Tensor,
        sampling: StagedSampling | None,
        reported: ReportedLogits | None,
    ) -> None:
        if sampling is not None:
            # The masks of grammars are computed while the device computes the step.
            batch = self._table.with_adjustments(sampling.batch, step.rows, step.offsets)
            sampling = self._sampler.with_masks(sampling, batch)
        waits = sampling is not None and bool(sampling.batch.waiting)
        draft_tokens = _draft_tokens(plan) if waits or step.offsets.any() else None
        chosen = None
        if sampling is not None:
            chosen = self._copies.begin_chosen(self._sampler.choose(logits[: len(step.rows)], sampling, draft_tokens))
        arrived = self._copies.end()
        places = step.rows if draft_tokens is not None else self._table.reserve(step.rows)
        launched = UnderWay(
            plan=plan,
            rows=step.rows,
            places=places,
            sampling=sampling,
            chosen=chosen,
            report=step.report,
            reported=reported,
            arrived=arrived,
        )
        self._under_way.append(launched if draft_tokens is None else self._accept(launched))

    def _accept(self, step: UnderWay) -> StepResult:
        """Waits for a step with draft tokens and determines the accepted ones.

        Updates each row's last token and penalty counts on the device.
        """
        step.wait()
        result = accept(step.plan, step.sampled(), self._table)
        rows = [share.row for share in step.plan.scheduled if share.samples]
        self._num_known[rows] = self._table.num_tokens[rows]
        for place_in_share in range(max(map(len, result.token_ids))):
            given = [
                (row, x[place_in_share])
                for row, x in zip(rows, result.token_ids, strict=True)
                if place_in_share < len(x)
            ]
            columns = sent(torch.tensor(given, dtype=torch.int64), self._device)
            penalised = np.flatnonzero(self._table.has_penalties(np.array([row for row, _ in given])))
            self._sampler.take(columns[:, 0], columns[:, 1], penalised)
        return replace(result, prompt_logprobs=step.prompt_logprobs())


def _draft_tokens(plan: StepPlan) -> DraftTokens:
    """Returns for each sampled token the draft tokens before it."""
    drafts = [share.draft_token_ids for share in plan.scheduled if share.samples]
    return DraftTokens(tuple(draft[:end] for draft in drafts for end in range(len(draft) + 1)))


def _with_drafts(num_known: Integers, plan: StepPlan) -> Integers:
    """Returns for each row the number of token ids that the host has: known tokens and this plan's draft tokens."""
    if not any(share.draft_token_ids for share in plan.scheduled):
        return num_known
    known = num_known.copy()
    for share in plan.scheduled:
        known[share.row] += len(share.draft_token_ids)
    return known
