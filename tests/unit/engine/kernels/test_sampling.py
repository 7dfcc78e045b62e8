import math

import pytest
import torch

from services.engine.kernels.sampling import HEAD_CANDIDATES, candidate_threshold, draw, relative_weights

VOCAB = 5 * HEAD_CANDIDATES


def candidates(weights: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    threshold = candidate_threshold(
        weights[None],
        torch.tensor([top_k or len(weights)]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p]),
    )
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
    top_p = torch.full((2,), 0.9, dtype=torch.float64)
    threshold = candidate_threshold(weights, torch.full((2,), VOCAB), top_p, torch.zeros(2))
    tokens = draw(weights, threshold, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB


def test_rows_do_not_change_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=generator) * 2
    temperature, min_p = torch.tensor([0.5, 1.0, 2.0, 1.0]), torch.tensor([0.0, 0.01, 0.0, 0.0])
    top_k = torch.tensor([VOCAB, 5, VOCAB, 700])
    top_p = torch.tensor([0.99, 0.9, 0.9, 1.0], dtype=torch.float64)
    uniforms = torch.rand(4, dtype=torch.float64, generator=generator)

    def choose(rows: list[int]) -> list[int]:
        weights = relative_weights(logits[rows], temperature[rows])
        threshold = candidate_threshold(weights, top_k[rows], top_p[rows], min_p[rows])
        return draw(weights, threshold, uniforms[rows]).tolist()

    assert choose([0, 1, 2, 3]) == [choose([row])[0] for row in range(4)]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_draw_never_gives_a_token_that_is_no_candidate(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1e-30, 0.0]])
    token = draw(weights, torch.tensor([1e-38]), torch.tensor([uniform], dtype=torch.float64))
    assert token.item() in {2, 4}
