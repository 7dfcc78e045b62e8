from typing import Any

import pytest

from services.gateway.openai.bodies.unsupported_params import NO_EFFECT, UNSUPPORTED, check
from services.gateway.openai.body import read_fields
from services.gateway.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from shared import limits
from shared.errors import ServiceError
from tests.unit.gateway.bodies import chat, completion, refusal

ASKED = {
    "logits_processors": ["x"],
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "chat_template": "{{ x }}",
    "multi_modal_inputs": {"image": "x"},
    "mm_processor_kwargs": {"a": 1},
    "prompt_embeds": "AAAA",
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "media_io_kwargs": {"a": 1},
    "verbosity": "low",
    "guided_jason": {},
}
OF_ENGINES = {
    "system": "Be brief.",
    "history": [["a", "b"]],
    "prompt_token_ids": [1, 2],
    "prompt_token_ids_len": 2,
    "sampling_params": {"n": 1},
    "request_id": "r",
    "arrival_time": 1.5,
    "preprocess_start_time": 1.5,
    "preprocess_end_time": 1.5,
}
HARMLESS = {
    "suffix": "",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "logit_bias": {},
    "modalities": ["text"],
    "guided_json": None,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "reasoning_effort": "none",
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "new_field": None,
}


@pytest.mark.spec("S-API-028")
def test_a_suffix_in_chat_is_refused():
    error = refusal(chat, "unsupported_parameter", "suffix", suffix="}")
    assert "/v1/completions" in error.message


@pytest.mark.parametrize("read", [completion, chat])
def test_a_beam_width_is_refused_with_the_fields_to_give_instead(read: Any):
    error = refusal(read, "unsupported_parameter", "beam_width", beam_width=4)
    assert error.message.endswith("Give 'use_beam_search' and 'best_of'.")


@pytest.mark.matrix("S-12")
@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(("name", "value"), ASKED.items())
def test_what_is_not_supported_is_refused_by_name(read: Any, name: str, value: Any):
    error = refusal(read, "unsupported_parameter", name, **{name: value})
    assert "not supported yet" in error.message


@pytest.mark.parametrize(("name", "value"), [*HARMLESS.items(), *((name, None) for name in ASKED)])
def test_values_that_ask_for_nothing_pass(name: str, value: Any):
    chat(**{name: value})


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(("name", "value"), OF_ENGINES.items())
def test_names_of_an_engines_own_request_are_refused_with_what_to_send_instead(read: Any, name: str, value: Any):
    error = refusal(read, "unsupported_parameter", name, **{name: value})
    assert error.message.startswith(f"The parameter '{name}' is not supported at this endpoint. Send ")


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("guide_json", "guided_json"), ("stores", "store")],
)
def test_a_name_that_nobody_knows_is_refused_with_the_nearest(read: Any, name: str, near: str):
    error = refusal(read, "unsupported_parameter", name, **{name: 1})
    assert error.message == f"Unrecognized request argument supplied: '{name}'. Did you mean '{near}'?"


def test_a_name_that_is_like_none_is_refused_without_a_guess_and_a_long_one_is_cut():
    assert refusal(chat, "unsupported_parameter", "qqq", qqq=1).message.endswith("supplied: 'qqq'.")
    error = refusal(chat, "unsupported_parameter", "q" * 63 + "…", **{"q" * 100_000: 1})
    assert len(error.message) < 150
    with pytest.raises(ServiceError, match="a field whose name is empty"):
        chat(**{"": 1})


@pytest.mark.parametrize(
    ("options", "named"),
    [({"include_usag": True}, "include_usag"), ({"continuous": 1}, "continuous")],
)
def test_options_of_a_stream_are_looked_at_too(options: dict[str, bool], named: str):
    refusal(chat, "unsupported_parameter", f"stream_options.{named}", stream=True, stream_options=options)
    chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False, named: None})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": "x"}, "messages[1].contents"),
        ({"refusal": "no"}, "messages[1].refusal"),
        ({"prefix": True}, "messages[1].prefix"),
        ({"audio": {"id": "x"}}, "messages[1].audio"),
    ],
)
def test_a_field_of_a_message_that_nobody_knows_is_refused_by_name(fields: dict[str, Any], param: str):
    hello = {"role": "user", "content": "hi"}
    error = refusal(chat, "unsupported_parameter", param, messages=[hello, {**hello, **fields}])
    assert param in error.message


def test_fields_of_the_messages_of_several_conversations_are_known_by_their_place():
    body = b'{"messages": [[{"role": "user", "content": "x"}], [{"role": "user", "contents": "x"}]]}'
    with pytest.raises(ServiceError) as raised:
        check(read_fields(body), ChatBody)
    assert (raised.value.code, raised.value.param) == ("unsupported_parameter", "messages[1][0].contents")


def test_a_message_whose_field_names_are_no_text_is_no_json():
    body = b'{"messages": [{"\xff": 1, "role": "user", "content": "x"}]}'
    with pytest.raises(ServiceError) as raised:
        check(read_fields(body), ChatBody)
    assert raised.value.code == "invalid_json"
    check(read_fields(b'{"messages": [1]}'), ChatBody)


def test_an_answer_can_be_sent_back_as_a_message():
    nothing = {"refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": None}
    [message] = chat(messages=[{"role": "assistant", "content": "x", **nothing, "new_field": None}]).messages
    assert (message.content, message.fields) == ("x", b"")


@pytest.mark.parametrize("name", ["tools", "tool_choice", "functions", "documents", "continue_final_message"])
def test_what_belongs_to_conversations_is_refused_for_completions(name: str):
    error = refusal(completion, "unsupported_parameter", name, **{name: []})
    assert "/v1/chat/completions" in error.message


def test_what_acts_is_in_no_list_of_what_does_not():
    for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
        assert set(body.__struct_fields__) & set(UNSUPPORTED) <= {"suffix"}  # it acts on completions alone
        assert set(body.__struct_fields__) & NO_EFFECT <= {"user"}
    assert not NO_EFFECT & set(UNSUPPORTED)
    assert max(map(len, (*UNSUPPORTED, *NO_EFFECT))) <= limits.FIELD_NAME_CHARS_MAX
