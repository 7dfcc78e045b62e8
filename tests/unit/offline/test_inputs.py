"""Prompts and parameters in every form that a call may give them."""

from typing import Any

import pytest

from antiphon import SamplingParams
from antiphon.offline.prompts.inputs import Prompt, paired, prompts_of


def test_every_form_of_a_prompt() -> None:
    assert prompts_of("a", None) == prompts_of(["a"], None) == prompts_of({"prompt": "a"}, None) == [Prompt("a")]
    assert prompts_of(["a", {"prompt_token_ids": [1, 2]}], None) == [Prompt("a"), Prompt(None, (1, 2))]
    assert prompts_of(None, [1, 2]) == prompts_of(None, [[1, 2]]) == [Prompt(None, (1, 2))]
    assert prompts_of(["a", "b"], [[1], [2]]) == [Prompt("a", (1,)), Prompt("b", (2,))]
    assert prompts_of({"prompt": "a", "prompt_token_ids": [1]}, None) == [Prompt("a", (1,))]
    assert prompts_of([], None) == []


@pytest.mark.parametrize(
    ("prompts", "token_ids", "said"),
    [
        (None, None, "Give prompts, or prompt_token_ids"),
        (["a", "b"], [[1]], "There are 2 prompts and 1 prompt_token_ids"),
        (["a", {}], None, r"prompts\[1\] needs 'prompt' or 'prompt_token_ids'"),
        ([{"text": "a"}], None, r"prompts\[0\] has 'text'"),
        (
            [{"prompt": "a", "multi_modal_data": {"video": 1}}],
            None,
            "'multi_modal_data' has 'video': only pictures are taken",
        ),
        (None, [[1], []], r"prompt_token_ids\[1\] must not be empty"),
    ],
)
def test_a_wrong_call_is_a_value_error_that_names_the_prompt(prompts: Any, token_ids: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prompts_of(prompts, token_ids)


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        (["a", 3], None),
        ([{"prompt": 3}], None),
        (None, [["a"]]),
        (None, [[True]]),
        ([{"prompt": "a", "multi_modal_data": {"image": "a.png"}}], None),
        ([{"prompt": "a", "multi_modal_data": [1]}], None),
    ],
)
def test_a_prompt_of_another_type_is_a_type_error(prompts: Any, token_ids: Any) -> None:
    with pytest.raises(TypeError):
        prompts_of(prompts, token_ids)


def test_parameters_are_for_all_prompts_or_one_for_each() -> None:
    one, other = SamplingParams(n=1), SamplingParams(n=2)
    assert paired(None, SamplingParams, 2, "sampling_params") == [None, None]
    assert paired(one, SamplingParams, 2, "sampling_params") == [one, one]
    assert paired([one, other], SamplingParams, 2, "sampling_params") == [one, other]
    with pytest.raises(ValueError, match="There are 2 prompts and 1 sampling_params"):
        paired([one], SamplingParams, 2, "sampling_params")
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams"):
        paired([3], SamplingParams, 1, "sampling_params")  # pyright: ignore[reportArgumentType]
