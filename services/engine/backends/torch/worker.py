"""The torch worker: runs plans with plain torch operations on any device. Every faster worker is tested against it.

The worker loads the model, sizes the KV cache, keeps the state table, computes and samples. It does not know requests,
scheduling or the bus. Called by the step loop, from one thread.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.adapters.delta import Delta, LoadedAdapter, Place
from antiphon.services.engine.backends.torch.adapters import AdapterStep, adapted
from antiphon.services.engine.backends.torch.results import step_result
from antiphon.services.engine.backends.torch.weight_memory import host_weights
from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.kernels.alibi import alibi_slopes
from antiphon.services.engine.kernels.paged_attention import AttentionShape, plan_attention
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.models.decoder import Decoder, LanguageModel
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.parallel.shard import ALONE, Shard, local_description
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm, weight_form
from antiphon.services.engine.worker.batch.inputs import FlatStep
from antiphon.services.engine.worker.batch.pooling import NO_SUMS, pooling_kind, span_sums, with_vectors
from antiphon.services.engine.worker.batch.predicting import predicted
from antiphon.services.engine.worker.capacity.budget import kept_adapter_bytes
from antiphon.services.engine.worker.capacity.context import served_description
from antiphon.services.engine.worker.capacity.profile import bytes_per_context_token
from antiphon.services.engine.worker.configuration import configuration_hash, content_hash, numerics, torch_backend
from antiphon.services.engine.worker.draft_layer import drafting_description, no_draft_layer
from antiphon.services.engine.worker.dtypes import choose_cache_dtype, choose_torch_dtype
from antiphon.services.engine.worker.extras import (
    check_extras,
    check_offload,
    check_stages,
    make_library,
    serves_adapters,
)
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.services.engine.worker.loading.kv_scales import with_kv_scales
from antiphon.services.engine.worker.loading.model_files import eos_token_ids, read_config, useful_threads
from antiphon.services.engine.worker.loading.weights import load_weights
from antiphon.services.engine.worker.step_worker import StateSpec, StepWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError


class TorchWorker(StepWorker):
    """A `ModelWorker` that computes with plain torch operations."""

    def __init__(
        self,
        settings: EngineSettings,
        model_dir: Path,
        device: torch.device | None = None,
        ranks: Communicator = ALONE_RANK,
    ) -> None:
        """Loads the model, or the part given by `ranks.shard`.

        Raises `ServiceError` or `SettingsError` for a model or settings that cannot work.
        """
        self._device = device or torch.device("cpu")
        check_offload(settings, self._device)
        if self._device.type == "cpu":
            torch.set_num_threads(settings.execution.threads or max(1, useful_threads(model_dir) // ranks.local_size))
        config = read_config(model_dir)
        self._dtype = choose_torch_dtype(settings.execution.dtype, weight_dtype(config), self._device, model_dir)
        form = weight_form(settings, model_dir, config, self._device, native=False)
        form = with_kv_scales(form, settings, model_dir, config)
        check_extras(settings, config)
        check_stages(settings, config, ranks.shard)
        self._adapter_step = AdapterStep(settings.adapters.max_loras or 0, self._dtype, self._device)
        self._model, self._description = load_model(
            model_dir,
            config,
            self._dtype,
            self._device,
            form,
            ranks,
            described=self._describe(settings, model_dir, config, ranks),
            trust_remote_code=settings.trust_remote_code,
            adapters=self._adapter_step if settings.adapters.enable_lora else None,
        )
        if serves_adapters(settings):
            self.adapters = make_library(settings, config, self._adapter_step.prepare, ranks.shard)
        cache_dtype = choose_cache_dtype(settings.cache.kv_cache_dtype, self._dtype)
        bytes_per_slot = self._description.kv_size * cache_dtype.itemsize
        slopes = scaled_slopes(self._description, self._device, ranks.shard)
        attending = self._description.attention_layers
        self._windows = {self._description.sliding_windows[layer] for layer in attending}
        self._shape = AttentionShape(
            block_size=settings.cache.block_size,
            bytes_per_slot=bytes_per_slot,
            dtype=self._dtype,
            device=self._device,
            alibi_slopes=slopes,
            chunked_windows=self._description.chunked_windows,
        )
        self._prepare_state(self._state_spec(settings, model_dir, cache_dtype, form, ranks))
        if self._device.type == "cuda":
            # Makes the allocator return cached memory to the device instead of exceeding the share.
            torch.cuda.set_per_process_memory_fraction(settings.cache.gpu_memory_utilization, self._device)

    def _describe(
        self, settings: EngineSettings, model_dir: Path, config: Mapping[str, Any], ranks: Communicator
    ) -> DecoderDescription | None:
        """Returns the description of the whole model; None if transformers runs it."""
        if has_family(config):
            return drafting_description(settings, model_dir, config, ranks.shard)
        no_draft_layer(settings, "this architecture runs through transformers")
        return None

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelWorker`."""
        result = self._run(plan)
        self._after_step()
        return result

    def _state_spec(
        self,
        settings: EngineSettings,
        model_dir: Path,
        cache_dtype: torch.dtype,
        form: WeightForm,
        ranks: Communicator,
    ) -> StateSpec:
        """Returns the properties on which the state depends. The model must be loaded."""
        form_name = f"{form.name}{self._description.kv_kind}"
        backend = f"{torch_backend(self._device)} {form_name} {ranks.shard.tp_size}x{ranks.shard.pp_size}"
        return StateSpec(
            settings=settings,
            description=self._description,
            dtype=cache_dtype,
            device=self._device,
            eos=eos_token_ids(model_dir, self._description),
            configuration=configuration_hash(model_dir, backend, self._dtype, cache_dtype),
            content=content_hash(model_dir, form_name, self._dtype),
            numerics=numerics(backend, self._dtype, cache_dtype),
            embedding_size=self._model.embedding_size,
            pooling_kind=pooling_kind(model_dir),
            ranks=ranks,
            weights_bytes=self._model.weights_bytes,
            adapter_bytes=kept_adapter_bytes(settings, self._description, self._dtype),
            model_dtype=self._dtype,
            takes_images=settings.enable_mm,
            variant_because="PyTorch's operations order their sums by the number of tokens of a step",
        )

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        step = self._begin(plan)
        if step is None:
            return StepResult(step=plan.step)
        drafts = self._facts.has_draft_layer and plan.drafts
        logits, sums = self._computed(step, keeps=drafts)
        result = with_vectors(self._result(plan, step, logits), self._pooling.take(plan, sums))
        if not drafts:
            return result
        return predicted(plan, step, result, self._table, self._facts.block_size, self._draft_pass)

    def _draft_pass(self, step: FlatStep, sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `predicting.RunPass`."""
        hidden = self._hidden.index_select(0, self._tensor(sources))
        # Models without a description have no draft layer.
        decoder = cast(Decoder, self._model)
        self._hidden, logits = decoder.draft(*self._inputs(step), hidden, self._tensor(step.logit_tokens))
        return logits.argmax(dim=1).cpu().numpy()

    def _result(self, plan: StepPlan, step: FlatStep, logits: Tensor | None) -> StepResult:
        """Returns the sampled tokens and the log probabilities of prompts. `logits`: see `_computed`."""
        return step_result(plan, step, logits, self._table)

    def close(self) -> None:
        """See `ModelWorker`."""
        del self._model
        self._drop_state()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def weight_memory(self) -> list[WeightMemory]:
        """See `WeighableWorker`. Weights on a device are not included."""
        return host_weights(self._model.weights)

    def _fill_slot(self, slot: int, adapter: LoadedAdapter) -> None:
        self._adapter_step.fill(slot, cast(Mapping[Place, Delta], adapter.prepared))

    def _context_token_bytes(self, num_tokens: int) -> int:
        return bytes_per_context_token(num_tokens, self._description, self._dtype)

    def _computed(self, step: FlatStep, *, keeps: bool = False) -> tuple[Tensor | None, NDArray[np.float32]]:
        """Returns the logits of `logit_tokens`, None if there are none, and the sums of hidden states of `spans`.

        `keeps`: whether to keep the hidden states of all tokens for a draft pass.
        """
        inputs = self._inputs(step)
        if keeps or len(step.spans):
            hidden, logits = self._model.hidden_and_logits(*inputs, self._tensor(step.logit_tokens))
            sums = span_sums(hidden, step.spans).cpu().numpy() if len(step.spans) else NO_SUMS
            if keeps:
                self._hidden = hidden
            return logits if len(step.logit_tokens) else None, sums
        if not len(step.logit_tokens):
            self._model.forward(*inputs)
            return None, NO_SUMS
        every = len(step.logit_tokens) == len(step.ids) and step.report is None
        return self._model.step_logits(*inputs, None if every else self._tensor(step.logit_tokens)), NO_SUMS

    def _inputs(self, step: FlatStep) -> tuple[Tensor, Tensor, StepInputs]:
        """Returns the inputs of the model's forward pass: ids, positions, and the places of keys and values."""
        self._adapter_step.begin(step.token_slots)
        positions = step.positions if step.spatial is None else step.spatial
        return self._tensor(step.ids), self._tensor(positions), self._step_inputs(step)

    def _step_inputs(self, step: FlatStep) -> StepInputs:
        starts, lens, tables = step.query_start_loc, step.seq_lens, step.block_tables
        # Layers without a window are all in the first group.
        whole = (tables[:1], None if self._description.mutual_in_windows else step.mutual)
        parts = {window: whole if window is None else (tables, step.mutual) for window in self._windows}
        attention = {
            window: plan_attention(starts, lens, own, window, self._shape, spans)
            for window, (own, spans) in parts.items()
        }
        slots = self._tensor(step.slot_mapping(self._shape.block_size))
        return StepInputs(
            slot_mapping=slots,
            attention=attention,
            key_caches=self._cache.key_caches,
            value_caches=self._cache.value_caches,
            states=step.states,
            state_caches=self._states,
            given=self._given.embeddings(step.virtual),
        )

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def load_model(
    model_dir: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    form: WeightForm = PLAIN_WEIGHTS,
    ranks: Communicator = ALONE_RANK,
    *,
    described: DecoderDescription | None = None,
    trust_remote_code: bool = False,
    adapters: AdapterStep | None = None,
) -> tuple[LanguageModel, DecoderDescription]:
    """Returns a `Decoder` if the architecture's family is known, else a model that transformers runs.

    With several ranks, the decoder and its description are those of the rank's part. `described` is the description of
    a known family's whole model, if the context is not the usual one. `trust_remote_code` allows
    transformers to run code that comes with the model. With `adapters` the decoder's layers add the LoRA products of
    the step. Raises `ServiceError`.
    """
    if not has_family(config):
        if ranks.shard.size > 1:
            raise SettingsError("--tensor-parallel-size: this architecture runs through transformers, in one process")
        if form.quantize is not None:
            raise SettingsError(f"--quantization: {form.name} does not work for models that run through transformers")
        # Imported here because the import takes seconds and most models do not need it.
        from antiphon.services.engine.backends.torch.transformers_model import load_transformers_model

        model = load_transformers_model(model_dir, config, dtype, device, trust_remote_code)
        return model, model.description
    family = find_family(config)
    description = described or served_description(EngineSettings(), config)
    with torch.inference_mode():
        layout = family.layout(description)
        weights = load_weights(model_dir, description, layout, dtype, device, form=form, ranks=ranks)
        local = local_description(description, ranks.shard)
        weights = weights if adapters is None else adapted(weights, adapters)
        return Decoder(local, weights, stage=ranks.stage), local


def scaled_slopes(description: DecoderDescription, device: torch.device, shard: Shard = ALONE) -> Tensor | None:
    """Returns the slopes of linear position biases, [kv_heads, heads / kv_heads]; None for a model without them.

    `description` is that of the rank's part of the model.
    """
    if description.alibi_scale is None:
        return None
    every = alibi_slopes(description.num_heads * shard.tp_size) * description.alibi_scale
    slopes = every.chunk(shard.tp_size)[shard.tp_rank]
    return slopes.view(description.num_kv_heads, -1).to(device)
