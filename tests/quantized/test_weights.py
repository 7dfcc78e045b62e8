"""How plain weights become 8 or 4 bits, and what is refused."""

import math

import pytest
import torch

from antiphon.services.engine.quantization.formats.grouped import grouped_weight
from antiphon.services.engine.quantization.group_order import group_order
from antiphon.services.engine.quantization.rounding import quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight, stack
from tests.quantized.harness import random_weight

SHAPES = ((1, 1), (5, 33), (16, 96), (7, 200))
GROUPS = (32, 64, 128)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_of_8_bits_is_off_by_half_a_scale_at_most(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    quantized = quantize_int8(weight)
    error = (quantized.dequantized() - weight.to(torch.float32)).abs()
    assert (error <= 0.50001 * quantized.scales[:, None]).all()
    assert quantized.values.abs().amax() <= 127


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_weight_of_8_bits_in_groups_is_off_by_half_its_groups_scale_at_most(
    shape: tuple[int, int], group_size: int
) -> None:
    weight = random_weight(*shape)
    quantized = quantize_int8(weight, group_size=group_size)
    assert quantized.scales.shape == (shape[0], math.ceil(shape[1] / group_size))
    scales = quantized.scales.repeat_interleave(group_size, dim=1)[:, : shape[1]]
    error = (quantized.dequantized() - weight.to(torch.float32)).abs()
    assert (error <= 0.50001 * scales).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("zero_points", [False, True])
def test_a_weight_of_4_bits_is_off_by_half_its_groups_scale_at_most(
    shape: tuple[int, int], group_size: int, zero_points: bool
) -> None:
    weight = random_weight(*shape)
    quantized = quantize_int4(weight, group_size, zero_points)
    assert quantized.scales.shape == (shape[0], math.ceil(shape[1] / group_size))
    scales = quantized.scales.repeat_interleave(group_size, dim=1)[:, : shape[1]]
    error = (quantized.dequantized() - weight.to(torch.float32)).abs()
    assert (error <= 0.50001 * scales).all()
    assert quantized.values.nbytes == shape[0] * math.ceil(shape[1] / 2)


def test_zero_points_make_the_error_of_lopsided_groups_smaller() -> None:
    weight = torch.rand(8, 128) + 0.1
    errors = [
        (quantize_int4(weight, 64, zero_points).dequantized() - weight).abs().mean() for zero_points in (False, True)
    ]
    assert errors[1] < 0.6 * errors[0]


def test_quantiles_of_the_normal_distribution_fit_normal_weights_better_than_even_steps() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = [
        (quantized.dequantized() - weight).square().mean()
        for quantized in (quantize_int4(weight, 64), quantize_nf4(weight, 64))
    ]
    assert errors[1] < errors[0]


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(3, 64)
    for quantized in (
        quantize_int8(weight),
        quantize_int4(weight, 32),
        quantize_int4(weight, 32, True),
        quantize_nf4(weight),
    ):
        assert torch.equal(quantized.dequantized(), weight)


@pytest.mark.parametrize("group_size", [0, -1, 31, 48])
def test_groups_that_the_library_cannot_have_are_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_int4(torch.zeros(2, 64), group_size)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    values, scales = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4)
    with pytest.raises(ValueError, match="values are"):
        QuantizedWeight(kind="int8", values=values, shape=(4, 65), scales=scales)
    with pytest.raises(ValueError, match="values are"):
        QuantizedWeight(kind="int8", values=values.to(torch.float32), shape=(4, 64), scales=scales)
    with pytest.raises(ValueError, match="scales are"):
        QuantizedWeight(kind="int4", values=values, shape=(4, 64), scales=scales, group_size=32)
    with pytest.raises(ValueError, match="zeros are"):
        QuantizedWeight(
            kind="int4",
            values=values,
            shape=(4, 64),
            scales=torch.ones(4, 2),
            group_size=32,
            zeros=torch.zeros(4, 2, dtype=torch.int8),
        )
    with pytest.raises(ValueError, match="levels are"):
        QuantizedWeight(
            kind="int4", values=values, shape=(4, 64), scales=torch.ones(4, 2), group_size=32, levels=torch.zeros(15)
        )
    with pytest.raises(ValueError, match="no groups"):
        QuantizedWeight(kind="int8_dynamic", values=values, shape=(4, 64), scales=torch.ones(4, 2), group_size=32)
    with pytest.raises(ValueError, match="without groups have no zeros"):
        QuantizedWeight(kind="int8", values=values, shape=(4, 64), scales=scales, zeros=torch.zeros(4, 2))
    with pytest.raises(ValueError, match="have no levels"):
        QuantizedWeight(
            kind="int8", values=values, shape=(4, 64), scales=torch.ones(4, 2), group_size=32, levels=torch.zeros(16)
        )


def test_rows_of_a_weight_in_groups_keep_their_scales() -> None:
    weight = quantize_int8(random_weight(6, 96), group_size=32)
    top, bottom = weight.chunk(2)
    assert torch.equal(bottom.dequantized(), weight.dequantized()[3:])
    together = stack((top, bottom))
    assert together is not None
    assert torch.equal(together.dequantized(), weight.dequantized())
    assert stack((top, quantize_int8(random_weight(3, 96)))) is None


def test_weights_of_4_and_8_bits_are_joined_in_8_bits() -> None:
    four, zeros = (quantize_int4(random_weight(4, 96), 32, zero_points) for zero_points in (False, True))
    eight = quantize_int8(random_weight(3, 96), group_size=16)
    for parts in ((four, eight), (eight, zeros, four), (quantize_int8(random_weight(3, 96), group_size=32), zeros)):
        together = stack(parts)
        assert together is not None
        assert (together.kind, together.group_size) == ("int8", 16 if eight in parts else 32)
        assert torch.equal(together.dequantized(), torch.cat([part.dequantized() for part in parts]))
    levels = quantize_nf4(random_weight(4, 128))
    assert stack((levels, quantize_int8(random_weight(4, 128), group_size=64))) is None


def test_columns_of_a_weight_in_groups_of_8_bits_keep_their_scales() -> None:
    weight = quantize_int8(random_weight(6, 144), group_size=32)
    for first, last in ((0, 64), (32, 96), (96, 144)):
        part = weight.columns(first, last)
        assert isinstance(part, QuantizedWeight)
        assert torch.equal(part.dequantized(), weight.dequantized()[:, first:last])
    part = weight.columns(16, 80)
    assert isinstance(part, QuantizedWeight)
    assert part.group_size == 16
    assert torch.equal(part.dequantized(), weight.dequantized()[:, 16:80])
    part = weight.columns(8, 72)
    assert isinstance(part, torch.Tensor)
    assert torch.equal(part, weight.dequantized()[:, 8:72])


@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_groups_of_8_bits_of_a_checkpoint_stay_quantized(group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (5, 256), generator=generator, dtype=torch.uint8)
    scales = torch.rand(5, -(-256 // group_size), generator=generator)
    expected = (values.to(torch.float32) - 128) * scales.repeat_interleave(group_size, dim=1)[:, :256]
    for zeros in (None, torch.full_like(scales, 128)):
        weight = grouped_weight(values, scales, zeros, 8, group_index=torch.arange(256) // group_size)
        assert isinstance(weight, QuantizedWeight)
        assert weight.kind == "int8"
        assert torch.equal(weight.dequantized(), expected)
    shifted = grouped_weight(values, scales, torch.full_like(scales, 100), 8)
    assert isinstance(shifted, QuantizedWeight)
    assert torch.equal(shifted.dequantized(), (values.float() - 100) * scales[:, torch.arange(256) // group_size])


def test_the_last_group_may_be_shorter() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(0, 16, (8, 200), dtype=torch.uint8, generator=generator)
    scales = torch.rand(8, 7, generator=generator)
    weight = grouped_weight(values, scales, None, 4, group_size=32)
    assert isinstance(weight, QuantizedWeight)
    expected = (values.float() - 8) * scales[:, torch.arange(200) // 32]
    torch.testing.assert_close(weight.dequantized(), expected)
    with pytest.raises(ValueError, match="there are 7 groups of 64 for 200 inputs"):
        grouped_weight(values, scales, None, 4, group_size=64)


def in_another_order(
    bits: int, width: int, size: int, seed: int, *, zeros: bool
) -> tuple[torch.Tensor | QuantizedWeight, torch.Tensor]:
    """A weight [6, width] whose groups have inputs from all over it, and the plain weight that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-width // size)
    values = torch.randint(0, 1 << bits, (6, width), dtype=torch.uint8, generator=generator)
    scales = torch.rand(6, groups, generator=generator)
    points = torch.randint(1, 1 << bits, (6, groups), generator=generator).float() if zeros else None
    index = (torch.arange(width) // size)[torch.randperm(width, generator=generator)]
    centre = (1 << (bits - 1)) if points is None else points[:, index]
    return grouped_weight(values, scales, points, bits, index, size), (values.float() - centre) * scales[:, index]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("width", "size"), [(256, 32), (200, 32), (96, 96), (320, 128)])
def test_groups_with_inputs_from_all_over_a_matrix_stay_quantized(
    bits: int, width: int, size: int, zeros: bool
) -> None:
    weight, plain = in_another_order(bits, width, size, 1, zeros=zeros)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.kind, weight.num_columns) == ("int8" if bits == 8 else "int4", width)
    assert torch.equal(weight.dequantized(), plain)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(weight.ordered(x) @ weight.numbers().T, x @ plain.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.rows(torch.tensor([4, 0])).dequantized(), plain[[4, 0]])
    assert torch.equal(weight.chunk(2)[1].dequantized(), plain[3:])


@pytest.mark.parametrize("bits", [4, 8])
def test_part_of_the_inputs_has_part_of_each_group(bits: int) -> None:
    """The inputs of a rank: each group has about a half of its inputs there, and is padded to whole groups of 32."""
    weight, plain = in_another_order(bits, 1024, 128, 3, zeros=True)
    assert isinstance(weight, QuantizedWeight)
    for first, last in ((0, 512), (512, 1024)):
        part = weight.columns(first, last)
        assert isinstance(part, QuantizedWeight)
        assert torch.equal(part.dequantized(), plain[:, first:last])
        assert part.num_columns < 1.4 * 512
        assert part.order is not None
        assert sorted(part.order[part.order >= 0].tolist()) == list(range(512))
    # Groups of 32 of which a rank has 8 inputs each would take more memory than plain weights.
    weight, plain = in_another_order(bits, 1024, 32, 3, zeros=True)
    assert isinstance(weight, QuantizedWeight)
    part = weight.columns(256, 512)
    assert isinstance(part, torch.Tensor)
    assert torch.equal(part, plain[:, 256:512])


def test_weights_with_different_orders_are_stacked_only_for_several_products() -> None:
    found = [in_another_order(4, 256, 64, seed, zeros=seed == 5) for seed in (4, 4, 5, 5)]
    parts = [weight for weight, _ in found if isinstance(weight, QuantizedWeight)]
    assert len(parts) == 4
    plain = torch.cat([plain for _, plain in found])
    same = stack(parts[:2])
    assert same is not None
    assert torch.equal(same.dequantized(), plain[:12])
    assert stack(parts) is None
    assert stack((parts[0], parts[2], parts[1], parts[3]), products=2) is None
    both = stack(parts, products=2)
    assert both is not None
    assert both.has_parts
    assert torch.equal(both.dequantized(), plain)
    for product, expected in zip(both.chunk(2), plain.chunk(2), strict=True):
        assert not product.has_parts
        assert torch.equal(product.dequantized(), expected)
    # A rank's rows: a half of each part.
    rows = torch.cat([torch.arange(first, first + 3) for first in (0, 6, 12, 18)])
    assert torch.equal(both.rows(rows).dequantized(), plain[rows])
    assert torch.equal(both.rows(rows).chunk(2)[1].dequantized(), plain[rows][6:])
    columns = both.columns(0, 128)
    assert isinstance(columns, torch.Tensor)
    assert torch.equal(columns, plain[:, :128])


def test_groups_of_inputs_that_are_no_groups_are_refused() -> None:
    values, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    for index in (torch.full((64,), 2), torch.arange(64) // 32 - 1, torch.zeros(32)):
        with pytest.raises(ValueError, match="the groups of"):
            grouped_weight(values, scales, None, 4, index, 32)
    with pytest.raises(ValueError, match="an order needs groups"):
        QuantizedWeight(
            kind="int8", values=values.to(torch.int8), shape=(4, 64), scales=scales[:, 0], order=torch.arange(64)
        )


def test_a_short_group_comes_last() -> None:
    found = group_order(torch.tensor([1, 0, 1, 1, 0, 1]), 4, 2)
    assert (found.order.tolist(), found.groups.tolist(), found.size) == ([0, 2, 3, 5, 1, 4], [1, 0], 4)
