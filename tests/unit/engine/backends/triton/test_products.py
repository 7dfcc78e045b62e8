"""Products of few rows with everything around them, and the mixture of experts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.experts import mixed_experts
from antiphon.services.engine.backends.triton.kernels.products.skinny import skinny_linear
from antiphon.services.engine.kernels.activation import ACTIVATIONS, gated, gated_by
from antiphon.services.engine.kernels.experts import mixed_experts as reference_experts
from antiphon.services.engine.kernels.experts import route
from tests.unit.engine.backends.triton.close import assert_close


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("rows", "columns", "width", "dtype"),
    [
        (1, 64, 40, torch.float32),
        (3, 300, 17, torch.float32),
        (16, 129, 33, torch.float32),
        (5, 260, 48, torch.float16),
        (2, 512, 20, torch.bfloat16),
    ],
)
def test_a_product_of_few_rows_is_the_references_with_and_without_what_is_fused(
    rows: int, columns: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = draw(rows, columns, dtype=dtype), draw(2 * width, columns, seed=1, dtype=dtype) / columns**0.5
    bias, residual = draw(2 * width, seed=2, dtype=dtype), draw(rows, width, seed=4, dtype=dtype)
    one = weight[:width].contiguous()
    assert_close(skinny_linear(x, one), F.linear(x.float(), one.float()).to(dtype))
    added = residual.float() + F.linear(x.float(), one.float(), bias[:width].float())
    assert_close(skinny_linear(x, one, bias[:width], residual=residual), added.to(dtype))
    inner = F.linear(x.float(), weight.float(), bias.float())
    ours = skinny_linear(x, weight, bias, activation="silu")
    assert_close(ours, gated(ACTIVATIONS["silu"], inner).to(dtype))


def test_a_row_gets_the_same_bits_whatever_is_beside_it() -> None:
    x, weight = draw(7, 200), draw(50, 200, seed=1)
    assert torch.equal(skinny_linear(x, weight)[3:4], skinny_linear(x[3:4].contiguous(), weight))


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "dtype"),
    [
        (1, 5, 2, torch.float32),
        (9, 5, 3, torch.float32),
        (70, 2, 1, torch.float32),
        (40, 3, 2, torch.float16),
        (6, 4, 2, torch.bfloat16),
    ],
)
def test_a_mixture_of_experts_is_the_references(tokens: int, experts: int, per_token: int, dtype: torch.dtype) -> None:
    hidden, inner = 72, 40
    x, logits = draw(tokens, hidden, dtype=dtype), draw(tokens, experts, seed=1, dtype=dtype)
    # One expert gets nothing.
    logits[:, experts // 2] = -50.0
    up, down = (
        draw(experts, 2 * inner, hidden, seed=2, dtype=dtype) / 8,
        draw(experts, hidden, inner, seed=3, dtype=dtype) / 6,
    )
    residual = draw(tokens, hidden, seed=4, dtype=dtype)
    shares, chosen = route(logits, per_token, normalise=True)
    products = ([partial(F.linear, weight=one) for one in matrices.float()] for matrices in (up, down))
    ups, downs = products
    expected = reference_experts(x.float(), shares.float(), chosen, ups, downs, gated_by("silu"))
    assert_close(mixed_experts(x, shares, chosen, up, down, "silu"), expected.to(dtype), factor=2)
    added = mixed_experts(x, shares, chosen, up, down, "silu", residual)
    assert_close(added, (residual.float() + expected).to(dtype), factor=2)
    expected = reference_experts(x.float(), shares.float(), chosen, ups, downs, gated_by("silu"), weighted_inputs=True)
    weighted = mixed_experts(x, shares, chosen, up, down, "silu", weighted_inputs=True)
    assert_close(weighted, expected.to(dtype), factor=2)


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_with_biases_and_a_clamped_activation_are_the_references(tokens: int) -> None:
    hidden, inner, experts = 72, 40, 3
    x, logits = draw(tokens, hidden) * 4, draw(tokens, experts, seed=1)
    up, down = draw(experts, 2 * inner, hidden, seed=2) / 4, draw(experts, hidden, inner, seed=3) / 6
    biases = draw(experts, 2 * inner, seed=4) * 3, draw(experts, hidden, seed=5)
    shares, chosen = route(logits, 2, normalise=True)
    ups, downs = (
        [partial(F.linear, weight=weight, bias=bias) for weight, bias in zip(matrices, added, strict=True)]
        for matrices, added in zip((up, down), biases, strict=True)
    )
    expected = reference_experts(x, shares, chosen, ups, downs, gated_by("swigluoai"))
    assert_close(mixed_experts(x, shares, chosen, up, down, "swigluoai", None, biases), expected, factor=2)


@pytest.mark.parametrize(("tokens", "weighted"), [(3, False), (40, False), (3, True)])
def test_experts_without_gates_are_the_references(tokens: int, weighted: bool) -> None:
    hidden, inner, experts = 72, 40, 3
    x, logits, residual = draw(tokens, hidden), draw(tokens, experts, seed=1), draw(tokens, hidden, seed=6)
    up, down = draw(experts, inner, hidden, seed=2) / 4, draw(experts, hidden, inner, seed=3) / 6
    biases = draw(experts, inner, seed=4), draw(experts, hidden, seed=5)
    shares, chosen = route(logits, 2, normalise=True)
    ups, downs = (
        [partial(F.linear, weight=weight, bias=bias) for weight, bias in zip(matrices, added, strict=True)]
        for matrices, added in zip((up, down), biases, strict=True)
    )
    expected = reference_experts(x, shares, chosen, ups, downs, ACTIVATIONS["relu2"], weighted)
    ours = mixed_experts(x, shares, chosen, up, down, "relu2", residual, biases, weighted, gated=False)
    assert_close(ours, residual + expected, factor=2)
