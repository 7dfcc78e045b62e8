from functools import partial

import pytest
import torch
import torch.nn.functional as F

from antiphon.services.engine.kernels.activation import ACTIVATIONS, gated, gated_by
from antiphon.services.engine.kernels.experts import mixed_experts, route


def test_the_weights_are_the_largest_probabilities() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    weights, experts = route(logits, 2, normalise=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    torch.testing.assert_close(route(logits, 2, normalise=True)[0].sum(), torch.tensor(1.0))


def test_corrections_decide_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    correction = torch.tensor([0.0, 0.0, -0.5, 0.5])
    weights, experts = route(logits, 2, normalise=False, sigmoid=True, correction=correction, scale=2.0)
    assert experts.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, 2 * logits.sigmoid()[:, [3, 1]])
    weights, _ = route(logits, 2, normalise=True, sigmoid=True, correction=correction, scale=2.0)
    torch.testing.assert_close(weights.sum(), torch.tensor(2.0))


def test_experts_are_chosen_from_the_groups_with_the_two_best_together() -> None:
    """The best expert of all is in a group whose second one is poor."""
    logits = torch.tensor([[3.0, -9.0, -9.0, 1.0, 2.1, -9.0, 2.0, 0.5, -9.0]])
    assert route(logits, 2, normalise=False, sigmoid=True)[1].tolist() == [[0, 4]]
    assert route(logits, 2, normalise=False, sigmoid=True, groups=(3, 1))[1].tolist() == [[4, 3]]
    assert route(logits, 3, normalise=False, sigmoid=True, groups=(3, 2))[1].tolist() == [[4, 6, 3]]


def test_weights_of_logits_that_are_hopeless_are_no_nan() -> None:
    weights, _ = route(torch.full((1, 4), -200.0), 2, normalise=True, sigmoid=True)
    assert weights.tolist() == [[0.0, 0.0]]


def test_the_activation_of_gpt_oss_cuts_both_parts_off() -> None:
    gate_up = torch.tensor([[-9.0, 1.0, 9.0, 2.0, -9.0, 9.0]], dtype=torch.float64)
    gates, ups = torch.tensor([-9.0, 1.0, 7.0], dtype=torch.float64), torch.tensor([2.0, -7.0, 7.0])
    torch.testing.assert_close(gated_by("swigluoai")(gate_up)[0], gates / (1 + (-1.702 * gates).exp()) * (ups + 1))


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
    ups, downs = ([partial(F.linear, weight=matrix) for matrix in matrices] for matrices in (gate_up, down))
    given = mixed_experts(x, weights, experts, ups, downs, gated_by("silu"))
    torch.testing.assert_close(given.double(), expected, rtol=tolerance, atol=tolerance)


def test_weights_of_inputs_multiply_before_the_activation() -> None:
    x, gate_up, down = torch.randn(3, 12), torch.randn(2, 16, 12) * 0.3, torch.randn(2, 12, 8) * 0.3
    weights, experts = torch.tensor([[0.5, 0.25]] * 3), torch.tensor([[1, 0]] * 3)
    ups, downs = ([partial(F.linear, weight=matrix) for matrix in matrices] for matrices in (gate_up, down))
    given = mixed_experts(x, weights, experts, ups, downs, gated_by("silu"), weighted_inputs=True)
    expected = torch.zeros(3, 12)
    for expert, weight in ((1, 0.5), (0, 0.25)):
        gate, up = (weight * x @ gate_up[expert].t()).chunk(2, dim=1)
        expected += (F.silu(gate) * up) @ down[expert].t()
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str) -> None:
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    formulas = {
        "silu": x / (1 + (-x).exp()),
        "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu_tanh": x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
    }
    torch.testing.assert_close(ACTIVATIONS[name](x), formulas[name])
    gate_up = torch.stack((x, torch.full_like(x, 3.0)), dim=1)
    torch.testing.assert_close(gated(ACTIVATIONS[name], gate_up)[:, 0], 3 * formulas[name])
