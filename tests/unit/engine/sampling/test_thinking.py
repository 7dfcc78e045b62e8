"""Thinking budgets: when the closing mark is forced, with drafts, after a move, and beside other parameters."""

import random

import pytest

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.services.engine.sampling.processors import processors_of
from antiphon.services.engine.sampling.thinking import ThinkingLimit
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget

SIZE = 100
OPENING, CLOSING = (7,), (8, 9, 8, 10)


def limit(budget: int, *output: int, inside: bool = False) -> ThinkingLimit:
    made = ThinkingLimit(ThinkingBudget(budget, OPENING, CLOSING, inside), SIZE)
    for token_id in output:
        made.append(token_id)
    return made


@pytest.mark.parametrize(
    ("output", "inside", "forced"),
    [
        ((), False, None),
        ((1, 2, 3, 4, 5), False, None),
        ((7,), False, None),
        ((7, 1, 2), False, None),
        ((7, 1, 2, 3), False, 8),
        ((1, 2), True, None),
        ((1, 2, 3), True, 8),
        ((1, 2, 3, 8), True, 9),
        ((1, 2, 3, 8, 9), True, 8),
        ((1, 2, 3, 8, 9, 8), True, 10),
        ((1, 2, 3, 8, 9, 8, 10), True, None),
        ((1, 2, 8), True, 9),  # the model has begun the mark itself
        ((1, 8, 9, 8, 10, 1, 2, 3, 4), True, None),
        ((8, 9, 8, 10, 7, 1, 2, 3, 4), True, None),  # later reasoning is a part of the answer
    ],
)
def test_the_closing_mark_is_forced_when_the_budget_is_used_up(
    output: tuple[int, ...], inside: bool, forced: int | None
) -> None:
    assert limit(3, *output, inside=inside).forced() == forced


def test_a_budget_of_nothing_ends_the_reasoning_at_once() -> None:
    assert limit(0, inside=True).forced() == CLOSING[0]
    assert limit(0).forced() is None
    assert limit(0, *OPENING).forced() == CLOSING[0]


def test_the_state_depends_on_the_output_alone_with_drafts_as_without() -> None:
    draw = random.Random(1)
    for _ in range(500):
        output = [draw.choice((*OPENING, *CLOSING, 1)) for _ in range(draw.randrange(12))]
        inside, budget, split = draw.random() < 0.5, draw.randrange(5), draw.randrange(len(output) + 1)
        drafted, known = Adjustment(), Adjustment()
        one = limit(budget, *output[:split], inside=inside)
        one.adjust(drafted, len(output), output[split:])
        for token_id in output[split:]:
            one.append(token_id)
        one.adjust(known, len(output), ())
        assert [None if each.mask is None else each.mask.tolist() for each in (drafted,)] == [
            None if each.mask is None else each.mask.tolist() for each in (known,)
        ]
        assert limit(budget, *output, inside=inside).forced() == one.forced()


def test_what_other_parameters_forbid_is_not_forced() -> None:
    thinking = ThinkingBudget(0, OPENING, CLOSING, True)
    for allowed, expected in (((1, 2), [1, 2]), ((1, 8), [8])):
        params = SamplingParams(allowed_token_ids=allowed, thinking=thinking)
        adjustment = Adjustment()
        for processor in processors_of(params, (), (), frozenset(), SIZE, None):
            processor.adjust(adjustment, 0, ())
        assert adjustment.mask is not None
        assert masks.allowed_ids(adjustment.mask, SIZE).tolist() == expected
