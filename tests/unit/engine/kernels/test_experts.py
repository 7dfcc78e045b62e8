from functools import partial

import pytest
import torch
import torch.nn.functional as F

from services.engine.kernels.activation import ACTIVATIONS, gated, gated_by
from services.engine.kernels.experts import mixed_experts, route


def test_the_weights_are_the_largest_probabilities() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    weights, experts = route(logits, 2, normalise=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    torch.testing.assert_close(route(logits, 2, normalise=True)[0].sum(), torch.tensor(1.0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_a_mixture_is_the_sum_over_each_tokens_experts(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    x, logits = torch.randn(tokens, 12).to(dtype), torch.randn(tokens, 5)
    gate_up, down = (torch.randn(5, 16, 12) * 0.3).to(dtype), (torch.randn(5, 12, 8) * 0.3).to(dtype)
    weights, experts = route(logits.to(dtype), 2, normalise=True)
    expected = torch.zeros(tokens, 12, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    products = [[partial(F.linear, weight=matrix) for matrix in matrices] for matrices in (gate_up, down)]
    given = mixed_experts(x, weights, experts, *products, gated_by("silu"))
    torch.testing.assert_close(given.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str) -> None:
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    formulas = {
        "silu": x / (1 + (-x).exp()),
        "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu_tanh": x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "relu": x.clamp(min=0),
    }
    torch.testing.assert_close(ACTIVATIONS[name](x), formulas[name])
    gate_up = torch.stack((x, torch.full_like(x, 3.0)), dim=1)
    torch.testing.assert_close(gated(ACTIVATIONS[name], gate_up)[:, 0], 3 * formulas[name])
