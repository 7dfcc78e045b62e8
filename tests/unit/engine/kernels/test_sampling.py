import math
from typing import Any

import pytest
import torch

from antiphon.services.engine.kernels.sampling import (
    HEAD_CANDIDATES,
    SamplingColumns,
    candidate_threshold,
    draw,
    new_columns,
    relative_weights,
    set_row,
)
from antiphon.shared.parameters.sampling import SamplingParams

VOCAB = 5 * HEAD_CANDIDATES


def columns_of(*rows: dict[str, Any]) -> SamplingColumns[torch.Tensor]:
    columns = new_columns(len(rows))
    for row, params in enumerate(rows):
        set_row(columns, row, SamplingParams(**params))
    return columns.map(torch.from_numpy)


def candidates(weights: torch.Tensor, **params: Any) -> list[int]:
    threshold = candidate_threshold(weights[None], columns_of(params))
    return torch.nonzero(weights >= threshold).squeeze(1).tolist()


def test_without_filters_every_token_is_a_candidate() -> None:
    assert candidates(torch.rand(50)) == list(range(50))


def test_top_k_keeps_the_k_most_likely_and_their_equals() -> None:
    weights = torch.tensor([0.2, 1.0, 0.5, 0.5, 0.1])
    assert candidates(weights, top_k=1) == [1]
    assert candidates(weights, top_k=2) == [1, 2, 3]
    assert candidates(weights, top_k=3) == [1, 2, 3]


def test_top_p_counts_shares_of_what_top_k_left() -> None:
    weights = torch.tensor([1.0, 0.6, 0.4, 0.3, 0.2])
    assert candidates(weights, top_p=0.6) == [0, 1]
    assert candidates(weights, top_p=0.65) == [0, 1, 2]
    assert candidates(weights, top_p=0.6, top_k=2) == [0]


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert candidates(torch.tensor([1.0, 0.5, 0.49, 0.1]), min_p=0.5) == [0, 1]


def test_top_a_is_relative_to_the_square_of_the_most_likely() -> None:
    weights = torch.tensor([1.0, 0.5, 0.3, 0.2])  # the probabilities are half of these: 0.2 * 0.5^2 = 0.05
    assert candidates(weights, top_a=0.4) == [0, 1, 2, 3]
    assert candidates(weights, top_a=0.41) == [0, 1, 2]
    assert candidates(weights, top_a=0.7) == [0, 1]
    assert candidates(weights, top_a=1.0) == [0, 1]
    assert candidates(torch.tensor([1.0, 0.01]), top_a=1.0) == [0]


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_top_a_counts_the_probabilities_before_the_other_filters(filters: dict[str, Any]) -> None:
    weights = torch.tensor([1.0, 0.5, 0.49, 0.01])  # of two tokens the sum is 1.5, and 0.5 would be too little
    assert candidates(weights, top_a=1.0, **filters) == candidates(weights, **filters) == [0, 1]


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999999, 1.0 - 1e-16])
def test_a_nucleus_wider_than_the_sorted_head_is_found(top_p: float) -> None:
    weights = torch.linspace(1.0, 0.9, VOCAB)
    cumulative = weights.double().cumsum(0)
    expected = int((cumulative < top_p * cumulative[-1]).sum()) + 1
    assert candidates(weights, top_p=top_p) == list(range(min(expected, VOCAB)))


@pytest.mark.parametrize("seed", range(5))
def test_a_nucleus_of_nearly_everything_keeps_nearly_everything(seed: int) -> None:
    weights = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed)).clamp(min=0.01)
    assert len(candidates(weights, top_p=math.nextafter(1.0, 0.0))) >= VOCAB - 1


def test_weights_are_relative_probabilities_and_those_of_forbidden_tokens_are_zero() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, ::7] = -math.inf
    logits[1, 1] = -500.0
    weights = relative_weights(logits, torch.tensor([0.5, 1.0, 2.0]))
    scaled = logits.double() / torch.tensor([[0.5], [1.0], [2.0]])
    expected = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=2e-38)
    assert weights[:, ::7].count_nonzero() == 0
    assert weights[1, 1] == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_of_a_broken_model_still_give_a_token_of_the_vocabulary(broken: float) -> None:
    logits = torch.randn(2, VOCAB)
    logits[0] = broken
    weights = relative_weights(logits, torch.ones(2))
    threshold = candidate_threshold(weights, columns_of({"top_p": 0.9}, {"top_a": 1.0}))
    tokens = draw(weights, threshold, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB


def test_rows_do_not_change_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=generator) * 2
    params: list[dict[str, Any]] = [
        {"temperature": 0.5, "top_p": 0.99},
        {"min_p": 0.01, "top_k": 5, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.9, "top_a": 0.3},
        {"top_k": 700},
    ]
    uniforms = torch.rand(4, dtype=torch.float64, generator=generator)

    def choose(rows: list[int]) -> list[int]:
        columns = columns_of(*(params[row] for row in rows))
        weights = relative_weights(logits[rows], columns.temperature)
        threshold = candidate_threshold(weights, columns)
        return draw(weights, threshold, uniforms[rows]).tolist()

    assert choose([0, 1, 2, 3]) == [choose([row])[0] for row in range(4)]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_draw_never_gives_a_token_that_is_no_candidate(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1e-30, 0.0]])
    token = draw(weights, torch.tensor([1e-38]), torch.tensor([uniform], dtype=torch.float64))
    assert token.item() in {2, 4}
