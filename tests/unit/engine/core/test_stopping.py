"""When a sequence ends by its tokens."""

import pytest

from antiphon.services.engine.core.stopping import Verdict, rules_for
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams

EOS = frozenset({2, 3})


def verdict(token_id: int, position: int, *, max_model_len: int = 100, **params: object) -> Verdict | None:
    rules = rules_for(SamplingParams(**params), 10, max_model_len, EOS)  # type: ignore[arg-type]
    return rules.verdict(token_id, position)


def test_any_of_the_models_end_tokens_ends_without_naming_a_stop_token() -> None:
    assert verdict(2, 0) == Verdict("stop")
    assert verdict(3, 0) == Verdict("stop")
    assert verdict(4, 0) is None


def test_end_tokens_of_the_request_take_the_place_of_the_models() -> None:
    assert verdict(9, 0, eos_token_ids=(8, 9)) == Verdict("stop")
    assert verdict(2, 0, eos_token_ids=(8, 9)) is None
    assert verdict(9, 0, eos_token_ids=(8, 9), ignore_eos=True) is None
    assert verdict(7, 0, eos_token_ids=(8, 9), stop_token_ids=(7,)) == Verdict("stop", 7)


def test_end_tokens_of_the_prompts_form_act_beside_the_models() -> None:
    assert verdict(9, 0, end_token_ids=(9,)) == verdict(2, 0, end_token_ids=(9,)) == Verdict("stop")
    assert verdict(9, 0, end_token_ids=(9,), ignore_eos=True) is None
    assert verdict(9, 0, end_token_ids=(9,), eos_token_ids=(8,)) is None


def test_an_ignored_end_token_is_an_ordinary_token() -> None:
    assert verdict(2, 0, ignore_eos=True) is None


def test_the_end_tokens_of_a_conversation_template_act_like_the_models() -> None:
    assert verdict(9, 0, end_token_ids=(8, 9)) == verdict(9, 0, end_token_ids=(9,), stop_token_ids=(9,))
    assert verdict(9, 0, end_token_ids=(8, 9)) == Verdict("stop")
    assert verdict(2, 0, end_token_ids=(8, 9)) == Verdict("stop")
    assert verdict(9, 0, end_token_ids=(8, 9), ignore_eos=True) is None
    assert verdict(9, 0, end_token_ids=(8, 9), min_tokens=1) is None


def test_a_stop_token_ends_and_is_named_even_if_end_tokens_are_ignored() -> None:
    assert verdict(9, 0, stop_token_ids=(8, 9)) == Verdict("stop", 9)
    assert verdict(9, 0, stop_token_ids=(8, 9), ignore_eos=True) == Verdict("stop", 9)
    assert verdict(2, 0, stop_token_ids=(2,), ignore_eos=True) == Verdict("stop", 2)


def test_a_token_that_is_both_counts_as_the_end_token() -> None:
    assert verdict(2, 0, stop_token_ids=(2,)) == Verdict("stop")


@pytest.mark.parametrize("token_id", [2, 9])
def test_min_tokens_must_exist_before_an_end_or_stop_token_counts(token_id: int) -> None:
    counts = [verdict(token_id, position, min_tokens=3, stop_token_ids=(9,)) is not None for position in range(5)]
    assert counts == [False, False, False, True, True]


def test_a_complete_output_of_a_grammar_ends_unless_the_grammar_is_free() -> None:
    asked = {"min_tokens": 3, "ignore_eos": True, "eos_token_ids": (9,)}
    assert verdict(2, 0, grammar=Grammar("regex", "a"), **asked) == Verdict("stop")
    assert verdict(2, 0, grammar=Grammar("tagged_text", "{}"), **asked) is None
    assert verdict(2, 3, grammar=Grammar("tagged_text", "{}"), **asked) == Verdict("stop")


def test_max_tokens_ends_with_length_at_the_last_token_allowed() -> None:
    assert [verdict(7, position, max_tokens=3) for position in range(3)] == [None, None, Verdict("length")]


def test_min_tokens_does_not_lift_the_length_limit() -> None:
    assert verdict(2, 2, max_tokens=3, min_tokens=3) == Verdict("length")


def test_an_end_token_at_the_last_place_allowed_is_a_stop() -> None:
    assert verdict(2, 2, max_tokens=3) == Verdict("stop")


@pytest.mark.spec("S-SRV-032")
def test_the_context_holds_prompt_and_output_together() -> None:
    verdicts = [verdict(7, position, max_tokens=50, max_model_len=13) for position in range(3)]
    assert verdicts == [None, None, Verdict("length")]
