"""Products with quantized weights of every kind: those of the weights that they stand for, in both forms."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.products import quantized
from antiphon.services.engine.backends.triton.kernels.products.quantized import (
    FEW_ROWS,
    few_rows,
    quantized_linear,
    swapped_linear,
)
from antiphon.services.engine.backends.triton.kernels.products.rows import round_rows
from antiphon.services.engine.backends.triton.kernels.products.weights import dequantized, kernel_weight
from antiphon.services.engine.models.layers.linear import QuantizedLinear
from antiphon.services.engine.quantization.formats.fp8 import fp8_weight
from antiphon.services.engine.quantization.rounding import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight
from tests.support.slow import slow_but
from tests.unit.engine.backends.triton.close import assert_close, assert_same_bits

MANY_ROWS = 70


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    zeros = torch.arange(weight.scales.numel()).view_as(weight.scales) % 11 - 5
    return replace(weight, zeros=zeros.to(torch.float32))


def one_a_byte(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight of 4 bits with signed numbers, one in each byte."""
    places = torch.stack((weight.values & 15, weight.values >> 4), dim=-1).flatten(1)[:, : weight.shape[1]]
    return replace(weight, values=(places ^ 8).contiguous(), has_sign=True)


def fp8_blocks(weight: Tensor) -> QuantizedWeight:
    rows, columns = (torch.arange(size) // 64 for size in weight.shape)
    scales = 0.01 + draw(int(rows[-1]) + 1, int(columns[-1]) + 1, seed=9).abs() / 100
    values = (weight / scales[rows][:, columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
    found = fp8_weight(values, scales, (weight.shape[0], weight.shape[1]), (64, 64))
    assert isinstance(found, QuantizedWeight)
    assert found.group_size == 64
    return found


KINDS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": lambda weight: quantize_int8(weight),
    "int8, groups of 16": lambda weight: quantize_int8(weight, group_size=16),
    "int8, groups of 64 with zero points": lambda weight: with_zeros(quantize_int8(weight, group_size=64)),
    "int8, one group with zero points": lambda weight: with_zeros(quantize_int8(weight, group_size=1024)),
    "int8_dynamic": lambda weight: quantize_int8(weight, "int8_dynamic"),
    "int4, groups of 32": lambda weight: quantize_int4(weight, 32),
    "int4, groups of 96, one a byte": lambda weight: one_a_byte(quantize_int4(weight, 96)),
    "int4, groups of 128 with zero points": lambda weight: quantize_int4(weight, 128, zero_points=True),
    "int4, one group with zero points": lambda weight: quantize_int4(weight, 1024, zero_points=True),
    "nf4, groups of 64": lambda weight: quantize_nf4(weight, 64),
    "fp8": quantize_fp8,
    "fp8, blocks of 64": fp8_blocks,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "width", "dtype"),
    [(290, 150, torch.float32), (130, 33, torch.float16), (128, 16, torch.bfloat16)],
)
def test_a_product_is_that_of_the_weights_that_the_stored_ones_stand_for(
    kind: str, columns: int, width: int, dtype: torch.dtype
) -> None:
    weight = KINDS[kind](draw(width, columns, seed=1) / columns**0.5)
    stored, bias = kernel_weight(weight, dtype), draw(width, seed=2, dtype=dtype)
    assert sum(part.nbytes for part in (stored.values, stored.scales)) < 2 * weight.nbytes
    for rows in (5, FEW_ROWS + 3, MANY_ROWS):
        x, residual = draw(rows, columns, seed=3, dtype=dtype), draw(rows, width, seed=4, dtype=dtype)
        inner = rounded_rows(x, weight)
        expected = F.linear(inner, weight.dequantized(), bias.float())
        y = quantized_linear(x, stored, bias)
        assert_close(y, expected.to(dtype))
        if rows != FEW_ROWS + 3:
            added = residual.float() + F.linear(inner, weight.dequantized())
            assert_close(quantized_linear(x, stored, residual=residual), added.to(dtype))
        # The reference rounds weights and rows to the type of x.
        assert_close(y, QuantizedLinear(weight, bias)(x), factor=2)


@pytest.mark.parametrize("kind", slow_but(["int8", "int4, groups of 96, one a byte", "fp8, blocks of 64"], KINDS))
@pytest.mark.parametrize(
    ("columns", "width", "dtype", "rows"),
    [
        (290, 150, torch.float32, (1, 17, 130)),
        (130, 33, torch.float16, (5, 128, 256)),
        (128, 16, torch.bfloat16, (16, 33)),
    ],
)
def test_operands_may_be_swapped(
    kind: str, columns: int, width: int, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    weight = KINDS[kind](draw(width, columns, seed=1) / columns**0.5)
    stored, bias = kernel_weight(weight, dtype), draw(width, seed=2, dtype=dtype)
    for number in rows:
        x, residual = draw(number, columns, seed=3, dtype=dtype), draw(number, width, seed=4, dtype=dtype)
        expected = F.linear(rounded_rows(x, weight), weight.dequantized(), bias.float())
        assert_close(swapped_linear(x, stored, bias), expected.to(dtype))
        added = swapped_linear(x, stored, bias, residual)
        assert_close(added, (residual.float() + expected).to(dtype))
        if kind == "int8_dynamic":
            assert torch.equal(added, quantized_linear(x, stored, bias, residual)), "sums of integers are exact"


@pytest.mark.parametrize("kind", ["int8, groups of 64 with zero points", "int4, groups of 32"])
def test_rows_are_read_in_the_order_of_the_columns(kind: str) -> None:
    columns, width = 320, 290
    stored = KINDS[kind](draw(40, columns, seed=1))
    order = torch.full((columns,), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(6)
    order[torch.randperm(columns, generator=generator)[:width]] = torch.randperm(width, generator=generator).int()
    weight = replace(stored, shape=(40, width), order=order)
    for rows in (5, MANY_ROWS):
        x = draw(rows, width, seed=3)
        y = quantized_linear(x, kernel_weight(weight, torch.float32))
        ordered = weight.ordered(x).contiguous()
        assert torch.equal(y, quantized_linear(ordered, kernel_weight(stored, torch.float32)))
        assert_close(y, F.linear(x, weight.dequantized()))


def rounded_rows(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return weight.round_rows(x.float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_whatever_is_beside_it(kind: str) -> None:
    stored = kernel_weight(KINDS[kind](draw(40, 200, seed=1)), torch.float32)
    x = draw(MANY_ROWS, 200)
    few = quantized_linear(x[:7].contiguous(), stored)
    assert torch.equal(few[3:4], quantized_linear(x[3:4].contiguous(), stored))
    most = quantized_linear(x[: few_rows(stored)].contiguous(), stored)
    assert torch.equal(few, most[:7])
    assert_same_bits(most[-1:], quantized_linear(x[few_rows(stored) - 1 : few_rows(stored)].contiguous(), stored))
    if kind == "int8_dynamic":
        many = quantized_linear(x, stored)
        assert torch.equal(many[20:60], quantized_linear(x[20:60].contiguous(), stored))
        assert torch.equal(few, many[:7])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_columns_may_be_divided_among_programs(kind: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight parts some have no columns."""
    weight = KINDS[kind](draw(40, 270, seed=1))
    stored, x, bias = kernel_weight(weight, torch.float32), draw(5, 270, seed=3), draw(40, seed=2)
    shape = quantized._Shape(rows=FEW_ROWS, wide=32, warps=4, stages=2, splits=splits)
    monkeypatch.setattr(quantized, "_shape", lambda *_: shape)
    monkeypatch.setattr(quantized, "_swapped_shape", lambda *_: replace(shape, swapped=True))
    for product in (quantized_linear, swapped_linear):
        y = product(x, stored, bias, residual=draw(5, 40, seed=4))
        assert_close(y, draw(5, 40, seed=4) + F.linear(rounded_rows(x, weight), weight.dequantized(), bias))


def test_among_how_many_programs_columns_are_divided() -> None:
    stored = kernel_weight(quantize_int8(draw(8, 4096)), torch.bfloat16)
    # A power of two, at most eight, and so that each has at least four pieces of 128 columns.
    assert [quantized._splits(stored, wanted) for wanted in (0, 1, 3, 4, 1000)] == [1, 1, 2, 4, 8]
    assert quantized._splits(kernel_weight(quantize_int8(draw(8, 1500)), torch.bfloat16), 8) == 2
    # 64 rows of 4096 outputs: 32 programs of 128 outputs and as many rows share 132 multiprocessors.
    wide = replace(stored, values=stored.values.new_empty((4096, 4096)))
    assert quantized._swapped_shape(64, wide, 2, 132).splits == 8
    assert quantized._swapped_shape(128, wide, 2, 132).splits == 4
    assert quantized._swapped_shape(300, wide, 2, 132) == replace(
        quantized._swapped_shape(128, wide, 2, 132), splits=1
    ), "three tiles of rows fill a device"


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_dequantized_as_the_reference_does(kind: str) -> None:
    weight = KINDS[kind](draw(40, 270, seed=1))
    assert_close(dequantized(kernel_weight(weight, torch.float32), torch.float32)[:, :270], weight.dequantized())


def test_numbers_of_8_bit_floats_are_exact_subnormal_ones_and_nan_included() -> None:
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)[:, None].expand(256, 32).contiguous()
    weight = QuantizedWeight(kind="fp8", values=values, shape=(256, 32), scales=torch.ones(256))
    one = torch.zeros(1, 32)
    one[0, 5] = 1.0
    for dtype in (torch.float32, torch.float16):
        y = quantized_linear(one.to(dtype), kernel_weight(weight, dtype))
        finite = ~weight.dequantized()[:, 5].isnan()
        assert torch.equal(y[0, finite].float(), weight.dequantized()[finite, 5])
        assert y[0, ~finite].isnan().all()


def test_rows_are_rounded_as_the_reference_rounds_them() -> None:
    x = draw(5, 300) * torch.logspace(-3, 3, 5)[:, None]
    x[2] = 0
    rounded, scales = round_rows(x)
    weight = quantize_int8(draw(4, 300), "int8_dynamic")
    assert torch.equal(rounded.float() * scales[:, None], weight.round_rows(x))
    assert rounded.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]


def test_two_columns_of_a_byte_are_half_a_piece_apart() -> None:
    places = torch.arange(64).remainder(16).to(torch.uint8)[None]
    packed = places[:, ::2] | (places[:, 1::2] << 4)
    weight = QuantizedWeight(kind="int4", values=packed, shape=(1, 64), scales=torch.ones(1, 2), group_size=32)
    stored = kernel_weight(weight, torch.bfloat16)
    assert stored.piece == 32
    low, high = (stored.values & 15).view(2, 16), (stored.values >> 4).view(2, 16)
    assert torch.equal(torch.stack((low, high), dim=1).flatten(), places[0])
