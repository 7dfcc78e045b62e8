"""Quantizes a model layer by layer, and measures the loss of quality. Called by `antiphon quantize`.

    for each layer: read it, run the calibration tokens through it, round it, write its shard; then run the held-out
    tokens through the original layer and through the rounded one

A finished shard of an interrupted run is read instead of computed, so the result is the same.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from antiphon.services.engine.models.layout import Parameter, ignored_names
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.quantization.formats import prepared
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.quantizer.algorithms import (
    ENOUGH_TOKENS,
    awq_layer,
    gptq_layer,
    round_layer,
    seldom_chosen,
    smooth_layer,
)
from antiphon.services.engine.quantizer.grid import int8
from antiphon.services.engine.quantizer.job import DTYPES, LARGE_EMBEDDING, Job, default_strength
from antiphon.services.engine.quantizer.layer import Layer, Statistics, Stream
from antiphon.services.engine.quantizer.layouts import quantization_config, stored
from antiphon.services.engine.quantizer.outer import OuterParts
from antiphon.services.engine.quantizer.output import Output, converted
from antiphon.services.engine.quantizer.plan import Plan, Site, is_exact, make_plan
from antiphon.services.engine.quantizer.scaling import LayerTensors
from antiphon.services.engine.quantizer.text import batches_of_file, calibration_batches, held_out_batches
from antiphon.services.engine.worker.loading.checkpoint import Checkpoint
from antiphon.services.engine.worker.loading.model_files import read_config, useful_threads
from antiphon.services.engine.worker.loading.weight_files import weight_files
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import Method, prepared_method

Batches = list[Tensor]
Tell = Callable[[str], None]
_MATRIX = 2
"""Dimensions of a matrix."""
_METHODS: dict[str, Method] = {
    "weight_only_int8": "compressed-tensors",
    "smooth_quant": "compressed-tensors",
    "awq": "awq",
    "gptq": "gptq",
}


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of a job."""

    bytes_before: int
    bytes_after: int = 0
    perplexity_before: float | None = None
    """Perplexity of the original model on held-out text; None if the model has no output head or no tokenizer."""
    perplexity_after: float | None = None
    errors: list[float] = field(default_factory=list)
    """For each layer, the size of the change of its output relative to what the layer adds to its input."""


def quantize(job: Job, tell: Tell) -> Report:
    """Writes the quantized model. `tell` is called with notices for the user.

    Raises SettingsError for options that do not fit the model, and ServiceError for a model that cannot be read.
    """
    config = read_config(job.model)
    if prepared_method(config) is not None:
        raise SettingsError(f"-i: the weights of {job.model} are quantized already; name the original model")
    family = find_family(config)
    description = family.describe(config)
    description = description.for_context(description.usual_positions)
    plan = make_plan(description, family.layout(description), job)
    job = replace(job, rounds_embedding=_rounds_embedding(job, plan, tell))
    torch.set_num_threads(useful_threads(job.model))
    with torch.inference_mode():
        return _Run(job, plan, config, tell).run()


def _rounds_embedding(job: Job, plan: Plan, tell: Tell) -> bool:
    if job.algorithm != "weight_only_int8":
        return False
    if job.rounds_embedding is not None:
        return job.rounds_embedding
    share = plan.embedding_share()
    if share > LARGE_EMBEDDING:
        tell(
            f"the embedding is {share:.0%} of the weights and gets 8 bits too, which not all other packages read; "
            "--no-round-embedding keeps its type"
        )
    return share > LARGE_EMBEDDING


class _Run:
    def __init__(self, job: Job, plan: Plan, config: Mapping[str, Any], tell: Tell) -> None:
        self._job, self._plan, self._config = job, plan, config
        self._dtype = getattr(torch, DTYPES[job.dtype])
        self._method: PreparedMethod = prepared(_METHODS[job.algorithm], {"quantization_config": self._settings()})
        self._strength = self._chosen_strength(tell)
        self._calibration: Batches = []
        if job.algorithm != "weight_only_int8":
            given = job.token_file
            d = plan.description
            self._calibration = calibration_batches(job.model, d) if given is None else batches_of_file(given, d)
        self._held_out = self._held_out_ids(tell)
        self._tell, self._seldom_chosen = tell, 0

    def run(self) -> Report:
        job, plan = self._job, self._plan
        files = weight_files(job.model)
        with Checkpoint(job.model) as checkpoint:
            checkpoint.check(plan.parameters.values(), ignored_names(plan.description))
            output = Output(job, files, plan.description.num_layers + 1)
            report = Report(bytes_before=sum(path.stat().st_size for path in files))
            others = checkpoint.others(plan.kept_parts())
            self._layers(checkpoint, output, report, others)
        if self._seldom_chosen:
            self._tell(
                f"{self._seldom_chosen} experts of all layers read fewer than {ENOUGH_TOKENS} calibration tokens and "
                "were rounded without statistics of their own; -token names a file with more text"
            )
        record = self._record(report)
        report.bytes_after = output.finish(
            job.model, self._new_config(others), record, one_file=job.algorithm == "smooth_quant"
        )
        return report

    def _layers(self, checkpoint: Checkpoint, output: Output, report: Report, others: Mapping[str, Tensor]) -> None:
        job, plan = self._job, self._plan
        sources = [source for parameter in plan.outer() for source in parameter.sources]
        before = {source.name: checkpoint.stored(source) for source in sources}
        if output.load(0) is None:
            kept = {name: converted(name, tensor, job) for name, tensor in others.items()}
            output.save(0, self._outer(before) | kept)
        written = output.load(0)
        assert written is not None
        was = OuterParts(plan, {source: tensor for source, (_, tensor) in before.items()})
        becomes = OuterParts(plan, {source: self._plain(written, name) for source, (name, _) in before.items()})
        plain, quantized, calibration = (
            was.embed(self._held_out),
            becomes.embed(self._held_out),
            was.embed(self._calibration),
        )
        for index in tqdm(range(plan.description.num_layers), desc="Quantized layers", dynamic_ncols=True):
            original, names = self._read(checkpoint, plan.layer(index))
            layer = Layer(plan, index, original, None)
            tensors = output.load(index + 1)
            after, sites = self._calibrated(layer, calibration, needed=tensors is None)
            plain_after = layer(plain)
            del layer
            if tensors is None:
                tensors = self._made(index, original, names, sites)
                output.save(index + 1, tensors)
            new = Layer(plan, index, tensors, self._method)
            if plain.hidden:
                report.errors.append(_relative(new(plain), plain_after, plain))
            plain, quantized = plain_after, new(quantized)
            # GPTQ compensates for the errors of earlier layers; the other algorithms use the original model's hidden
            # states.
            calibration = new(calibration) if job.algorithm == "gptq" else after
        if self._held_out and plan.description.has_head:
            report.perplexity_before = was.perplexity(plain)
            report.perplexity_after = becomes.perplexity(quantized)

    def _outer(self, tensors: Mapping[str, tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the tensors outside of layers in their stored form; `tensors`: by the layout's names."""
        job, result = self._job, dict[str, Tensor]()
        rounded = self._plan.parameters["embedding"].sources[0].name if job.rounds_embedding else ""
        for source, (name, tensor) in tensors.items():
            if source == rounded:
                result |= stored(job.algorithm, name.removesuffix(".weight"), int8(tensor.float(), self._dtype))
            else:
                result[name] = converted(name, tensor, job)
        return result

    def _plain(self, written: Mapping[str, Tensor], name: str) -> Tensor:
        """Returns a tensor outside of layers from its stored form."""
        if name in written:
            return written[name]
        module = name.removesuffix(".weight")
        parts = {part: written[stored] for part, stored in self._method.parts(module, written.__contains__).items()}
        weight = self._method.weight(parts, tuple(parts["weight_shape"].tolist()))
        return weight.dequantized().to(self._dtype) if isinstance(weight, QuantizedWeight) else weight

    def _calibrated(
        self, layer: Layer, calibration: Stream, *, needed: bool
    ) -> tuple[Stream, Mapping[Site, Statistics]]:
        """Returns the calibration states after a layer, and the statistics of its sites if needed."""
        if not calibration.hidden:
            return calibration, {}
        if not needed:
            return (calibration if self._job.algorithm == "gptq" else layer(calibration)), {}
        after, sites = layer.watched(calibration)
        if not all(bool(site.products.isfinite().all()) for site in sites.values()):
            raise SettingsError("-i: the model computes values that are not finite; it cannot be calibrated")
        return after, sites

    def _read(
        self, checkpoint: Checkpoint, parameters: tuple[Parameter, ...]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the tensors of parameters (float32) by their names in the files, and these names by layout name."""
        tensors: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        for parameter in parameters:
            for source in parameter.sources:
                if source.name not in names:
                    name, tensor = checkpoint.stored(source)
                    names[source.name] = name
                    tensors[name] = tensor.to(torch.float32, copy=True)
        return tensors, names

    def _made(
        self, index: int, tensors: dict[str, Tensor], names: dict[str, str], sites: Mapping[Site, Statistics]
    ) -> dict[str, Tensor]:
        """Returns a layer's tensors in their stored form. Changes `tensors`."""
        job = self._job
        layer = LayerTensors(self._plan, index, tensors, names, self._dtype)
        if job.algorithm == "weight_only_int8":
            matrices = round_layer(layer, self._dtype)
        elif job.algorithm == "smooth_quant":
            matrices = smooth_layer(layer, sites, self._dtype, self._strength)
        else:
            self._seldom_chosen += seldom_chosen(sites, self._plan, index)
            if job.algorithm == "awq":
                matrices = awq_layer(layer, sites, self._dtype)
            else:
                matrices = gptq_layer(layer, sites, self._dtype, activation_order=job.activation_order)
        result: dict[str, Tensor] = {}
        for name, matrix in matrices:
            result |= stored(job.algorithm, name.removesuffix(".weight"), matrix)
        for parameter in self._plan.layer(index):
            for name in (names[source.name] for source in parameter.sources if source.name not in self._plan.rounded):
                result[name] = converted(name, tensors[name], job, exact=is_exact(parameter))
        return result

    def _chosen_strength(self, tell: Tell) -> float:
        job, d = self._job, self._plan.description
        chosen = job.strength
        if chosen is None:
            chosen = default_strength(str(self._config.get("model_type", "")), d.num_layers)
            if job.algorithm == "smooth_quant":
                tell(f"-sq: {chosen:g}, the default for this model")
        return chosen

    def _held_out_ids(self, tell: Tell) -> Batches:
        try:
            return held_out_batches(self._job.model, self._plan.description)
        except SettingsError as error:
            tell(f"the result is not measured: {error}")
            return []

    def _settings(self, others: Iterable[str] = ()) -> dict[str, Any]:
        """Returns `quantization_config`. `others`: modules of the model's other parts."""
        job = self._job
        return quantization_config(
            job.algorithm,
            self._plan,
            activation_order=job.activation_order,
            rounds_embedding=bool(job.rounds_embedding),
            others=others,
        )

    def _new_config(self, others: Mapping[str, Tensor]) -> dict[str, Any]:
        name = DTYPES[self._job.dtype]
        kept = {key: value for key, value in self._config.items() if key not in ("dtype", "torch_dtype")}
        key = "dtype" if "dtype" in self._config else "torch_dtype"
        matrices = (name for name, tensor in others.items() if name.endswith(".weight") and tensor.dim() == _MATRIX)
        settings = self._settings(name.removesuffix(".weight") for name in matrices)
        return {**kept, key: name, "quantization_config": settings}

    def _record(self, report: Report) -> dict[str, Any]:
        """Returns the contents of the file `RECORD`, which depend on the model and the options only."""
        job = self._job
        return {
            "quant_type": job.algorithm,
            "tp": job.tensor_parallel,
            "t": job.dtype,
            "sq": self._strength if job.algorithm == "smooth_quant" else None,
            "desc_act": job.activation_order if job.algorithm == "gptq" else None,
            "group_size": self._plan.group_size or None,
            "calibration_tokens": sum(ids.numel() for ids in self._calibration),
            "perplexity": {"before": report.perplexity_before, "after": report.perplexity_after},
            "relative_output_errors": report.errors,
        }


def _relative(after: Stream, before: Stream, inputs: Stream) -> float:
    """Returns |after - before| / |before - inputs| over all batches."""
    changed, added = (_distance(*pair) for pair in ((after, before), (before, inputs)))
    return (changed / added) ** 0.5 if added else 0.0


def _distance(one: Stream, other: Stream) -> float:
    """Returns the sum of the squared differences of hidden states."""
    pairs = zip(one.hidden, other.hidden, strict=True)
    return sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs)
