"""Moves factors between a matrix's inputs and the preceding operation, without changing the layer's result.

The inputs of a site are divided by a factor for each channel, and the columns of its matrices multiplied by the same
factor. The division is absorbed by the norm before the site, by the value projection or the one that computes values
from latents (before `o`), by the gate of a short convolution's output (before `mix_out`), by the up projection of a
gated MLP or of an expert (before `down`), or by the projection to the experts' inputs, if these are narrower than the
hidden states. Where heads share what absorbs, they share the mean of their factors. Called by smooth_quant and awq.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from antiphon.services.engine.models.layout import Parameter, Source
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, GatedDelta, ShortConvolution
from antiphon.services.engine.quantizer.layer import Statistics
from antiphon.services.engine.quantizer.plan import Plan, Site, matrix_name, shape_of

_SEPARATE = 3
"""Number of tensors of a projection that is stored as query, key and value."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a matrix, as many as there are factors: its name, the index of its tensor, and which rows of it."""

    matrix: str
    place: int
    rows: "slice | Tensor | EllipsisType" = ...


class LayerTensors:
    """The tensors of one layer by their names in the checkpoint, float32; matrices can be read and changed."""

    def __init__(self, plan: Plan, index: int, tensors: dict[str, Tensor], names: dict[str, str], dtype: torch.dtype):
        """`names`: a source's name in the layout → its name in the checkpoint; `dtype`: that of stored tensors."""
        self.plan, self.index, self.tensors = plan, index, tensors
        self._names, self._dtype, self._own = names, dtype, plan.description.of_layer(index)
        prefix = f"layers.{index}."
        self.parameters = {p.name.removeprefix(prefix): p for p in plan.layer(index)}

    def name(self, source: str) -> str:
        """Returns the name that a tensor of the layout has in the checkpoint."""
        return self._names[source]

    def matrices(self, site: Site) -> dict[str, Tensor]:
        """Returns the matrices [out, in] that read a site, by their names in the checkpoint."""
        return {
            self.name(source.name): self._read(parameter, self.name(source.name))
            for parameter, source in self._sources(site)
        }

    def divide_inputs(self, site: Site, factors: Tensor) -> Tensor | None:
        """Divides the inputs of a site's matrices by `factors` [in] and multiplies their columns.

        Returns the effective factors, after the absorbing weights were rounded to the stored type; None if nothing can
        absorb them.
        """
        before = self._rows_before(site)
        factors = self.shared(site, factors)
        if site.norm:
            factors = self._divide_norm(site, factors)
        elif before is not None:
            self._divide_rows(before, self._of_sharers(site, factors)[:, 0].flatten())
        else:
            return None
        # A tensor may have rows of several matrices.
        read = (*self._sources(site), *self._sources(Site(site.plain)))
        for name, transposed in {self.name(source.name): parameter.transposed for parameter, source in read}.items():
            self.tensors[name] *= factors[:, None] if transposed else factors
        return factors

    def can_divide(self, site: Site) -> bool:
        """Whether an operation before a site can absorb factors."""
        return bool(site.norm) or self._rows_before(site) is not None

    def shared(self, site: Site, factors: Tensor) -> Tensor:
        """Returns the factors [in] that can be absorbed: heads that share what absorbs them share their mean."""
        heads = self._of_sharers(site, factors)
        return heads.mean(dim=1, keepdim=True).expand_as(heads).flatten()

    def _of_sharers(self, site: Site, factors: Tensor) -> Tensor:
        """Returns factors [in] as [groups, heads that share, channels of a head]."""
        d, mixer = self._own, self._own.recurrent
        if site.matrices == ("o",) and d.latent is None:
            return factors.view(d.num_kv_heads, -1, d.head_dim)
        if site.matrices == ("mix_out",) and isinstance(mixer, GatedDelta | ChannelDelta):
            return factors.view(1, -1, mixer.value_dim)
        return factors.view(1, 1, -1)

    def _sources(self, site: Site) -> Iterator[tuple[Parameter, Source]]:
        """Yields the tensors of a site's matrices, each with its parameter."""
        for name in site.matrices:
            parameter = self.parameters[f"{name}.weight"]
            for source in sources_of(self.plan, parameter, site.expert):
                yield parameter, source

    def _rows_before(self, site: Site) -> "_Rows | None":
        """Returns the rows whose outputs are factors of a site's inputs; None if there are none."""
        mixer = self._own.recurrent
        if site.norm:
            return None
        if site.matrices == ("mix_out",) and isinstance(mixer, ShortConvolution):
            return _Rows("mix_in", 0, slice(mixer.channels, 2 * mixer.channels))
        if site.matrices == ("o",):
            return self._value_rows()
        if site.matrices == ("experts.up",) and site.expert is None:
            return _Rows("experts.in", 0) if "experts.in.weight" in self.parameters else None
        if site.matrices not in (("down",), ("shared.down",), ("experts.down",)) or not self._own.gated_mlp:
            return None
        if site.expert is not None:
            return _Rows("experts.up", 2 * site.expert + 1)
        name = site.matrices[0].replace("down", "up")
        # Gates come first, also in one tensor.
        up = self.parameters[f"{name}.weight"]
        inner = shape_of(up, up.sources[0])[0] // 2
        return _Rows(name, 1) if self._is_separate(name, 2) else _Rows(name, 0, slice(inner, None))

    def _value_rows(self) -> "_Rows | None":
        """Returns the rows that compute values; None if values have another use or are changed behind them."""
        d, layer = self._own, self.index
        if d.latent is not None:
            size = d.latent.nope_dim + d.latent.value_dim
            rows = torch.arange(d.num_heads * size).view(d.num_heads, size)[:, d.latent.nope_dim :]
            return _Rows("latent_up", 0, rows.flatten())
        lent = any(source == layer for reader, source in enumerate(d.kv_sources) if reader != layer)
        if lent or d.queries_only or d.value_norm or layer in d.keys_as_values:
            return None
        return _Rows("qkv", 2) if self._is_separate("qkv", _SEPARATE) else None

    def _is_separate(self, name: str, count: int) -> bool:
        parameter = self.parameters[f"{name}.weight"]
        return len(parameter.sources) == count and parameter.grouping is None

    def _divide_norm(self, site: Site, factors: Tensor) -> Tensor:
        own = self.parameters.get(f"{site.norm}.weight")
        # A norm within a mixer has no offset, and may be shared by all heads.
        parameter = own or self.parameters[site.norm]
        weight = self.tensors[self.name(parameter.sources[0].name)]
        offset = 1.0 if own is not None and self._own.norm == "rms_plus_one" else 0.0
        count, before = len(factors) // len(weight), weight + offset
        factors = factors[: len(weight)]
        after = (before / factors - offset).to(self._dtype).float() + offset
        # The norm's weight is rounded, so it divides by slightly different factors. The matrices are multiplied by
        # these, so that the product does not change.
        exact = torch.where((before != 0) & (after != 0), before / torch.where(after != 0, after, 1.0), factors)
        weight.copy_(after - offset)
        bias = self.parameters.get(f"{site.norm}.bias")
        if bias is not None:
            self.tensors[self.name(bias.sources[0].name)] /= exact
        return exact.repeat(count)

    def _divide_rows(self, rows: "_Rows", factors: Tensor) -> None:
        parameter = self.parameters[f"{rows.matrix}.weight"]
        tensor = self.tensors[self.name(parameter.sources[rows.place].name)]
        if parameter.transposed:
            tensor[:, rows.rows] /= factors
        else:
            tensor[rows.rows] /= factors[:, None]
        bias = self.parameters.get(f"{rows.matrix}.bias")
        if bias is not None:
            self.tensors[self.name(bias.sources[rows.place].name)][rows.rows] /= factors

    def _read(self, parameter: Parameter, name: str) -> Tensor:
        return self.tensors[name].t().contiguous() if parameter.transposed else self.tensors[name]


def rescaled(statistics: Statistics, factors: Tensor) -> Statistics:
    """Returns the statistics of inputs that are divided by `factors`."""
    return Statistics(
        statistics.largest / factors,
        statistics.total / factors,
        statistics.products / factors[:, None] / factors,
        statistics.count,
    )


def sources_of(plan: Plan, parameter: Parameter, expert: int | None) -> tuple[Source, ...]:
    """Returns the tensors of a parameter, or those of one expert."""
    if expert is None:
        return parameter.sources
    assert plan.description.experts is not None
    each = len(parameter.sources) // plan.description.experts.num_experts
    return parameter.sources[expert * each : (expert + 1) * each]


def sites_of(plan: Plan, layer: int, parameter: Parameter) -> Iterator[tuple[Site, tuple[Source, ...]]]:
    """Yields each site of a matrix with the matrix's tensors that have this input.

    The matrices of each expert have a separate site if the algorithm needs its statistics.
    """
    name = matrix_name(parameter)
    every = [site for site in dict.fromkeys((*plan.sites(layer), *plan.watched(layer))) if name in site.matrices]
    own = [site for site in every if site.expert is not None]
    for site in own or every:
        yield site, sources_of(plan, parameter, site.expert)
