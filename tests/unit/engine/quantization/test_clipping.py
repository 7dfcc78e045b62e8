"""Clipped ranges of AWQ: never worse than full ranges, and chosen with the errors of other groups in mind."""

import torch
from torch import Tensor

from antiphon.services.engine.quantizer.clipping import clipped
from antiphon.services.engine.quantizer.grid import Ranges, extremes, with_zeros

SIZE, GROUPS, OUTPUTS = 16, 6, 40


def weights(seed: int) -> Tensor:
    """Returns weights [out, in] of which a few are large, so that clipping helps."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(OUTPUTS, SIZE * GROUPS, generator=draw)
    return torch.where(torch.rand(found.shape, generator=draw) < 0.02, 3 * found, found)


def products(seed: int) -> Tensor:
    """Returns products of inputs in which every group is nearly a copy of the first one."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(500, SIZE, generator=draw).repeat(1, GROUPS)
    inputs += 0.1 * torch.randn(inputs.shape, generator=draw)
    return inputs.t() @ inputs


def error(weight: Tensor, ranges: Ranges, of: Tensor) -> Tensor:
    """Returns the squared error of each output, summed over the inputs."""
    change = ranges.nearest(weight.unflatten(1, (-1, SIZE))).flatten(1) - weight
    return ((change @ of) * change).sum(dim=1)


def full(weight: Tensor) -> Ranges:
    return with_zeros(*extremes(weight.unflatten(1, (-1, SIZE))), torch.bfloat16)


def test_no_output_gets_worse_than_with_full_ranges() -> None:
    for seed in range(5):
        weight, of = weights(seed), products(seed)
        before, after = (error(weight, one, of) for one in (full(weight), clipped(weight, SIZE, of, torch.bfloat16)))
        assert (after <= before * (1 + 1e-4)).all()


def test_errors_of_groups_with_like_inputs_cancel() -> None:
    weight, of = weights(1), products(1)
    together = clipped(weight, SIZE, of, torch.bfloat16)
    # Without the products of inputs of different groups, each group is chosen alone.
    apart = torch.block_diag(*[of[i : i + SIZE, i : i + SIZE] for i in range(0, len(of), SIZE)])
    alone = clipped(weight, SIZE, apart, torch.bfloat16)
    assert error(weight, together, of).sum() < 0.8 * error(weight, alone, of).sum()


def test_shapes_and_types() -> None:
    ranges = clipped(weights(0), SIZE, products(0), torch.bfloat16)
    assert ranges.scales.shape == ranges.zeros.shape == (OUTPUTS, GROUPS, 1)
    assert torch.equal(ranges.scales, ranges.scales.bfloat16().float()), "scales are rounded to their stored type"
    assert ((ranges.zeros >= 0) & (ranges.zeros <= 15)).all()
