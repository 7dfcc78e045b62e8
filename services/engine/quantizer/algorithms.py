"""The four algorithms: each quantizes a layer's matrices, given its tensors and statistics.

    weight_only_int8  each weight to the nearest of 255 values, no data needed
    smooth_quant      SmoothQuant (arXiv 2211.10438): part of the activations' range moves into the weights
    awq               AWQ (arXiv 2306.00978): searches channel factors and clipped ranges with the least output error
    gptq              GPTQ (arXiv 2210.17323): the error of a column is compensated by the columns that follow

Errors are measured with the products P of inputs (`Statistics.products`): the squared error of the outputs that an
error D of a matrix causes, summed over the calibration tokens, is tr(D P Dᵀ). Called by `run`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from antiphon.services.engine.quantizer.clipping import clipped
from antiphon.services.engine.quantizer.gptq import gptq_rounded
from antiphon.services.engine.quantizer.grid import Ranges, Rounded, extremes, int8, with_zeros
from antiphon.services.engine.quantizer.layer import Statistics
from antiphon.services.engine.quantizer.plan import Plan, Site, is_quantized
from antiphon.services.engine.quantizer.scaling import LayerTensors, rescaled, sites_of

ENOUGH_TOKENS = 256
"""Minimum number of an expert's calibration tokens for GPTQ to use the expert's own statistics."""
_FACTOR_STEPS = 20
_UNCLIPPED = ("qkv", "q_up")
"""Ranges of queries and keys are not clipped, because clipping would change the order of attention scores."""
_LEAST_FACTOR = 1e-4
Sites = Mapping[Site, Statistics]


def round_layer(layer: LayerTensors, dtype: torch.dtype) -> Iterator[tuple[str, Rounded]]:
    """Yields each matrix by its name in the checkpoint, each weight rounded to 8 bits."""
    for name, weight, _ in _quantized(layer):
        yield name, int8(weight, dtype)


def smooth_layer(
    layer: LayerTensors, sites: Sites, dtype: torch.dtype, strength: float
) -> Iterator[tuple[str, Rounded]]:
    """Yields each matrix in 8 bits, after factors x^strength / w^(1 - strength) were moved from inputs to columns."""
    for site, statistics in sites.items():
        if not site.norm:
            continue
        columns = torch.stack([w.abs().amax(dim=0) for w in layer.matrices(site).values()]).amax(dim=0)
        inputs = statistics.largest
        factors = inputs.clamp(min=1e-5) ** strength / columns.clamp(min=1e-5) ** (1 - strength)
        # Channels that are never used, or that no matrix reads, are not changed.
        layer.divide_inputs(site, torch.where((inputs > 0) & (columns > 0), factors, 1.0).clamp(min=1e-5))
    yield from round_layer(layer, dtype)


def awq_layer(layer: LayerTensors, sites: Sites, dtype: torch.dtype) -> Iterator[tuple[str, Rounded]]:
    """Yields each matrix in 4 bits with zero points, after a search for factors and ranges."""
    size = layer.plan.group_size
    statistics = dict(sites)
    for site in layer.plan.sites(layer.index):
        # An expert to which no token was routed has no statistics.
        if site in statistics and layer.can_divide(site):
            factors = layer.divide_inputs(site, _best_factors(layer, site, statistics[site], dtype))
            assert factors is not None
            statistics[site] = rescaled(statistics[site], factors)
    for name, weight, site in _quantized(layer):
        ranges = _ranges(weight, size, dtype)
        if site in statistics and site.matrices[0] not in _UNCLIPPED:
            ranges = clipped(weight, size, statistics[site].products, dtype)
        values = ranges.values(weight.unflatten(1, (-1, size))).flatten(1)
        zeros = ranges.zeros.squeeze(-1).to(torch.uint8)
        yield name, Rounded(values.to(torch.uint8), ranges.scales.squeeze(-1).to(dtype), zeros)


def gptq_layer(
    layer: LayerTensors, sites: Sites, dtype: torch.dtype, *, activation_order: bool = False
) -> Iterator[tuple[str, Rounded]]:
    """Yields each matrix in 4 bits, symmetric. Matrices that read the same input get the same activation order."""
    size = layer.plan.group_size
    for name, weight, site in _quantized(layer):
        products = _products(site, sites, weight.shape[1])
        yield name, gptq_rounded(weight, products, size, dtype, activation_order=activation_order)


def seldom_chosen(sites: Sites, plan: Plan, layer: int) -> int:
    """Returns the number of a layer's experts with too few tokens for their own statistics."""
    own = [site for site in plan.watched(layer) if site.matrices == ("experts.down",)]
    return sum(not _is_enough(sites.get(site)) for site in own)


def _products(site: Site, sites: Sites, width: int) -> Tensor:
    """Returns the products of a matrix's inputs, for its error.

    For an expert with few tokens, its first matrices (gate and up) use the products of all tokens; for its second
    matrix (down) there are no usable products, so errors are not compensated.
    """
    own = sites.get(site)
    if site.expert is None or _is_enough(own):
        assert own is not None
        return own.products
    everybody = next(
        (s for other, s in sites.items() if other.expert is None and site.matrices[0] in other.matrices), None
    )
    return torch.eye(width) if everybody is None else everybody.products


def _is_enough(statistics: Statistics | None) -> bool:
    return statistics is not None and statistics.count >= ENOUGH_TOKENS


def _quantized(layer: LayerTensors) -> Iterator[tuple[str, Tensor, Site]]:
    """Yields name in the checkpoint, weight [out, in] and site of each matrix."""
    for parameter in layer.parameters.values():
        if is_quantized(parameter):
            for site, sources in sites_of(layer.plan, layer.index, parameter):
                for name in dict.fromkeys(layer.name(source.name) for source in sources):
                    # Several parts of a matrix may be rows of one tensor.
                    tensor = layer.tensors[name]
                    yield name, tensor.t().contiguous() if parameter.transposed else tensor, site


def _ranges(weight: Tensor, size: int, dtype: torch.dtype) -> Ranges:
    """Returns the full ranges of groups, [out, groups, 1]."""
    return with_zeros(*extremes(weight.unflatten(1, (-1, size))), dtype)


def _best_factors(layer: LayerTensors, site: Site, statistics: Statistics, dtype: torch.dtype) -> Tensor:
    """Returns mean|x|^r, with r from a grid between 0 and 1 that gives the least error of the site's outputs."""
    weights = list(layer.matrices(site).values())
    sizes = (statistics.total / statistics.count).clamp(min=_LEAST_FACTOR)
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_FACTOR_STEPS):
        factors = (sizes ** (step / _FACTOR_STEPS)).clamp(min=_LEAST_FACTOR)
        factors = layer.shared(site, factors / (factors.max() * factors.min()).sqrt())
        error = sum(_error(w, factors, statistics.products, layer.plan.group_size, dtype) for w in weights)
        if error < least:
            best, least = factors, error
    return best


def _error(weight: Tensor, factors: Tensor, products: Tensor, size: int, dtype: torch.dtype) -> float:
    """Returns tr(D P Dᵀ) of a matrix that is rounded after its columns were multiplied by the factors."""
    scaled = weight * factors
    rounded = _ranges(scaled, size, dtype).nearest(scaled.unflatten(1, (-1, size))).flatten(1)
    error = rounded / factors - weight
    return float(((error @ products) * error).sum(dtype=torch.float64))
