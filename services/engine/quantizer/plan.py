"""Selects the matrices to quantize, determines their inputs (sites), and checks that they can be split over devices.

A site is the input of one or several matrices of a layer: q, k and v have the same input. Statistics and factors belong
to sites. Called by `run` and the algorithms.
"""

import math
from dataclasses import dataclass

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Parameter, Source
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace
from antiphon.services.engine.quantization.online import QUANTIZED_MATRICES
from antiphon.services.engine.quantizer.job import Algorithm, Job
from antiphon.shared.flags import SettingsError

GROUP_SIZES = (128, 64, 32)
"""Inputs of a group with 4 bits: the first that divides the inputs of every matrix is used."""
_MATRIX_DIMENSIONS = 2
_AWQ_PACKED = 8
"""AWQ and GPTQ pack zero points of this many outputs in a word."""
IN_GROUPS: tuple[Algorithm, ...] = ("awq", "gptq")
_ROW_PARALLEL = frozenset({"o", "mix_out", "down", "experts.down", "shared.down"})
"""Matrices that are split by inputs over devices; the others are split by outputs."""


@dataclass(frozen=True, slots=True)
class Site:
    """An input of a layer's matrices, and the norm before it, which can absorb factors; '' if there is none."""

    matrices: tuple[str, ...]
    norm: str = ""
    plain: tuple[str, ...] = ()
    """Matrices with the same input that are not quantized: the router and the gate of the shared expert."""
    expert: int | None = None
    """Index of the expert; None: the site belongs to all experts, or the layer has none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a model and their treatment."""

    description: DecoderDescription
    parameters: dict[str, Parameter]
    group_size: int
    """Inputs that share a scale; 0: all."""
    algorithm: Algorithm

    def layer(self, index: int) -> tuple[Parameter, ...]:
        """Returns the parameters of a layer."""
        prefix = f"layers.{index}."
        return tuple(self.parameters[name] for name in self.parameters if name.startswith(prefix))

    def outer(self) -> tuple[Parameter, ...]:
        """Returns the parameters outside of layers."""
        return tuple(self.parameters[name] for name in self.parameters if not name.startswith("layers."))

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Returns the sites of a layer in the order of the forward pass. All experts read one input."""
        first, last = ("mix_in", "mix_out") if self.description.is_recurrent(layer) else ("qkv", "o")
        if self.description.residual == "post_normed":
            return Site((first,)), Site((last,)), Site(("up",)), Site(("down",))
        experts = self.description.experts
        if experts is not None and self.description.has_experts(layer):
            shared = bool(experts.shared_intermediate_size)
            ups = ("experts.up", "shared.up") if shared else ("experts.up",)
            plain = ("router", "shared.gate") if shared and experts.shared_gate else ("router",)
            downs = tuple(Site(("experts.down",), expert=expert) for expert in range(experts.num_experts))
            after = (Site(("shared.down",)), *downs) if shared else downs
            return Site((first,), "input_norm"), Site((last,)), Site(ups, "mlp_norm", plain), *after
        if self.description.shared_norm:
            return Site((first, "up"), "input_norm"), Site((last,)), Site(("down",))
        return Site((first,), "input_norm"), Site((last,)), Site(("up",), "mlp_norm"), Site(("down",))

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
        """Returns the linear modules that are not quantized: the head, routers and gates of shared experts."""
        plain = [p for name, p in self.parameters.items() if name.endswith((".router.weight", ".shared.gate.weight"))]
        names = [source.name.removesuffix(".weight") for parameter in plain for source in parameter.sources]
        head = self.parameters.get("head.weight")
        return sorted([*names, "lm_head" if head is None else head.sources[0].name.removesuffix(".weight")])

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


def make_plan(description: DecoderDescription, layout: tuple[Parameter, ...], job: Job) -> Plan:
    """Returns the plan. Raises SettingsError naming the tensor that cannot be split, or the contradictory option."""
    d = description
    if d.latent is not None:
        raise SettingsError(
            "-i: the weights of latent attention are not quantized by this tool; serve the model with "
            "--quantization=ifq, ifq_w8a8, ifq_w4a8 or ifq_nf4, which round them while they are loaded"
        )
    if isinstance(d.recurrent, GatedDelta | ChannelDelta):
        raise SettingsError(
            "-i: the weights of linear attention by the delta rule are not quantized by this tool; serve the "
            "model with --quantization=ifq, ifq_w8a8, ifq_w4a8 or ifq_nf4, which round them while they are loaded"
        )
    if d.layer_heads or d.layer_kv_heads:
        raise SettingsError(
            "-i: the layers of this model have different heads or share keys, which this tool does not quantize; serve "
            "the model with --quantization=ifq, ifq_w8a8, ifq_w4a8 or ifq_nf4, which round them while they are loaded"
        )
    if isinstance(d.recurrent, StateSpace | ChannelSpace):
        raise SettingsError(
            "-i: the weights of state spaces are not quantized by this tool; serve the model with --quantization=ifq, "
            "ifq_w8a8, ifq_w4a8 or ifq_nf4, which round them while they are loaded"
        )
    if job.multi_query and job.algorithm == "smooth_quant" and d.num_kv_heads == d.num_heads:
        raise SettingsError(
            f"--multi-query-mode: the model has {d.num_kv_heads} key heads for {d.num_heads} query heads, one for "
            "each, so it does not use multi-query attention; leave the option out"
        )
    if any(parameter.stacked for parameter in layout):
        raise SettingsError(
            f"--model: checkpoints of {d.family} have all experts of a layer in one tensor, and no layout for "
            "quantized weights does; use --quantization of the server, which rounds them while loading"
        )
    quantized = [(p, s) for p in layout if is_quantized(p) for s in p.sources]
    for parameter, source in quantized:
        _check_division(d, parameter, source, job)
    size = 0
    if job.algorithm in IN_GROUPS:
        size = _group_size(quantized, job)
    return Plan(d, {parameter.name: parameter for parameter in layout}, size, job.algorithm)


def shape_of(parameter: Parameter, source: Source) -> tuple[int, int]:
    """Returns outputs and inputs of a matrix."""
    out, width = reversed(source.shape) if parameter.transposed else source.shape
    return out, width


def matrix_name(parameter: Parameter) -> str:
    """Returns the name of a parameter within its layer without `.weight`, such as `qkv`."""
    return parameter.name.split(".", 2)[-1].removesuffix(".weight")


def _check_division(d: DecoderDescription, parameter: Parameter, source: Source, job: Job) -> None:
    degree, name = job.tensor_parallel, matrix_name(parameter)
    out, width = shape_of(parameter, source)
    if name in ("qkv", "o"):
        for what, heads in (("query heads", d.num_heads), ("key heads", d.num_kv_heads)):
            if heads % degree:
                raise SettingsError(
                    f"-tp: {source.name} has {heads} {what}, which do not divide among {degree} devices"
                )
    elif name == "mix_in" and d.recurrent is not None:
        for part in d.recurrent.in_widths:
            if part % degree:
                raise SettingsError(
                    f"-tp: {source.name} has parts of {part} outputs, which do not divide among {degree} devices"
                )
    elif name in _ROW_PARALLEL and width % degree:
        raise SettingsError(f"-tp: {source.name} has {width} inputs, which do not divide among {degree} devices")
    if name not in _ROW_PARALLEL and out % degree:
        raise SettingsError(f"-tp: {source.name} has {out} outputs, which do not divide among {degree} devices")
    packed = _AWQ_PACKED * (1 if name in _ROW_PARALLEL else degree)
    if job.algorithm in IN_GROUPS and out % packed:
        raise SettingsError(
            f"-quant_type: {source.name} has {out} outputs, not a multiple of {packed}, as {job.algorithm} needs "
            f"with -tp {degree}; use weight_only_int8 or smooth_quant"
        )


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
