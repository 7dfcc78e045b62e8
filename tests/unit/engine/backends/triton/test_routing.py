"""Experts and weights of tokens: those that the reference chooses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.routing import route_tokens
from antiphon.services.engine.kernels.experts import route
from antiphon.services.engine.models.description import Experts


def experts(num_experts: int, per_token: int, **more: Any) -> Experts:
    given = {"normalise": True, "intermediate_size": 1, "layers": frozenset({0}), **more}
    return Experts(num_experts=num_experts, num_per_token=per_token, **given)


CASES = {
    "Mixtral": experts(8, 2),
    "Qwen3 30B-A3B": experts(128, 8),
    "OLMoE": experts(64, 8, normalise=False),
    "Qwen2 57B-A14B, experts that are no power of two": experts(60, 4, normalise=False),
    "DeepSeek V3": experts(256, 8, scoring="sigmoid", correction=True, num_groups=8, num_chosen_groups=4, scale=2.5),
    "DeepSeek V2, one best of each group": experts(
        160, 6, normalise=False, num_groups=8, num_chosen_groups=3, best_of_group=1, scale=16.0
    ),
    "Kimi K2": experts(384, 8, scoring="sigmoid", correction=True, scale=2.827),
    "Llama 4 Scout": experts(16, 1, scoring="sigmoid", normalise=False),
    "three groups of three": experts(9, 3, scoring="sigmoid", num_groups=3, num_chosen_groups=2),
    "all experts": experts(4, 4),
}


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)) * 2


def expected(logits: Tensor, one: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    return route(
        logits, one.num_per_token, one.normalise, sigmoid=one.scoring == "sigmoid", correction=correction,
        groups=(one.num_groups, one.num_chosen_groups), best_of_group=one.best_of_group, scale=one.scale,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights_are_those_of_the_reference(name: str) -> None:
    one, logits = CASES[name], drawn(40, CASES[name].num_experts)
    correction = drawn(1, one.num_experts, seed=1)[0] / 4 if one.correction else None
    weights, chosen = route_tokens(logits, one, correction, None)
    theirs, experts_of_theirs = expected(logits, one, correction)
    assert chosen.tolist() == experts_of_theirs.tolist()
    torch.testing.assert_close(weights, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_have_the_type_of_the_logits_and_the_factors_of_their_experts(dtype: torch.dtype) -> None:
    # Numbers that both types have, none twice in a row: among equal ones the reference's choice is not defined.
    logits = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(row)) for row in range(9)])
    logits, factors = (logits / 8).to(dtype), drawn(1, 32, seed=3)[0]
    weights, chosen = route_tokens(logits, experts(32, 4), None, factors)
    theirs, experts_of_theirs = expected(logits.float(), experts(32, 4), None)
    assert (chosen.tolist(), weights.dtype) == (experts_of_theirs.tolist(), dtype)
    torch.testing.assert_close(weights.float(), theirs * factors[experts_of_theirs], rtol=2e-2, atol=2e-2)


def test_equal_and_hopeless_scores_choose_the_first_and_divide_by_no_zero() -> None:
    weights, chosen = route_tokens(torch.full((1, 4), -200.0), experts(4, 2, scoring="sigmoid"), None, None)
    assert (weights.tolist(), chosen.tolist()) == ([[0.0, 0.0]], [[0, 1]])


def test_scores_that_are_no_numbers_name_experts_that_exist() -> None:
    _, chosen = route_tokens(torch.full((1, 6), float("nan")), experts(6, 2), None, None)
    assert all(0 <= one < 6 for one in chosen[0].tolist())
