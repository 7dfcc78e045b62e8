"""Prompts and parameters in every form that a call may give them."""

from typing import Any

import pytest

import antiphon
from antiphon import SamplingParams
from antiphon.offline.prompts.engine_form import EngineForm
from antiphon.offline.prompts.inputs import Prompt, paired, prompts_of


def test_every_form_of_a_prompt() -> None:
    assert prompts_of("a", None) == prompts_of(["a"], None) == prompts_of({"prompt": "a"}, None) == [Prompt(text="a")]
    assert prompts_of(["a", {"prompt_token_ids": [1, 2]}], None) == [
        Prompt(text="a"),
        Prompt(text=None, token_ids=(1, 2)),
    ]
    assert prompts_of(None, [1, 2]) == prompts_of(None, [[1, 2]]) == [Prompt(text=None, token_ids=(1, 2))]
    assert prompts_of(["a", "b"], [[1], [2]]) == [Prompt(text="a", token_ids=(1,)), Prompt(text="b", token_ids=(2,))]
    assert prompts_of({"prompt": "a", "prompt_token_ids": [1]}, None) == [Prompt(text="a", token_ids=(1,))]
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
            "'multi_modal_data' has 'video': only images are taken",
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


def test_the_name_of_inputs_in_other_programs_is_public() -> None:
    assert antiphon.PromptInputs is antiphon.PromptInput


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, TOLD = message("user", "a"), message("assistant", "b")


@pytest.mark.spec("S-API-004", "S-API-044", "S-API-046")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompt": "a", "request_id": "r"}, Prompt(text="a", form=EngineForm(request_id="r"))),
        ({"prompt_token_ids": [1], "prompt_token_ids_len": 1, "eos_token_ids": [2]},
         Prompt(text=None, token_ids=(1,), form=EngineForm(eos_token_ids=(2,)))),
        ({"prompt": "a", "arrival_time": 5, "preprocess_start_time": 1.0, "preprocess_end_time": 3.5},
         Prompt(text="a", form=EngineForm(arrival_time=5.0, preprocess_s=2.5))),
        ({"messages": [ASKED]}, Prompt(text="", form=EngineForm(messages=(ASKED,)))),
        ({"messages": [ASKED], "system": "s"},
         Prompt(text="", form=EngineForm(messages=(message("system", "s"), ASKED)))),
        ({"prompt": "c", "history": [["a", "b"]], "system": "s"},
         Prompt(text="", form=EngineForm(messages=(message("system", "s"), ASKED, TOLD, message("user", "c"))))),
    ],
)  # fmt: skip
def test_a_prompt_may_be_an_engines_request(given: Any, expected: Prompt) -> None:
    assert prompts_of(given, None, takes_engine_form=True) == [expected]
    with pytest.raises(ValueError, match=r"prompts\[0\] has "):
        prompts_of(given, None)


@pytest.mark.spec("S-API-004")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": "a", "request_id": ""}, "'request_id' must have between 1 and"),
        ({"prompt": "a", "request_id": 3}, "Expected `str"),
        ({"request_id": "r"}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"history": [["a", "b"]]}, "Missing required parameter: 'prompt'"),
        ({"prompt": "c", "history": [["a"]]}, r"'history\[0\]' must be a pair of texts"),
        ({"prompt": "c", "messages": [ASKED]}, "'prompt' cannot be given together with 'messages'"),
        ({"prompt_token_ids": [1], "prompt": "a", "system": "s"}, "'prompt_token_ids' cannot be given together"),
        ({"messages": [message("system", "a")], "system": "s"}, "'system' cannot be given together with a system"),
        ({"prompt_token_ids": [1], "prompt_token_ids_len": 2}, "'prompt_token_ids_len' must be the number of"),
        ({"prompt": "a", "preprocess_start_time": 2.0}, "Missing required parameter: 'preprocess_end_time'"),
        ({"prompt": "a", "arrival_time": -1}, "'arrival_time' must not be negative"),
        ({"prompt": "a", "request_id": "r", "text": "b"}, r"prompts\[0\] has 'text'"),
    ],
)
def test_an_engines_request_that_cannot_be_is_refused_by_field(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prompts_of(given, None, takes_engine_form=True)
