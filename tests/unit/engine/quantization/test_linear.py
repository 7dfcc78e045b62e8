"""The reference product with quantized weights, on any device: what it computes, and that it keeps no plain copy."""

import pytest
import torch

from antiphon.services.engine.models.layers.linear import QuantizedLinear, make_linear
from antiphon.services.engine.quantization.rounding import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight, stack

KINDS = {
    "int8": lambda weight: quantize_int8(weight),
    "int8_dynamic": lambda weight: quantize_int8(weight, "int8_dynamic"),
    "int4": lambda weight: quantize_int4(weight, 32, zero_points=True),
    "nf4": lambda weight: quantize_nf4(weight),
    "fp8": quantize_fp8,
}
ERRORS = {"int8": 0.01, "int8_dynamic": 0.02, "int4": 0.15, "nf4": 0.15, "fp8": 0.05}
"""Largest error of a product, relative to the largest plain result."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_weights_that_it_stands_for(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    plain, bias = torch.randn(48, 96, generator=generator), torch.randn(48, generator=generator).to(dtype)
    x, residual = torch.randn(5, 96, generator=generator).to(dtype), torch.randn(5, 48, generator=generator).to(dtype)
    weight = KINDS[kind](plain)
    linear = make_linear(weight, bias)
    assert isinstance(linear, QuantizedLinear)
    y = linear(x)
    assert y.dtype == dtype
    expected = x.float() @ plain.T + bias.float()
    assert (y.float() - expected).abs().max() <= (ERRORS[kind] + 0.02) * expected.abs().max()
    assert torch.equal(linear.add_to(residual, x), residual + y)
    if kind != "int8_dynamic" and dtype == torch.float32:
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight.dequantized(), bias))
    assert weight.nbytes < plain.nbytes / 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_stacked_sorted_and_divided_like_plain_ones(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    first, second = (KINDS[kind](torch.randn(rows, 64, generator=generator)) for rows in (4, 6))
    both = stack([first, second])
    assert both is not None
    wide = torch.cat([first.dequantized(), second.dequantized()])
    assert torch.equal(both.dequantized(), wide)
    assert torch.equal(both.rows(torch.tensor([7, 0, 3])).dequantized(), wide[[7, 0, 3]])
    parts = [part.dequantized() for part in both.chunk(2)]
    assert torch.equal(torch.cat(parts), wide)
    assert both.to(torch.device("cpu")).shape == (10, 64)


def test_weights_of_different_forms_are_not_stacked() -> None:
    plain = torch.randn(4, 64)
    forms = [
        quantize_int8(plain),
        quantize_int8(plain, "int8_dynamic"),
        quantize_int4(plain, 32),
        quantize_int4(plain, 64),
        quantize_int4(plain, 64, zero_points=True),
        quantize_nf4(plain),
    ]
    found = [[stack([first, other]) is not None for other in forms].count(True) for first in forms]
    assert found == [1, 1, 3, 3, 3, 1]
    # Groups of 4 bits of any size, with and without zero points, become groups of 8 bits of the same numbers.
    both = stack([forms[2], forms[4]])
    assert both is not None
    assert torch.equal(both.dequantized(), torch.cat([forms[2].dequantized(), forms[4].dequantized()]))


def test_a_weight_of_8_bits_floating_point_rounds_to_the_nearest() -> None:
    weight = quantize_fp8(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))
    assert isinstance(weight, QuantizedWeight)
    assert weight.values.dtype == torch.float8_e4m3fn
    assert torch.equal(weight.dequantized(), torch.tensor([[448.0, 1.0], [0.0, 0.0]]))
