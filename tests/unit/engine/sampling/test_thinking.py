"""Thinking budgets: when the closing mark is forced, with drafts, after a move, and beside other parameters."""

import random
from collections.abc import Sequence

import pytest

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.processor import Adjustment, LogitsProcessor
from antiphon.services.engine.sampling.processors import processors_of
from antiphon.services.engine.sampling.thinking import ThinkingLimit
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget

SIZE = 100
OPENING, CLOSING = (7,), (8, 9, 8, 10)


def token_text(token_id: int, shown: Sequence[int]) -> bytes:
    """Returns one byte for each token; 90 is a special token."""
    return b"" if token_id == 90 and token_id not in shown else bytes([token_id])


def thinking(
    budget: int,
    opening: tuple[int, ...] = OPENING,
    closing: tuple[int, ...] = CLOSING,
    *,
    inside: bool = False,
    repeats: bool = False,
) -> ThinkingBudget:
    return ThinkingBudget(budget=budget, opening=opening, closing=closing, inside=inside, repeats=repeats)


class Texts:
    """A worker's texts of tokens; it has no grammars."""

    def processor(self, grammar: Grammar) -> LogitsProcessor:
        raise AssertionError(grammar)

    token_text = staticmethod(token_text)


def limit(budget: int, *output: int, inside: bool = False, repeats: bool = False) -> ThinkingLimit:
    made = ThinkingLimit(thinking(budget, inside=inside, repeats=repeats), SIZE, token_text)
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
        ((1, 7, 1, 2, 3, 4), False, None),  # and so is what looks like reasoning after other text
        ((90, 32, 10, 7, 1, 2, 3), False, 8),  # but for whitespace and special tokens, which are not shown
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
        repeats = draw.random() < 0.5
        one = limit(budget, *output[:split], inside=inside, repeats=repeats)
        one.adjust(drafted, len(output), output[split:])
        for token_id in output[split:]:
            one.append(token_id)
        one.adjust(known, len(output), ())
        assert [None if each.mask is None else each.mask.tolist() for each in (drafted,)] == [
            None if each.mask is None else each.mask.tolist() for each in (known,)
        ]
        assert limit(budget, *output, inside=inside, repeats=repeats).forced() == one.forced()


def test_what_other_parameters_forbid_is_not_forced() -> None:
    ended = thinking(0, inside=True)
    for allowed, expected in (((1, 2), [1, 2]), ((1, 8), [8])):
        params = SamplingParams(allowed_token_ids=allowed, thinking=ended)
        adjustment = Adjustment()
        for processor in processors_of(params, (), (), frozenset(), SIZE, Texts()):
            processor.adjust(adjustment, 0, ())
        assert adjustment.mask is not None
        assert masks.allowed_ids(adjustment.mask, SIZE).tolist() == expected


SPELLED = {
    1: b"<think>\n",
    2: b"x",
    3: b" </",
    4: b"</",
    5: b"think",
    6: b">",
    7: b">\n\n",
    8: b"</thi",
    9: b"\xe2\x9c",
}
"""Tokens that spell marks in other ways than a tokenizer does, which joins them to the text around them."""


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ((1, 2), None),
        ((1, 2, 2), 4),
        ((1, 2, 2, 4), 5),
        ((1, 2, 3), 5),  # the mark has begun after a space
        ((1, 2, 3, 5), 6),
        ((1, 2, 8), 4),  # no token of the mark continues this
        ((1, 2, 9, 9), 4),
        ((1, 3, 5, 7, 2, 2, 2), None),
        ((1, 2, 2, 4, 5, 6), None),
        ((1, 2, 2, 4, 5, 7), None),
    ],
)
def test_marks_are_found_in_the_text_whatever_tokens_spell_them(output: tuple[int, ...], forced: int | None) -> None:
    texts = SPELLED | {10: b"<"}
    budget = thinking(2, (10, 5, 6), (4, 5, 6))
    made = ThinkingLimit(budget, SIZE, lambda token_id, shown: texts[token_id])
    for token_id in output:
        made.append(token_id)
    assert made.forced() == forced


def test_the_space_with_which_a_tokenizer_begins_each_text_is_no_part_of_a_mark() -> None:
    texts = SPELLED | {10: b" <", 11: b"<"}
    made = ThinkingLimit(thinking(0, (10, 5, 6), (3, 5, 6)), SIZE, lambda token_id, shown: texts[token_id])
    for token_id in (11, 5, 6, 4):
        made.append(token_id)
    assert made.forced() == 5


def test_reasoning_that_repeats_has_one_budget_and_does_not_begin_again_after_it() -> None:
    opening, closing = (7, 6, 5), (8,)

    def made(*output: int) -> ThinkingLimit:
        found = ThinkingLimit(thinking(3, opening, closing, repeats=True), SIZE, token_text)
        for token_id in output:
            found.append(token_id)
        return found

    assert made(*opening, 1, 2).forced() is None
    assert made(*opening, 1, 2, 8, 4, 4, 4, *opening).forced() is None
    assert made(*opening, 1, 8, 4, 4, 4, *opening, 1, 1).forced() == 8
    ended = (*opening, 1, 2, 8, 4, *opening, 3, 8, 4)
    assert [made(*ended, *begun).forbidden() for begun in ((), (7,), (7, 6), (4,))] == [None, 6, 5, None]
    assert made(*ended, *opening).forced() == 8
    adjustment = Adjustment()
    made(*ended).adjust(adjustment, len(ended) + 1, (7,))
    assert adjustment.mask is not None
    assert sorted({*range(SIZE)} - {*masks.allowed_ids(adjustment.mask, SIZE).tolist()}) == [6]


def test_a_mark_without_text_is_never_found() -> None:
    made = ThinkingLimit(thinking(1, (1,), (2,), inside=True), SIZE, lambda token_id, shown: b"")
    made.append(3)
    assert made.forced() == 2
    for token_id in (2, 2):
        made.append(token_id)
    assert made.forced() == 2
