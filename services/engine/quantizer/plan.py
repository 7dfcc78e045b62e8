"""Selects the matrices to quantize, determines their inputs (sites), and checks that they can be split over devices.

A site is the input of one or several matrices of a layer: q, k and v have the same input. Statistics and factors belong
to sites. Called by `run` and the algorithms.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Parameter, Source
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, GatedDelta, StateSpace
from antiphon.services.engine.quantization.online import QUANTIZED_MATRICES
from antiphon.services.engine.quantizer.job import Algorithm, Job
from antiphon.services.engine.worker.loading.fused_experts import apart
from antiphon.shared.flags import SettingsError

GROUP_SIZES = (128, 64, 32)
"""Inputs of a group with 4 bits: the first that divides the inputs of every matrix is used."""
_MATRIX_DIMENSIONS = 2
_EXACT = (".router.correction", ".decay", ".decay_bias", ".skip")
_OUTER_LINEAR = "layer_inputs.in.weight"
"""The linear layer outside of layers that is not the head."""
_AWQ_PACKED = 8
"""AWQ and GPTQ pack zero points of this many outputs in a word."""
IN_GROUPS: tuple[Algorithm, ...] = ("awq", "gptq")
_ROW_PARALLEL = frozenset({"o", "mix_out", "down", "experts.down", "shared.down"})
"""Matrices that are split by inputs over devices; the others are split by outputs."""


@dataclass(frozen=True, slots=True)
class Site:
    """An input of a layer's matrices, and the norm before it, which can absorb factors; '' if there is none.

    Such a norm has no other use: everything that reads its output is in `matrices` or `plain`.
    """

    matrices: tuple[str, ...]
    norm: str = ""
    plain: tuple[str, ...] = ()
    """Matrices with the same input that are not quantized, such as a router or gates."""
    expert: int | None = None
    """Index of the expert; None: the site belongs to all experts, or the layer has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a model and their treatment."""

    description: DecoderDescription
    parameters: dict[str, Parameter]
    group_size: int
    """Inputs that share a scale; 0: all."""
    algorithm: Algorithm
    rounded: frozenset[str]
    """The tensors that are quantized, by the layout's names. Other parameters may have some of their rows: the gates of
    attention may be rows of the query projection."""

    def layer(self, index: int) -> tuple[Parameter, ...]:
        """Returns the parameters of a layer."""
        prefix = f"layers.{index}."
        return tuple(self.parameters[name] for name in self.parameters if name.startswith(prefix))

    def outer(self) -> tuple[Parameter, ...]:
        """Returns the parameters outside of layers."""
        return tuple(self.parameters[name] for name in self.parameters if not name.startswith("layers."))

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Returns the sites of a layer in the order of the forward pass. All experts read one input."""
        return *self._mixer_sites(layer), *self._mlp_sites(layer)

    def _mixer_sites(self, layer: int) -> Iterator[Site]:
        """Yields the sites of attention, or of what the layer has in its place or beside it."""
        d = self.description
        recurrent, attends = d.is_recurrent(layer), d.attends(layer)
        first = [name for name, found in (("qkv", attends), ("mix_in", recurrent)) if found]
        if d.shared_norm:
            first.append("up")
        gates = self._found(layer, "attention_gate", "mix_gate")
        yield Site(tuple(first), "" if d.residual == "post_normed" else "input_norm", gates)
        if attends and self._found(layer, "q_up"):
            yield Site(("q_up",), "q_latent_norm")
        if attends:
            yield Site(("o",))
        if recurrent:
            mixer = d.recurrent
            normed = isinstance(mixer, GatedDelta | ChannelDelta) or (
                isinstance(mixer, StateSpace) and mixer.norm != "none"
            )
            yield Site(("mix_out",), "mix_norm" if normed else "")

    def _mlp_sites(self, layer: int) -> Iterator[Site]:
        d = self.description
        norm = "" if d.residual == "post_normed" else "mlp_norm"
        if not d.has_mlp(layer):
            return
        if not d.has_experts(layer) or d.has_both(layer):
            if not d.shared_norm:
                yield Site(("up",), norm)
            yield Site(("down",))
        if d.experts is None or not d.has_experts(layer):
            return
        narrow, beside = bool(d.experts.latent_size), d.has_both(layer)
        ups = (*(() if narrow or beside else ("experts.up",)), *self._found(layer, "shared.up"))
        if ups:
            yield Site(ups, norm, self._found(layer, "router", "shared.gate", "experts.in"))
        if narrow or beside:
            yield Site(("experts.up",), "experts.norm" if beside else "")
        if d.experts.shared_intermediate_size:
            yield Site(("shared.down",))
        for expert in range(d.experts.num_experts):
            yield Site(("experts.down",), expert=expert)

    def _found(self, layer: int, *names: str) -> tuple[str, ...]:
        """Returns those of some matrices that a layer has."""
        return tuple(name for name in names if f"layers.{layer}.{name}.weight" in self.parameters)

    def watched(self, layer: int) -> tuple[Site, ...]:
        """Returns the sites of which the algorithm needs statistics.

        SmoothQuant needs no statistics of single experts. GPTQ needs those of each expert's tokens, for both of its
        matrices.
        """
        sites = self.sites(layer)
        if self.algorithm == "smooth_quant":
            return tuple(site for site in sites if site.expert is None)
        if self.algorithm != "gptq":
            return sites
        return *sites, *(Site(("experts.up",), expert=site.expert) for site in sites if site.expert is not None)

    def plain_linears(self) -> list[str]:
        """Returns the linear modules that are not quantized: the head, routers, gates, narrow projections."""
        plain = {
            source.name.removesuffix(".weight")
            for name, parameter in self.parameters.items()
            if name.endswith(".weight") and (name.startswith("layers.") or name == _OUTER_LINEAR)
            for source in parameter.sources
            if len(source.shape) == _MATRIX_DIMENSIONS and source.name not in self.rounded
        }
        head = self.parameters.get("head.weight")
        return sorted({*plain, "lm_head" if head is None else head.sources[0].name.removesuffix(".weight")})

    def kept_parts(self) -> tuple[str, ...]:
        """Returns the prefixes of tensors that are written as they are: encoders and layers that predict more tokens.

        Tensors within layers that the model does not use are left out, since their modules may be quantized, and so is
        a copy of the embedding as head.
        """
        count = self.description.num_layers
        paths = ([s.name.replace(".", "/") for p in self.layer(i) for s in p.sources] for i in range(count))
        layers = tuple(os.path.commonpath(names).replace("/", ".") + "." for names in paths)
        parts = self.description.other_parts
        return tuple(part for part in parts if not part.startswith(layers) and not part.endswith(".weight"))

    def embedding_share(self) -> float:
        """Returns the embedding's share of all weights, 0 … 1."""
        sizes = {name: sum(math.prod(s.shape) for s in p.sources) for name, p in self.parameters.items()}
        return sizes["embedding"] / sum(sizes.values())

    def other_embeddings(self) -> list[str]:
        """Returns the modules outside of layers with a matrix that is not the embedding of tokens: positions, head."""
        sources = [
            source for parameter in self.outer() if parameter.name != "embedding" for source in parameter.sources
        ]
        return [source.name.removesuffix(".weight") for source in sources if len(source.shape) == _MATRIX_DIMENSIONS]


def is_quantized(parameter: Parameter) -> bool:
    """Whether a parameter is the weight of a matrix that is quantized."""
    name = parameter.name.split(".", 2)[-1]
    return (
        parameter.name.startswith("layers.")
        and name.removesuffix(".weight") in QUANTIZED_MATRICES
        and (name.endswith(".weight"))
    )


def is_exact(parameter: Parameter) -> bool:
    """Whether a parameter keeps 32 bits: errors of corrections and of decays have large effects.

    Corrections of routers decide between scores that are close to each other. Decays multiply a state in each step.
    """
    return parameter.name.endswith(_EXACT)


def make_plan(description: DecoderDescription, layout: tuple[Parameter, ...], job: Job) -> Plan:
    """Returns the plan. Raises SettingsError naming the tensor that cannot be split, or the contradictory option."""
    d = description
    if d.streams is not None:
        raise SettingsError(
            "-i: models with several residual streams are not quantized by this tool; serve the model with "
            "--quantization=ifq, ifq_w8a8, ifq_w4a8 or ifq_nf4, which round the weights while they are loaded"
        )
    if job.multi_query and job.algorithm == "smooth_quant" and d.num_kv_heads == d.num_heads:
        raise SettingsError(
            f"--multi-query-mode: the model has {d.num_kv_heads} key heads for {d.num_heads} query heads, one for "
            "each, so it does not use multi-query attention; leave the option out"
        )
    layout = tuple(apart(parameter) or parameter for parameter in layout)
    if any(parameter.stacked for parameter in layout):
        raise SettingsError(
            f"-i: checkpoints of {d.family} have all experts of a layer in one tensor, and there is no common layout "
            "of quantized ones; use --quantization of the server, which rounds them while loading"
        )
    quantized = [(p, s) for p in layout if is_quantized(p) for s in p.sources]
    for parameter, source in quantized:
        _check_division(d.of_layer(int(parameter.name.split(".")[1])), parameter, source, job)
    size = 0
    if job.algorithm in IN_GROUPS:
        size = _group_size(quantized, job)
    rounded = frozenset(source.name for _, source in quantized)
    return Plan(
        description=d,
        parameters={parameter.name: parameter for parameter in layout},
        group_size=size,
        algorithm=job.algorithm,
        rounded=rounded,
    )


def shape_of(parameter: Parameter, source: Source) -> tuple[int, int]:
    """Returns outputs and inputs of a matrix."""
    out, width = reversed(source.shape) if parameter.transposed else source.shape
    return out, width


def matrix_name(parameter: Parameter) -> str:
    """Returns the name of a parameter within its layer without `.weight`, such as `qkv`."""
    return parameter.name.split(".", 2)[-1].removesuffix(".weight")


def _check_division(d: DecoderDescription, parameter: Parameter, source: Source, job: Job) -> None:
    """Raises SettingsError if a tensor cannot be split over devices. `d`: description of its layer."""
    degree, name = job.tensor_parallel, matrix_name(parameter)
    out, width = shape_of(parameter, source)
    # The matrices that compute latents are replicated.
    whole = d.latent is not None and name == "qkv"
    for what, count in _divided(d, name, width):
        if count % degree:
            raise SettingsError(f"-tp: {source.name} has {what}, which do not divide among {degree} devices")
    if name not in _ROW_PARALLEL and not whole and out % degree:
        raise SettingsError(f"-tp: {source.name} has {out} outputs, which do not divide among {degree} devices")
    packed = _AWQ_PACKED * (1 if name in _ROW_PARALLEL or whole else degree)
    if job.algorithm in IN_GROUPS and out % packed:
        raise SettingsError(
            f"-quant_type: {source.name} has {out} outputs, not a multiple of {packed}, as {job.algorithm} needs "
            f"with -tp {degree}; use weight_only_int8 or smooth_quant"
        )


def _divided(d: DecoderDescription, name: str, width: int) -> Iterator[tuple[str, int]]:
    """Yields what devices divide among them of a matrix with `width` inputs, and how many of it there are."""
    if name in ("qkv", "q_up", "o"):
        yield f"{d.num_heads} query heads", d.num_heads
        if d.latent is None:
            yield f"{d.num_kv_heads} key heads", d.num_kv_heads
    elif name == "mix_in" and d.recurrent is not None:
        for part in d.recurrent.in_widths:
            yield f"parts of {part} outputs", part
        yield f"{d.recurrent.num_divided} groups of heads", d.recurrent.num_divided
    elif name in _ROW_PARALLEL:
        yield f"{width} inputs", width


def _group_size(quantized: list[tuple[Parameter, Source]], job: Job) -> int:
    widths = {
        s.name: shape_of(p, s)[1] // (job.tensor_parallel if matrix_name(p) in _ROW_PARALLEL else 1)
        for p, s in quantized
    }
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in widths.values()):
            return size
    name = next(name for name, width in widths.items() if width % GROUP_SIZES[-1])
    raise SettingsError(
        f"-quant_type: {name} has {widths[name]} inputs for each of {job.tensor_parallel} devices (-tp), which do not "
        f"divide into groups of {GROUP_SIZES[-1]}, as {job.algorithm} needs; use weight_only_int8 or smooth_quant"
    )
