"""The worker of models that compute a text in one step (`whole_text_model`): encoders and classifiers, with PyTorch.

A sequence is computed in the step that reaches its end. There is no KV cache: the scheduler's blocks are only used to
count tokens, and there are enough blocks for all rows. Called by the step loop, from one thread.
"""

import logging
from pathlib import Path

import torch

from antiphon.services.engine.backends.torch.weight_memory import host_weights
from antiphon.services.engine.backends.torch.whole_text.kinds import COMPUTES_WHOLE, batches
from antiphon.services.engine.backends.torch.whole_text.model import Text, WholeTextModel, load_whole_text_model
from antiphon.services.engine.core.plan import EngineFacts, NewSequence, StepPlan, StepResult, default_batched_tokens
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm, weight_form
from antiphon.services.engine.worker.batch.pooling import finished, pooling_kind
from antiphon.services.engine.worker.capacity.context import context_within
from antiphon.services.engine.worker.capacity.memory import HeapGuard
from antiphon.services.engine.worker.configuration import configuration_hash, content_hash, torch_backend
from antiphon.services.engine.worker.dtypes import choose_torch_dtype
from antiphon.services.engine.worker.extras import serves_adapters
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.services.engine.worker.loading.model_files import read_config, useful_threads
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.pooling import PoolingKind

logger = logging.getLogger(__name__)
HEAP_BYTES = 256 * 2**20
"""Maximum freed memory that the heap may keep."""


class WholeTextWorker:
    """A `ModelWorker` that computes vectors or labels and does not generate."""

    def __init__(self, settings: EngineSettings, model_dir: Path, device: torch.device) -> None:
        """Loads the model. Raises `ServiceError` or `SettingsError` for a model or settings that cannot work."""
        config = read_config(model_dir)
        check_settings(settings, weight_form(settings, model_dir, config, device, native=False))
        if device.type == "cpu":
            torch.set_num_threads(settings.execution.threads or useful_threads(model_dir))
        dtype = choose_torch_dtype(settings.execution.dtype, weight_dtype(config), device, model_dir)
        self._model = load_whole_text_model(model_dir, config, dtype, device, settings.trust_remote_code)
        self._facts = _facts(settings, model_dir, self._model, dtype, device)
        self._rows: dict[int, NewSequence] = {}
        self._heap_guard = HeapGuard(HEAP_BYTES) if device.type == "cpu" else None
        logger.info(
            "this model computes texts as a whole and keeps no KV: options of the KV cache, of prefix caching and of "
            "chunked prefill change nothing"
        )

    def facts(self) -> EngineFacts:
        """See `ModelWorker`."""
        return self._facts

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelWorker`."""
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for sequence in plan.new:
            self._rows[sequence.row] = sequence
        ending = [self._rows[share.row] for share in plan.scheduled if share.pools]
        result = StepResult(step=plan.step, vectors=tuple(self._vectors(ending)) if ending else ())
        if self._heap_guard is not None:
            self._heap_guard.after_step()
        return result

    def close(self) -> None:
        """See `ModelWorker`."""
        del self._model

    def weight_memory(self) -> list[WeightMemory]:
        """See `WeighableWorker`. Weights on a device are not included."""
        return host_weights(self._model.module)

    @torch.inference_mode()
    def _vectors(self, sequences: list[NewSequence]) -> list[bytes]:
        found = [b""] * len(sequences)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        together = batches(lengths) if self._model.takes_batches else [[index] for index in range(len(sequences))]
        compute = self._classified if self._model.labels else self._embedded
        for indices in together:
            some = [sequences[index] for index in indices]
            for index, vector in zip(indices, compute(some), strict=True):
                found[index] = vector
        return found

    def _classified(self, sequences: list[NewSequence]) -> list[bytes]:
        params = [sequence.pooling for sequence in sequences]
        activate = [each is None or each.activate for each in params]
        found = self._model.logits(_texts(sequences), activate=activate).cpu().numpy().astype("<f4")
        return [row.tobytes() for row in found]

    def _embedded(self, sequences: list[NewSequence]) -> list[bytes]:
        hidden = self._model.hidden_states(_texts(sequences))
        sums = torch.stack([_total(hidden[row], len(one.token_ids), _kind(one)) for row, one in enumerate(sequences)])
        vectors: list[bytes] = []
        for sequence, total in zip(sequences, sums.cpu().numpy(), strict=True):
            assert sequence.pooling is not None
            vectors.append(finished(total, len(sequence.token_ids), sequence.pooling).tobytes())
        return vectors


def check_settings(settings: EngineSettings, form: WeightForm) -> None:
    """Raises `SettingsError` for options that models of this kind do not support."""
    refused = {
        "--quantization": form.quantize is not None or form.method is not None,
        "--enable-lora, --enable-prompt-adapter": serves_adapters(settings),
        "--enable-mm": settings.enable_mm,
    }
    for option in refused:
        if refused[option]:
            raise SettingsError(
                f"{option}: this model computes texts as a whole (an encoder or a classifier), through transformers, "
                "where the option has no meaning; leave it out"
            )


def _texts(sequences: list[NewSequence]) -> list[Text]:
    numbers = [0 if one.pooling is None else one.pooling.num_first_tokens for one in sequences]
    return [Text(one.token_ids, number) for one, number in zip(sequences, numbers, strict=True)]


def _kind(sequence: NewSequence) -> PoolingKind:
    assert sequence.pooling is not None
    assert sequence.pooling.kind is not None, "the core sets the kind"
    return sequence.pooling.kind


def _total(hidden: torch.Tensor, length: int, kind: PoolingKind) -> torch.Tensor:
    """Returns the sum [hidden] float64 of the hidden states [tokens, hidden] that make up a vector of this kind."""
    span = {"mean": slice(0, length), "cls": slice(0, 1), "last": slice(length - 1, length)}[kind]
    return hidden[span].sum(0, dtype=torch.float64)


def _facts(
    settings: EngineSettings, model_dir: Path, model: WholeTextModel, dtype: torch.dtype, device: torch.device
) -> EngineFacts:
    context = context_within(settings, model.max_positions)
    return EngineFacts(
        num_blocks=settings.scheduler.max_num_seqs * -(-context // settings.cache.block_size),
        block_size=settings.cache.block_size,
        max_model_len=context,
        vocab_size=model.vocab_size,
        step_tokens=default_batched_tokens(device.type == "cpu", settings.scheduler.max_num_seqs),
        computes_on_host=device.type == "cpu",
        configuration=configuration_hash(model_dir, f"whole {torch_backend(device)}", dtype, dtype),
        content=content_hash(model_dir, PLAIN_WEIGHTS.name, dtype),
        embedding_size=0 if model.labels else model.hidden_size,
        pooling_kind="cls" if model.labels else pooling_kind(model_dir, "cls"),
        generates=False,
        labels=model.labels,
        computes_whole=COMPUTES_WHOLE,
        variant_because="PyTorch's operations order their sums by the number of tokens of a step",
    )
