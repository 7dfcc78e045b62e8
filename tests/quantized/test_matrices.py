"""Quantized matrices of the C++ library against PyTorch in float64, for every instruction set of this processor.

Weight-only kinds are exact but for float32 sums: with n terms a sum's error is at most (n + 8) 2^-24 times the sum of
its terms' sizes, and twice that is allowed, for tiles add in pairs. Dynamic rows and their sums are whole numbers: the
results are equal to the last bit.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.cpu.native import NativeError, native_weight
from antiphon.services.engine.quantization.rounding import quantize_int4, quantize_int8
from antiphon.services.engine.quantization.weight import INT4_KINDS, QuantizedWeight, pack_nibbles
from tests.quantized.harness import (
    KINDS,
    VARIANTS,
    WEIGHT_ONLY,
    one_matrix,
    random_rows,
    random_weight,
)

SHAPES = ((1, 1), (33, 50), (70, 131), (96, 320), (65, 1100))
"""[out, in]"""
ROWS = (1, 2, 17, 33, 70)
DTYPES = (torch.bfloat16, torch.float32)
SHORT_GROUP = 16
pytestmark = pytest.mark.timeout(300)  # compiles the library at first
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def sum_error(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """What float32 sums may be off by: [rows, out] float64."""
    sizes = weight.dequantized().abs().to(torch.float64)
    if weight.zeros is not None:  # the zero is taken off after the sum
        groups = torch.arange(weight.shape[1]) // weight.group_size
        most, middle = (8, 8) if weight.kind in INT4_KINDS else (127, 0)
        sizes = (most + (weight.zeros - middle).abs() * 2).mul(weight.scales)[:, groups].to(torch.float64)
    share = (weight.shape[1] + 8) * 2**-23
    if weight.group_size == SHORT_GROUP and x.dtype == torch.bfloat16:
        share += 2**-8  # the numbers are rounded to bfloat16 before the product, as those of a plain model
    return x.to(torch.float64).abs() @ sizes.T * share + 1e-30


def exact(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product [rows, out] float64."""
    return x.to(torch.float64) @ weight.dequantized().to(torch.float64).T


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers, float64, each rounded once, and their scales [rows, 1]."""
    largest = x.to(torch.float32).abs().amax(dim=1, keepdim=True)
    times = torch.where(largest > 0, torch.div(torch.tensor(127.0), largest), 0)
    return (x.to(torch.float64) * times.to(torch.float64)).round(), largest / 127


@each_variant
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_8_and_4_bits_multiply_as_the_numbers_they_stand_for(
    variant: str, kind: str, dtype: torch.dtype
) -> None:
    for out, width in SHAPES:
        weight = KINDS[kind](random_weight(out, width))
        with one_matrix(variant, weight, dtype) as multiply:
            for rows in ROWS:
                x = random_rows(rows, width, dtype)
                error = (multiply(x) - exact(x, weight)).abs()
                assert (error <= sum_error(x, weight)).all(), (out, width, rows, error.max())


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_8_bits_multiply_as_whole_numbers(variant: str, dtype: torch.dtype) -> None:
    for out, width in (*SHAPES, (40, 2200)):
        weight = quantize_int8(random_weight(out, width), "int8_dynamic")
        with one_matrix(variant, weight, dtype) as multiply:
            for rows in ROWS if width < 2000 else (530,):
                x = random_rows(rows, width, dtype)
                whole, scale = in_bytes(x)
                sums = (whole @ weight.values.to(torch.float64).T).to(torch.float32)
                expected = sums * (weight.scales * scale)
                assert torch.equal(multiply(x), expected), (out, width, rows)


@each_variant
def test_the_largest_products_of_bytes_are_exact(variant: str) -> None:
    """Instructions that add two products in 16 bits would cut off larger sums."""
    for lowest in (-127, -128):
        values = torch.full((40, 192), lowest, dtype=torch.int8)
        values[1::2] = 127
        weight = QuantizedWeight(kind="int8_dynamic", values=values, shape=(40, 192), scales=torch.full((40,), 0.5))
        x = torch.tensor([1.0, -1.0])[torch.arange(12) % 2].unsqueeze(1).expand(12, 192).contiguous()
        with one_matrix(variant, weight, torch.float32) as multiply:
            for rows in (1, 2, 5, 12):
                whole, scale = in_bytes(x[:rows])
                sums = (whole @ values.to(torch.float64).T).to(torch.float32)
                assert torch.equal(multiply(x[:rows]), sums * (weight.scales * scale)), rows


@each_variant
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("int4_dynamic")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_8_bits_multiply_with_weights_of_4_group_by_group(variant: str, kind: str, dtype: torch.dtype) -> None:
    """Only scales and the sums over groups are rounded; the sums of a group are whole numbers."""
    for out, width in (*SHAPES, (40, 2200)):
        weight = KINDS[kind](random_weight(out, width))
        assert weight.row_group_size == weight.group_size or width <= weight.group_size
        with one_matrix(variant, weight, dtype) as multiply:
            for rows in (*range(1, 13), 17, 33, 70) if width < 2000 else (530,):
                x = random_rows(rows, width, dtype)
                spread = torch.nn.functional.pad(x, (0, -width % weight.group_size)).unflatten(
                    1, (-1, weight.group_size)
                )
                whole, scale = in_bytes(spread.flatten(0, 1))
                rounded = (whole * scale).view(rows, -1)[:, :width]
                error = (multiply(x) - exact(rounded, weight)).abs()
                assert (error <= sum_error(rounded, weight)).all(), (out, width, rows, error.max())


@each_variant
def test_rows_of_8_bits_have_groups_of_at_most_128_inputs(variant: str) -> None:
    """Longer groups of weights, and one for all inputs, are divided; the reference for other backends does it too."""
    x = random_rows(5, 600, torch.float32)
    for group_size, row_group in ((256, 128), (96, 32), (4096, 128)):
        weight = replace(quantize_int4(random_weight(35, 600), group_size), kind="int4_dynamic")
        assert weight.row_group_size == row_group
        rounded = weight.round_rows(x)
        with one_matrix(variant, weight, torch.float32) as multiply:
            assert ((multiply(x) - exact(rounded, weight)).abs() <= 2 * sum_error(rounded, weight)).all()


@each_variant
def test_levels_beside_rows_of_8_bits_are_whole_numbers(variant: str) -> None:
    levels = torch.linspace(-127, 127, 16).round()
    weight = QuantizedWeight(
        kind="int4_dynamic",
        values=torch.zeros(4, 32, dtype=torch.uint8),
        shape=(4, 64),
        scales=torch.ones(4, 2),
        group_size=32,
        levels=levels,
    )
    for wrong in (levels + 0.5, levels + 1):
        with pytest.raises(ValueError, match="whole numbers from -127 to 127"):
            replace(weight, levels=wrong)
    given = native_weight(weight)
    levels += 0.5
    with (
        one_matrix(variant, quantize_int8(random_weight(4, 64))) as multiply,
        pytest.raises(NativeError, match="whole numbers from -127 to 127"),
    ):
        multiply.model.set_quantized(0, "o", 0, given, (4, 64), 0)


@each_variant
def test_the_error_of_rows_of_8_bits_is_at_most_half_a_step_for_each_weight(variant: str) -> None:
    weight = quantize_int8(random_weight(64, 300), "int8_dynamic")
    x = random_rows(20, 300, torch.bfloat16)
    step = x.to(torch.float64).abs().amax(dim=1, keepdim=True) / 127
    allowed = step / 2 * weight.dequantized().to(torch.float64).abs().sum(dim=1) * 1.0001
    with one_matrix(variant, weight) as multiply:
        assert ((multiply(x) - exact(x, weight)).abs() <= allowed + 1e-30).all()


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(variant: str, kind: str, dtype: torch.dtype) -> None:
    weight = KINDS[kind](random_weight(70, 1100))
    x = random_rows(600, 1100, dtype)
    with one_matrix(variant, weight, dtype, threads=3) as multiply:
        together = multiply(x)
    with one_matrix(variant, weight, dtype, threads=1) as multiply:
        for first, rows in (
            (0, 1),
            (5, 2),
            (40, 3),
            (80, 4),
            (60, 5),
            (17, 16),
            (200, 8),
            (220, 12),
            (240, 13),
            (100, 31),
            (300, 45),
            (599, 1),
        ):
            assert torch.equal(multiply(x[first : first + rows]), together[first : first + rows])


@each_variant
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_that_is_placed_again_is_the_same(variant: str, kind: str) -> None:
    weight, x = KINDS[kind](random_weight(70, 200)), random_rows(6, 200, torch.bfloat16)
    with one_matrix(variant, weight) as first, one_matrix(variant, weight) as second:
        address, size = first.model.packed(0, "o", 0)
        second.model.set_packed(0, "o", 0, address, weight.shape, 0, size)
        assert torch.equal(second(x), first(x))
        for wrong in ((70, 230), (170, 200)):
            with pytest.raises(NativeError, match="another shape"):
                second.model.set_packed(0, "o", 0, address, wrong, 0, size)
        with pytest.raises(NativeError, match="too short"):
            second.model.set_packed(0, "o", 0, address, weight.shape, 0, 8)


@each_variant
def test_a_row_with_a_number_that_is_none_has_no_result_and_its_neighbours_do(variant: str) -> None:
    for kind in ("int8_dynamic", "int4_dynamic, nf4, groups of 64"):
        x = random_rows(4, 70, torch.bfloat16)
        x[1, 3], x[3, 60] = torch.nan, -torch.inf
        with one_matrix(variant, KINDS[kind](random_weight(40, 70))) as multiply:
            y = multiply(x)
        assert y[[1, 3]].isnan().all()
        assert y[[0, 2]].isfinite().all()


@each_variant
def test_4_bits_may_lie_one_or_two_a_byte_with_a_sign_or_without(variant: str) -> None:
    weight = quantize_int4(random_weight(40, 96), 32)
    places = torch.stack([weight.values & 15, weight.values >> 4], dim=-1).flatten(1)
    spread = {
        "one a byte": (places, False),
        "one a byte, with a sign": (places.to(torch.int8) - 8, True),
        "two a byte, with a sign": (pack_nibbles((places ^ 8) & 15), True),
    }
    x = random_rows(3, 96, torch.bfloat16)
    with one_matrix(variant, weight) as multiply:
        expected = multiply(x)
    for values, has_sign in spread.values():
        same = QuantizedWeight(
            kind="int4", values=values, shape=weight.shape, scales=weight.scales, group_size=32, has_sign=has_sign
        )
        assert torch.equal(same.dequantized(), weight.dequantized())
        with one_matrix(variant, same) as multiply:
            assert torch.equal(multiply(x), expected)


@each_variant
@pytest.mark.parametrize("group_size", [96, 160, 256, 1000])
def test_groups_may_be_longer_than_the_librarys_own(variant: str, group_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    out, width = 35, 600
    groups = -(-width // group_size)
    values = torch.randint(0, 16, (out, width), generator=generator, dtype=torch.uint8)
    scales = torch.rand(out, groups, generator=generator)
    zeros = torch.randint(0, 16, (out, groups), generator=generator).to(torch.float32)
    weight = QuantizedWeight(
        kind="int4", values=values, shape=(out, width), scales=scales, group_size=group_size, zeros=zeros
    )
    x = random_rows(5, width, torch.bfloat16)
    with one_matrix(variant, weight) as multiply:
        assert ((multiply(x) - exact(x, weight)).abs() <= sum_error(x, weight)).all()


@each_variant
def test_what_cannot_be_computed_is_refused(variant: str) -> None:
    for group_size, message in ((48, "multiple of 32"), (-32, "multiple of 32")):
        scales = torch.ones((4, 3) if group_size > 0 else (4,))
        weight = QuantizedWeight(
            kind="int4",
            values=torch.zeros(4, 100, dtype=torch.uint8),
            shape=(4, 100),
            scales=scales,
            group_size=group_size,
        )
        with pytest.raises(NativeError, match=message), one_matrix(variant, weight):
            pass
    groups = QuantizedWeight(
        kind="int8",
        values=torch.zeros(4, 100, dtype=torch.int8),
        shape=(4, 100),
        scales=torch.ones(4, 3),
        group_size=40,
    )
    with pytest.raises(NativeError, match="multiple of 32 terms, of 16 in 8 bits"), one_matrix(variant, groups):
        pass
    long = QuantizedWeight(
        kind="int8_dynamic", values=torch.zeros(1, 70_000, dtype=torch.int8), shape=(1, 70_000), scales=torch.ones(1)
    )
    with pytest.raises(NativeError, match="do not fit"), one_matrix(variant, long):
        pass


@each_variant
@pytest.mark.parametrize(
    "kind",
    ["int4, groups of 32", "int4, groups of 64 with zero points", "int4_dynamic, groups of 32", "int8, groups of 16"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_in_the_order_of_the_columns(variant: str, kind: str, dtype: torch.dtype) -> None:
    """The result is that of the same columns in their order, bit for bit; padding is not read."""
    columns, width = 1120, 1100
    stored = KINDS[kind](random_weight(70, columns))
    order = torch.full((columns,), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(6)
    order[torch.randperm(columns, generator=generator)[:width]] = torch.randperm(width, generator=generator).int()
    weight = replace(stored, shape=(70, width), order=order)
    x = random_rows(45, width, dtype)
    with one_matrix(variant, stored, dtype) as multiply:
        expected = multiply(weight.ordered(x))
    for threads in (1, 3):
        with one_matrix(variant, weight, dtype, threads) as multiply:
            for rows in (45, 13, 3, 1):
                assert torch.equal(multiply(x[:rows]), expected[:rows]), rows


def test_an_order_with_inputs_that_are_not_there_is_refused() -> None:
    stored = quantize_int4(random_weight(33, 64), 32)
    weight = replace(stored, shape=(33, 60), order=torch.arange(64, dtype=torch.int32))
    with pytest.raises(NativeError, match="inputs that are not there"), one_matrix(VARIANTS[0], weight):
        pass


@each_variant
def test_levels_are_exact_in_a_float32_model(variant: str) -> None:
    values = torch.randint(0, 16, (33, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    levels = torch.linspace(-1.01, 0.97, 16)
    assert not torch.equal(levels, levels.to(torch.bfloat16).to(torch.float32))
    weight = QuantizedWeight(
        kind="int4",
        values=pack_nibbles(values),
        shape=(33, 128),
        scales=torch.full((33, 2), 0.7),
        group_size=64,
        levels=levels,
    )
    x = random_rows(17, 128, torch.float32)
    with one_matrix(variant, weight, torch.float32) as multiply:
        assert ((multiply(x) - exact(x, weight)).abs() <= sum_error(x, weight)).all()
