"""Predicts the memory of an engine for a model and settings, without loading weights or running a step.

Sizes follow from config.json and the functions with which the engine plans its memory (`budget`, `kv_cache`,
`profile`), quantizes and divides weights. Only the largest step, which an engine measures, is predicted by formula.
Weights are counted with tensors on the `meta` device, which take no memory. Called by `antiphon plan` and `antiphon
doctor`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from antiphon.services.engine.adapters.delta import slots_bytes
from antiphon.services.engine.core.paging import Paging
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Parameter
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, Recurrent
from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.parallel.shard import Shard, local_description, sharded
from antiphon.services.engine.quantization.online import online_quantizer
from antiphon.services.engine.quantization.weight import Quantize, QuantizedWeight
from antiphon.services.engine.worker.capacity.budget import (
    cpu_budget,
    device_budget,
    heap_bytes,
    kept_adapter_bytes,
    rows_bytes,
)
from antiphon.services.engine.worker.capacity.context import context_length, served_description
from antiphon.services.engine.worker.capacity.graphs import Reach, graphs_bytes
from antiphon.services.engine.worker.capacity.kv_cache import Budget, bytes_per_block, padded_heads
from antiphon.services.engine.worker.capacity.paging import paging_of, sequence_tokens
from antiphon.services.engine.worker.capacity.profile import (
    StepBounds,
    StepBytes,
    bytes_per_context_token,
    largest_step,
    make_probe,
)
from antiphon.services.engine.worker.capacity.states import running_state_bytes, snapshot_bytes_per_block
from antiphon.services.engine.worker.draft_layer import drafting_description
from antiphon.services.engine.worker.dtypes import choose_cache_dtype, choose_dtype
from antiphon.services.engine.worker.loading.model_files import read_config, weight_file_bytes
from antiphon.services.engine.worker.loading.parameters import within_layer
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.adapters import with_adapters
from antiphon.shared.settings.quantization import ROUNDS_ROWS, Device, Quantization, choose, quantization_settings

BackendName = Literal["cpp", "torch", "gpu"]
"""What computes: the C++ library or PyTorch's operations on a CPU, or Triton's kernels on a GPU."""
_WORD_BITS, _LEAST_BITS = 32, 4
"""Bits of a word of packed values, and fewest bits of a value in memory."""
CONTEXT_BYTES = 512 * 2**20
"""Device memory of the driver's context, the kernels and the libraries."""
_SAMPLING_BYTES, _DRAWING_BYTES, _REUSED_BYTES = 56, 62, 17
"""Bytes per row and vocabulary entry for sampling on a CPU, for three kinds of rows: those with penalties and
candidates; sampled ones; and those beyond the rows that are processed at once, whose memory they reuse.
"""
_CUT_ROWS = 288
"""Most rows for which the C++ library keeps gates and what they multiply, before it cuts them."""
_COUNTING_BYTES, _FIRST_BYTES = 2**20, 4 * 2**20
"""Bytes that a measurement of main memory adds to the measured value, and bytes that the first sampling adds."""
_DEVICES = {
    "cpp": Device("a CPU"),
    "torch": Device("a CPU", multiplies_quantized=False),
    "gpu": Device("a GPU", multiplies_fp8=True, multiplies_w4a8=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The memory that one rank of an engine needs, in bytes; with one device, that of the whole engine."""

    description: DecoderDescription
    """The rank's part of the model."""
    num_parameters: int
    """Number of parameters of the whole model."""
    dtype: torch.dtype
    form: str
    """The quantization of the weights, `none` for plain ones."""
    weights_bytes: int
    block_bytes: int
    step: StepBytes
    graphs_bytes: int
    rows_bytes: int
    """Main memory of all rows at the longest context."""
    adapters_bytes: int
    """On a CPU: the adapters cached in memory; on a GPU: the slots for adapters of running requests."""
    states_bytes: int
    """Recurrent states of `max_num_seqs` running sequences; their snapshots count in `block_bytes`."""
    context: int
    """Longest context in tokens."""
    paging: Paging
    step_tokens: int
    """Tokens of one sequence that a step computes at most."""
    beside_bytes: int = 0
    """What other processes of the model need in the same memory: the weights and the step of its image services."""

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in the KV cache, on average over the longest context."""
        return self.cache_bytes(self.context) / self.context

    @property
    def step_bytes(self) -> int:
        """Bytes of the largest step at the longest context, and of captured graphs."""
        return self.step.at(self.context) + self.graphs_bytes

    @property
    def main_memory_bytes(self) -> int:
        """Bytes of everything except the KV cache, on a CPU."""
        held = self.weights_bytes + self.adapters_bytes + self.rows_bytes + self.beside_bytes
        return held + self.step_bytes + heap_bytes(self.step_bytes)

    def cache_bytes(self, context: int) -> int:
        """Returns the bytes of the KV cache of one running sequence of `context` tokens."""
        return self.paging.most_blocks(context, 1) * self.block_bytes

    @property
    def least_cache_bytes(self) -> int:
        """Bytes of the KV cache with which one sequence of the longest context can be computed."""
        return self.paging.most_blocks(self.context, self.step_tokens) * self.block_bytes


def predict(settings: EngineSettings, model_dir: Path, backend: BackendName) -> Needs:
    """Returns the needs of an engine with these settings.

    Raises `ServiceError` or `SettingsError` if such an engine is impossible.
    """
    config, settings = read_config(model_dir), with_adapters(settings)
    if not has_family(config):
        raise SettingsError(
            "--model: this architecture runs through transformers, which tells what a token of the KV cache takes only "
            f"when the model is loaded; its files have {weight_file_bytes(model_dir) / 2**30:.1f} GiB of weights"
        )
    family, device = find_family(config), torch.device("cuda" if backend == "gpu" else "cpu")
    shard = Shard.of_rank(0, settings.parallel.tensor_parallel_size, settings.parallel.pipeline_parallel_size)
    if backend != "gpu" or settings.execution.cuda_backend == "torch":
        whole = drafting_description(settings, model_dir, config, shard)
    else:
        whole = served_description(settings, config)
    d, layout = local_description(whole, shard), family.layout(whole)
    dtype = choose_dtype(settings.execution.dtype, weight_dtype(config), device)
    chosen = choose(settings.execution.quantization, model_dir, config, _DEVICES[backend])
    weights = _weights(layout, whole, dtype, chosen, shard, backend)
    if chosen.method is not None:
        bits = int(quantization_settings(config).get("bits") or _LEAST_BITS)
        weights = _prepared_bytes(model_dir, dtype, layout, bits) // shard.size
    bounds, context = largest_step(settings, d, on_cpu=backend != "gpu"), context_length(settings, whole)
    reach = Reach(settings.execution.max_seq_len_to_capture, context)
    if backend == "gpu":
        weights -= _offloaded_bytes(settings, d, weights, dtype)
    # Pipeline stages compute with PyTorch's operations.
    captures = backend == "gpu" and not settings.execution.enforce_eager and shard.pp_size == 1
    captures = captures and not settings.cache.cpu_offload_gb
    cached = padded_heads(d) if backend == "cpp" else d
    cache_dtype = choose_cache_dtype(settings.cache.kv_cache_dtype, dtype)
    return Needs(
        description=d,
        num_parameters=sum(math.prod(source.shape) for parameter in layout for source in parameter.sources),
        dtype=dtype,
        form=chosen.name,
        weights_bytes=weights,
        block_bytes=bytes_per_block(cached, settings.cache.block_size, cache_dtype)
        + snapshot_bytes_per_block(cached, settings.cache.block_size, cache_dtype),
        states_bytes=running_state_bytes(d, settings.scheduler.max_num_seqs),
        step=predict_step(bounds, d, dtype, backend),
        graphs_bytes=graphs_bytes(d, bounds.num_rows, reach) if captures else 0,
        rows_bytes=rows_bytes(settings, d, context),
        adapters_bytes=_adapters_bytes(settings, d, dtype, backend),
        context=context,
        paging=paging_of(settings, d),
        step_tokens=sequence_tokens(settings, on_cpu=backend != "gpu"),
    )


def _offloaded_bytes(settings: EngineSettings, d: DecoderDescription, weights: int, dtype: torch.dtype) -> int:
    """Returns by how much weights in the host's memory make those on a GPU smaller: at most by all but three layers."""
    ends = (1 if d.tied_embeddings else 2) * d.vocab_size * d.hidden_size * dtype.itemsize
    movable = max(0, weights - ends) * max(0, d.num_layers - 3) // d.num_layers
    return min(int(settings.cache.cpu_offload_gb * 2**30), movable)


def _adapters_bytes(settings: EngineSettings, d: DecoderDescription, dtype: torch.dtype, backend: BackendName) -> int:
    """Returns the bytes of adapters on the device that computes the model."""
    if backend != "gpu" or not settings.adapters.enable_lora:
        return kept_adapter_bytes(settings, d, dtype)
    return slots_bytes(d, settings.adapters.max_loras or 0, settings.adapters.max_lora_rank, dtype.itemsize)


def gpu_room(settings: EngineSettings, needs: Needs, total_bytes: int) -> Budget:
    """Returns the bytes for the KV cache on a GPU with `total_bytes` of memory that no other model uses."""
    used = needs.weights_bytes + needs.adapters_bytes + CONTEXT_BYTES + needs.beside_bytes
    return _without_states(needs, device_budget(settings, total_bytes - used, total_bytes, needs.step_bytes))


def cpu_room(settings: EngineSettings, needs: Needs) -> Budget:
    """Returns the bytes for the KV cache in the free memory of this machine."""
    return _without_states(needs, cpu_budget(settings, needs.main_memory_bytes))


def _without_states(needs: Needs, budget: Budget) -> Budget:
    """Returns what recurrent states leave of a budget, of which they take at most half (`rows_with_states`)."""
    states = min(needs.states_bytes, max(0, budget.asked_bytes) // 2)
    return Budget(budget.asked_bytes - states, budget.most_bytes - states)


def predict_step(bounds: StepBounds, d: DecoderDescription, dtype: torch.dtype, backend: BackendName) -> StepBytes:
    """Returns the bytes of the largest step, which an engine measures (`profile.measure_step`)."""
    size, vocab = dtype.itemsize, d.vocab_size
    passing = bounds.num_tokens * _token_bytes(d, size, backend)
    if backend == "gpu":
        sampling = _SAMPLING_BYTES // 2 * vocab * bounds.num_samples
        return StepBytes(passing + sampling + 10 * vocab * bounds.num_reported, bounds.context, 0)
    probe = make_probe(bounds, d, 1, torch.device("cpu"))
    seen, measured = probe.kv.max_model_len, probe.passing.num_tokens
    per_token = 0
    if backend == "torch":
        # Attention over the context of the measured step is scaled up with its tokens.
        passing += int(seen * bytes_per_context_token(measured, d, dtype) * probe.more_tokens)
        per_token = bytes_per_context_token(bounds.num_tokens, d, dtype)
    else:
        # The C++ library writes the logits of all tokens that need logits into one buffer.
        passing += 4 * vocab * bounds.num_logits
        if d.gate_cuts:
            passing += 8 * d.intermediate_size * min(bounds.num_tokens, _CUT_ROWS)
    few, many = probe.few.num_tokens, probe.many.num_tokens
    at_once = int(probe.more_draws * few)
    drawing = int((_FIRST_BYTES + _DRAWING_BYTES * vocab * few) * probe.more_draws)
    inside, beyond = min(many, at_once) - few, many - max(few, min(many, at_once))
    more = vocab * (_SAMPLING_BYTES * inside + _REUSED_BYTES * beyond)
    each = max(probe.row_bytes_min, more // max(1, many - few), more and 2**14)
    all_rows = _COUNTING_BYTES + _SAMPLING_BYTES * vocab * few + more + each * probe.unseen_rows
    fixed = passing + drawing + all_rows + probe.reported_bytes
    return StepBytes(fixed, seen, per_token)


def _token_bytes(d: DecoderDescription, size: int, backend: BackendName) -> int:
    """Returns the bytes of activations for each token of a step. `size`: bytes of an activation."""
    heads = 2 * d.q_size + 2 * d.kv_size
    if d.recurrent is not None:
        mixing = sum(d.recurrent.in_widths) + d.recurrent.channels + _within(d.recurrent)
        heads = heads + mixing if d.attends_beside else max(heads, mixing)
    if d.latent is not None:
        # Latent attention: the queries, the queries multiplied into the latent space, the attention outputs, and their
        # values.
        heads += d.num_heads * (d.latent.query_dim + d.latent.value_dim)
    inner = (2 if d.gated_mlp else 1) * d.intermediate_size
    streams = d.streams.count * d.hidden_size if d.streams else 0
    if d.experts is not None:
        e = d.experts
        width = e.latent_size or d.hidden_size
        chosen = e.num_per_token * (2 * width + 3 * e.intermediate_size) + 2 * (
            e.shared_intermediate_size + e.latent_size
        )
        inner = max(chosen, inner if len(e.layers) < d.num_layers else 0)
    if backend == "cpp":
        # Sums are kept in 32 bits beside the activations.
        return size * (8 * d.hidden_size + heads + inner) + (4 - size) * (2 * d.hidden_size + inner) + 4 * streams
    return size * (4 * d.hidden_size + heads + 3 * inner + 2 * streams)


def _within(shape: Recurrent) -> int:
    """Returns the numbers of a token that products within a mixer read and give."""
    if isinstance(shape, ChannelSpace):
        return 2 * shape.channels + shape.step_rank + sum(shape.select_widths)
    if isinstance(shape, ChannelDelta):
        return 2 * shape.rank + sum(shape.in_widths[1:])
    return 0


def _weights(
    layout: Iterable[Parameter],
    d: DecoderDescription,
    dtype: torch.dtype,
    chosen: Quantization,
    shard: Shard,
    backend: BackendName,
) -> int:
    """Returns the bytes of a rank's part of the weights, if the checkpoint is not quantized."""
    quantize = None if chosen.online is None else online_quantizer(chosen.online)
    layers, known, total = shard.layers(d.num_layers), dict[object, int](), 0
    for parameter in layout:
        name = parameter.name
        if name.startswith("layers.") and int(name.split(".")[1]) not in layers:
            continue
        shapes = tuple(source.shape for source in parameter.sources)
        key = within_layer(name), shapes
        if key not in known:
            # The Triton kernels multiply no experts whose rows are rounded too.
            plain = backend == "gpu" and "experts." in name and chosen.online in ROUNDS_ROWS
            known[key] = _parameter_bytes(parameter, d, dtype, None if plain else quantize, shard)
        total += known[key]
    if d.tied_embeddings and d.has_head and quantize is not None:
        # A quantized head is a second matrix, beside the embedding with which it is tied.
        with torch.device("meta"):
            head = quantize("head", torch.empty(d.vocab_size, d.hidden_size, dtype=dtype))
        total += head.nbytes if isinstance(head, QuantizedWeight) else 0
    return total


def _parameter_bytes(
    parameter: Parameter, d: DecoderDescription, dtype: torch.dtype, quantize: Quantize | None, shard: Shard
) -> int:
    shapes = [source.shape for source in parameter.sources]
    if not parameter.name.endswith(".weight") or len(shapes[0]) != 2:
        return sum(map(math.prod, shapes)) * dtype.itemsize
    columns = shapes[0][0 if parameter.transposed else 1]
    name = within_layer(parameter.name.removesuffix(".weight"))
    with torch.device("meta"):
        weight = torch.empty(sum(map(math.prod, shapes)) // columns, columns, dtype=dtype)
        return sharded(name, weight if quantize is None else quantize(name, weight), d, shard).nbytes


def _prepared_bytes(model_dir: Path, dtype: torch.dtype, layout: Iterable[Parameter], bits: int) -> int:
    """Returns the bytes in memory of a prepared checkpoint's weights (one that was quantized beforehand).

    Its scales and zero points become float32. A value of GPTQ has `bits` bits in the files and at least four in memory.
    The matrices that compute keys and values from latents are dequantized.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files and not weight_file_bytes(model_dir):
        raise SettingsError(f"--model: {model_dir} has no weights, and prepared ones are counted in their files")
    if not files:
        return weight_file_bytes(model_dir)
    sources = [source for p in layout if p.name.endswith(".latent_up.weight") for source in p.sources]
    made_plain = tuple(source.name.removesuffix("weight") for source in sources)
    stored = {name: entry for file in files for name, entry in _header(file).items() if not name.startswith(made_plain)}
    kept = sum(_tensor_bytes(name, entry, dtype, bits) for name, entry in stored.items())
    return kept + sum(math.prod(source.shape) for source in sources) * dtype.itemsize


def _tensor_bytes(name: str, entry: Mapping[str, Any], dtype: torch.dtype, bits: int) -> int:
    first, end = entry["data_offsets"]
    numbers = math.prod(entry["shape"])
    if name.endswith(("scales", "weight_scale", "weight_scale_inv", "absmax")):
        return 4 * numbers
    if name.endswith("zeros"):
        return 4 * _WORD_BITS * numbers // bits
    if name.endswith("qweight") and bits < _LEAST_BITS:
        return (end - first) * _LEAST_BITS // bits
    plain = entry["dtype"] in ("F32", "F16", "BF16")
    return numbers * dtype.itemsize if plain else end - first


def _header(path: Path) -> dict[str, Any]:
    """Returns the tensors that a safetensors file lists. Raises SettingsError for a damaged file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            tensors: dict[str, Any] = json.loads(file.read(size))
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise SettingsError(f"--model: {path} is not a safetensors file: {error}") from error
    return {name: entry for name, entry in tensors.items() if name != "__metadata__"}
