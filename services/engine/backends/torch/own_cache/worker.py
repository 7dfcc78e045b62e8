"""The worker of models that run with transformers' own cache (`model`): state spaces, linear attention and others.

Sequences are computed one after another, each with its own cache. A cache cannot be truncated: if a plan continues a
sequence from another position than the end of its cache, as after a preemption or in a beam search, the cache is
recomputed from the sequence's tokens. The scheduler's blocks are only used to count tokens. Called by the step loop,
from one thread.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from antiphon.services.engine.backends.torch.own_cache.kinds import KEEPS_STATES
from antiphon.services.engine.backends.torch.own_cache.memory import CachePlan, plan_caches
from antiphon.services.engine.backends.torch.own_cache.model import SequenceCache, load_own_cache_model
from antiphon.services.engine.backends.torch.results import step_result
from antiphon.services.engine.backends.torch.weight_memory import host_weights
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult, default_batched_tokens
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, weight_form
from antiphon.services.engine.sampling.grammar import grammar_compiler
from antiphon.services.engine.worker.batch.inputs import FlatStep, flatten
from antiphon.services.engine.worker.batch.mask_turns import MaskTurns
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.services.engine.worker.capacity.budget import cpu_budget, cuda_budget, heap_bytes, rows_bytes
from antiphon.services.engine.worker.capacity.kv_cache import context_length
from antiphon.services.engine.worker.capacity.memory import HeapGuard
from antiphon.services.engine.worker.capacity.profile import largest_step
from antiphon.services.engine.worker.configuration import configuration_hash, content_hash, numerics, torch_backend
from antiphon.services.engine.worker.dtypes import choose_torch_dtype
from antiphon.services.engine.worker.estimate import predict_step
from antiphon.services.engine.worker.extras import check_offload, serves_adapters
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.services.engine.worker.loading.model_files import eos_token_ids, read_config, useful_threads
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.world import exchanges_kv
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.grammar import Grammar

logger = logging.getLogger(__name__)

AGAIN_TOKENS = 512
"""Maximum number of tokens per forward pass when a cache is recomputed."""


class OwnCacheWorker:
    """A `ModelWorker` that keeps a cache of transformers for each row."""

    def __init__(self, settings: EngineSettings, model_dir: Path, device: torch.device) -> None:
        """Loads the model. Raises `ServiceError` or `SettingsError` for a model or settings that cannot work."""
        config = read_config(model_dir)
        form = weight_form(settings, model_dir, config, device, native=False)
        check_settings(settings, quantizes=not form.is_plain)
        check_offload(settings, device)
        if device.type == "cpu":
            torch.set_num_threads(settings.execution.threads or useful_threads(model_dir))
        dtype = choose_torch_dtype(settings.execution.dtype, weight_dtype(config), device, model_dir)
        self._device, self._block_size = device, settings.cache.block_size
        self._model = load_own_cache_model(model_dir, config, dtype, device)
        description = self._model.description
        eos = eos_token_ids(model_dir, description)
        plan = self._plan(settings, dtype)
        self._grammars = grammar_compiler(settings, eos, description.vocab_size)
        self._table = StateTable(
            settings.scheduler.max_num_seqs,
            plan.kv.max_model_len,
            settings.cache.block_size,
            description.vocab_size,
            eos,
            self._grammars,
            # To compute a token again, this worker would compute the whole sequence again.
            MaskTurns(is_limited=False),
        )
        self._caches: dict[int, SequenceCache] = {}
        """The cache of each row."""
        self._facts = _facts(settings, model_dir, plan, description.vocab_size, eos, dtype, device)
        logger.info("%s", _notice(settings, plan))

    def facts(self) -> EngineFacts:
        """See `ModelWorker`."""
        return self._facts

    def compile_grammar(self, grammar: Grammar) -> None:
        """See `GrammarWorker`."""
        self._grammars.compile(grammar)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelWorker`."""
        for row in (*plan.freed_rows, *(sequence.row for sequence in plan.new)):
            self._caches.pop(row, None)
        self._table.apply(plan)
        if plan.empty:
            return StepResult(step=plan.step)
        step = flatten(plan, self._table, self._block_size)
        result = step_result(plan, step, self._logits(plan, step), self._table)
        if self._heap_guard is not None:
            self._heap_guard.after_step()
        return result

    def close(self) -> None:
        """See `ModelWorker`."""
        self._caches.clear()
        del self._model, self._table
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def weight_memory(self) -> list[WeightMemory]:
        """See `WeighableWorker`. Weights on a device are not included."""
        return host_weights(self._model.module)

    def _plan(self, settings: EngineSettings, dtype: torch.dtype) -> CachePlan:
        """Returns the division of the memory that remains beside the weights."""
        description, on_cpu = self._model.description, self._device.type == "cpu"
        size = self._model.cache_bytes(self._device)
        bounds, context = largest_step(settings, description, on_cpu), context_length(settings, description)
        # Sequences are computed one after another, so that none needs more than its own tokens. Transformers makes
        # more copies than the engine's own layers.
        step_bytes = 2 * predict_step(bounds, description, dtype, "torch" if on_cpu else "gpu").fixed
        heap = heap_bytes(step_bytes)
        self._heap_guard = HeapGuard(heap) if on_cpu else None
        if on_cpu:
            budget = cpu_budget(settings, rows_bytes(settings, description, context) + step_bytes + heap)
        else:
            budget = cuda_budget(settings, self._device, step_bytes)
        return plan_caches(settings, description, size, budget, on_cpu=on_cpu)

    def _logits(self, plan: StepPlan, step: FlatStep) -> Tensor | None:
        """Computes the step. Returns the logits of `logit_tokens` [n, vocab]; None if there are none."""
        ids, wanted = self._tensor(step.ids), step.logit_tokens
        logits: Tensor | None = None
        for index, share in enumerate(plan.scheduled):
            first, end = int(step.query_start_loc[index]), int(step.query_start_loc[index + 1])
            places = ((wanted >= first) & (wanted < end)).nonzero()[0]
            keep = self._tensor(wanted[places] - first) if len(places) else None
            found = self._model.extend(self._cache_until(share.row, share.start), ids[first:end], keep)
            if keep is None:
                continue
            if logits is None:
                logits = found.new_empty(len(wanted), found.shape[1])
            logits[self._tensor(places)] = found
        return logits

    def _cache_until(self, row: int, start: int) -> SequenceCache:
        """Returns the row's cache with exactly its first `start` tokens; recomputes it if it has other tokens."""
        cache = self._caches.get(row)
        if cache is None or cache.num_tokens != start:
            cache = self._caches[row] = self._model.new_cache()
            known = self._tensor(self._table.token_ids[row, :start].astype("int64"))
            for portion in known.split(AGAIN_TOKENS) if start else ():
                self._model.extend(cache, portion, None)
        return cache

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values).to(self._device)


def check_settings(settings: EngineSettings, *, quantizes: bool) -> None:
    """Raises SettingsError for options that models of this kind do not support."""
    refused = {
        "--quantization": quantizes,
        "--enable-lora, --enable-prompt-adapter": serves_adapters(settings),
        "--enable-mm": settings.enable_mm,
        "--kv-cache-dtype": settings.cache.kv_cache_dtype != "auto",
        "--role": settings.kv_transfer.role != "both" and exchanges_kv(settings.parallel),
    }
    for option in refused:
        if refused[option]:
            raise SettingsError(
                f"{option}: this architecture runs through transformers with a cache of its own, where the option is "
                "not possible; leave it out"
            )


def _notice(settings: EngineSettings, plan: CachePlan) -> str:
    """Returns a notice for users about how this model runs."""
    message = "this model runs through transformers with a cache of its own: sequences are computed one after another"
    message += f", at most {min(plan.num_sequences, settings.scheduler.max_num_seqs)} are running"
    unused = {
        "prefix caching": settings.cache.enable_prefix_caching,
        "lookahead": settings.scheduler.use_lookahead,
        "--use-mtp": settings.scheduler.use_mtp,
        "swap space": bool(settings.cache.swap_space),
    }
    names = [name for name in unused if unused[name]]
    return f"{message}; {', '.join(names)} change nothing" if names else message


def _facts(
    settings: EngineSettings,
    model_dir: Path,
    plan: CachePlan,
    vocab_size: int,
    eos: frozenset[int],
    dtype: torch.dtype,
    device: torch.device,
) -> EngineFacts:
    return EngineFacts(
        num_blocks=plan.kv.num_blocks,
        block_size=settings.cache.block_size,
        max_model_len=plan.kv.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        step_tokens=default_batched_tokens(device.type == "cpu", settings.scheduler.max_num_seqs),
        computes_on_host=device.type == "cpu",
        configuration=configuration_hash(model_dir, f"own cache {torch_backend(device)}", dtype, dtype),
        content=content_hash(model_dir, PLAIN_WEIGHTS.name, dtype),
        numerics=numerics(f"own cache {torch_backend(device)}", dtype, dtype),
        keeps_states=KEEPS_STATES,
        max_rows=plan.num_sequences,
        variant_because="PyTorch's operations order their sums by the number of tokens of a step",
    )
