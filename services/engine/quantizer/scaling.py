"""Moves factors between a matrix's inputs and whatever comes before it, without changing what the layer computes.

The inputs of a site are divided by a factor for each channel, and the columns of its matrices multiplied by the same
factor. The division is absorbed by the norm before the site, by the value projection (before `o`), or by the up
projection of a gated MLP (before `down`). Called by smooth_quant and awq.
"""

import torch
from torch import Tensor

from services.engine.models.layout import Parameter
from services.engine.quantizer.layer import Statistics
from services.engine.quantizer.plan import Plan, Site, matrix_name

_SEPARATE = 3
"""Number of tensors of a projection that is stored as query, key and value."""


class LayerTensors:
    """The tensors of one layer by their names in the checkpoint, float32; matrices can be read and changed."""

    def __init__(self, plan: Plan, index: int, tensors: dict[str, Tensor], names: dict[str, str], dtype: torch.dtype):
        """`names`: a source's name in the layout → its name in the checkpoint; `dtype`: that of stored tensors."""
        self.plan, self.tensors = plan, tensors
        self._names, self._dtype = names, dtype
        prefix = f"layers.{index}."
        self.parameters = {p.name.removeprefix(prefix): p for p in plan.layer(index)}

    def name(self, source: str) -> str:
        """Returns the name that a tensor of the layout has in the checkpoint."""
        return self._names[source]

    def matrices(self, site: Site) -> dict[str, Tensor]:
        """Returns the matrices [out, in] that read a site, by their names in the checkpoint."""
        found = [self.parameters[f"{name}.weight"] for name in site.matrices]
        return {
            self.name(source.name): self._read(parameter, self.name(source.name))
            for parameter in found
            for source in parameter.sources
        }

    def divide_inputs(self, site: Site, factors: Tensor) -> Tensor | None:
        """Divides what a site's matrices read by `factors` [in] and multiplies their columns.

        Returns the factors as they are after what absorbs them was rounded to the stored type; None if nothing can.
        """
        if site.norm:
            factors = self._divide_norm(site.norm, factors)
        elif site.matrices == ("o",) and self._is_separate("qkv", _SEPARATE):
            self._divide_rows("qkv", 2, self.for_values(factors)[0])
        elif site.matrices == ("down",) and self.plan.description.gated_mlp and self._is_separate("up", 2):
            self._divide_rows("up", 1, factors)
        else:
            return None
        for name in site.matrices:
            parameter = self.parameters[f"{name}.weight"]
            for source in parameter.sources:
                tensor = self.tensors[self.name(source.name)]
                tensor *= factors[:, None] if parameter.transposed else factors
        return factors

    def can_divide(self, site: Site) -> bool:
        """Whether something before a site can absorb factors."""
        if site.norm:
            return True
        if site.matrices == ("o",):
            return self._is_separate("qkv", _SEPARATE)
        return self.plan.description.gated_mlp and self._is_separate("up", 2)

    def for_values(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns factors [kv_size] of value rows and the same for each query head [q_size].

        Query heads that share a value head share the mean of their factors.
        """
        d = self.plan.description
        heads = factors.view(d.num_kv_heads, -1, d.head_dim)
        mean = heads.mean(dim=1)
        return mean.flatten(), mean.unsqueeze(1).expand_as(heads).flatten()

    def _is_separate(self, name: str, count: int) -> bool:
        parameter = self.parameters[f"{name}.weight"]
        return len(parameter.sources) == count and parameter.grouping is None

    def _divide_norm(self, name: str, factors: Tensor) -> Tensor:
        weight = self.tensors[self.name(self.parameters[f"{name}.weight"].sources[0].name)]
        offset = 1.0 if self.plan.description.norm == "rms_plus_one" else 0.0
        before = weight + offset
        after = (before / factors - offset).to(self._dtype).float() + offset
        # The factors that the rounded norm divides by, so that the product stays what it was.
        exact = torch.where((before != 0) & (after != 0), before / torch.where(after != 0, after, 1.0), factors)
        weight.copy_(after - offset)
        bias = self.parameters.get(f"{name}.bias")
        if bias is not None:
            self.tensors[self.name(bias.sources[0].name)] /= exact
        return exact

    def _divide_rows(self, name: str, place: int, factors: Tensor) -> None:
        parameter = self.parameters[f"{name}.weight"]
        tensor = self.tensors[self.name(parameter.sources[place].name)]
        tensor /= factors if parameter.transposed else factors[:, None]
        bias = self.parameters.get(f"{name}.bias")
        if bias is not None:
            self.tensors[self.name(bias.sources[place].name)] /= factors

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


def site_of(plan: Plan, parameter: Parameter) -> Site:
    """Returns the site that a matrix reads."""
    name = matrix_name(parameter)
    return next(site for site in plan.sites() if name in site.matrices)
