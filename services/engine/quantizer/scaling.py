"""Moves factors between a matrix's inputs and the preceding operation, without changing the layer's result.

The inputs of a site are divided by a factor for each channel, and the columns of its matrices multiplied by the same
factor. The division is absorbed by the norm before the site, by the value projection (before `o`), by the gate of a
short convolution's output (before `mix_out`), or by the up projection of a gated MLP or of an expert (before `down`).
Called by smooth_quant and awq.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.services.engine.models.layout import Parameter, Source
from antiphon.services.engine.models.recurrent_kinds import ShortConvolution
from antiphon.services.engine.quantizer.layer import Statistics
from antiphon.services.engine.quantizer.plan import Plan, Site, matrix_name

_SEPARATE = 3
"""Number of tensors of a projection that is stored as query, key and value."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a matrix, as many as there are factors: its name, the index of its tensor, and the first row in it."""

    matrix: str
    place: int
    first: int = 0


class LayerTensors:
    """The tensors of one layer by their names in the checkpoint, float32; matrices can be read and changed."""

    def __init__(self, plan: Plan, index: int, tensors: dict[str, Tensor], names: dict[str, str], dtype: torch.dtype):
        """`names`: a source's name in the layout → its name in the checkpoint; `dtype`: that of stored tensors."""
        self.plan, self.index, self.tensors = plan, index, tensors
        self._names, self._dtype = names, dtype
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
        if site.norm:
            factors = self._divide_norm(site.norm, factors)
        elif before is not None:
            self._divide_rows(before, self.for_values(factors)[0] if site.matrices == ("o",) else factors)
        else:
            return None
        for parameter, source in (*self._sources(site), *self._sources(Site(site.plain))):
            tensor = self.tensors[self.name(source.name)]
            tensor *= factors[:, None] if parameter.transposed else factors
        return factors

    def can_divide(self, site: Site) -> bool:
        """Whether an operation before a site can absorb factors."""
        return bool(site.norm) or self._rows_before(site) is not None

    def for_values(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns factors [kv_size] of value rows and the same for each query head [q_size].

        Query heads that share a value head share the mean of their factors.
        """
        d = self.plan.description
        heads = factors.view(d.num_kv_heads, -1, d.head_dim)
        mean = heads.mean(dim=1)
        return mean.flatten(), mean.unsqueeze(1).expand_as(heads).flatten()

    def _sources(self, site: Site) -> Iterator[tuple[Parameter, Source]]:
        """Yields the tensors of a site's matrices, each with its parameter."""
        for name in site.matrices:
            parameter = self.parameters[f"{name}.weight"]
            for source in sources_of(self.plan, parameter, site.expert):
                yield parameter, source

    def _rows_before(self, site: Site) -> "_Rows | None":
        """Returns the rows whose outputs are factors of a site's inputs; None if there are none."""
        if site.norm:
            return None
        if site.matrices == ("mix_out",):
            recurrent = self.plan.description.recurrent
            return _Rows("mix_in", 0, recurrent.channels) if isinstance(recurrent, ShortConvolution) else None
        if site.matrices == ("o",):
            return _Rows("qkv", 2) if self._is_separate("qkv", _SEPARATE) else None
        if site.matrices == ("shared.down",):
            return _Rows("shared.up", 1)
        if site.expert is not None:
            return _Rows("experts.up", 2 * site.expert + 1)
        return _Rows("up", 1) if self.plan.description.gated_mlp and self._is_separate("up", 2) else None

    def _is_separate(self, name: str, count: int) -> bool:
        parameter = self.parameters[f"{name}.weight"]
        return len(parameter.sources) == count and parameter.grouping is None

    def _divide_norm(self, name: str, factors: Tensor) -> Tensor:
        weight = self.tensors[self.name(self.parameters[f"{name}.weight"].sources[0].name)]
        offset = 1.0 if self.plan.description.norm == "rms_plus_one" else 0.0
        before = weight + offset
        after = (before / factors - offset).to(self._dtype).float() + offset
        # The norm's weight is rounded, so it divides by slightly different factors. The matrices are multiplied by
        # these, so that the product does not change.
        exact = torch.where((before != 0) & (after != 0), before / torch.where(after != 0, after, 1.0), factors)
        weight.copy_(after - offset)
        bias = self.parameters.get(f"{name}.bias")
        if bias is not None:
            self.tensors[self.name(bias.sources[0].name)] /= exact
        return exact

    def _divide_rows(self, rows: "_Rows", factors: Tensor) -> None:
        parameter = self.parameters[f"{rows.matrix}.weight"]
        tensor = self.tensors[self.name(parameter.sources[rows.place].name)]
        part = slice(rows.first, rows.first + len(factors))
        if parameter.transposed:
            tensor[:, part] /= factors
        else:
            tensor[part] /= factors[:, None]
        bias = self.parameters.get(f"{rows.matrix}.bias")
        if bias is not None:
            self.tensors[self.name(bias.sources[rows.place].name)][part] /= factors

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
