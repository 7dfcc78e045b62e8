import json
from typing import Any

import pytest

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.request_fields import HINTS, REQUIREMENTS, check
from antiphon.services.gateway.apis.openai.schemas import (
    CHAT_DECODER,
    COMPLETION_DECODER,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.edge.http.request_body import read_fields
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from tests.unit.gateway.bodies import STRICT, chat, completion, lenient, refusal

ASKED = {
    "logits_processors": ["x"],
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "chat_template": "{{ x }}",
    "multi_modal_inputs": {"image": "x"},
    "prompt_embeds": "AAAA",
    "guided_jason": {},
}
OF_ENGINES = {
    "system": "Be brief.",
    "history": [["a", "b"]],
    "prompt_token_ids": [1, 2],
    "prompt_token_ids_len": 2,
    "sampling_params": {"n": 1},
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
        ({"prefix": True}, "messages[1].prefix"),
    ],
)
def test_a_field_of_a_message_that_nobody_knows_is_refused_by_name(fields: dict[str, Any], param: str):
    hello = {"role": "user", "content": "hi"}
    error = refusal(chat, "unsupported_parameter", param, messages=[hello, {**hello, **fields}])
    assert param in error.message


def test_fields_of_the_messages_of_several_conversations_are_known_by_their_place():
    body = b'{"messages": [[{"role": "user", "content": "x"}], [{"role": "user", "contents": "x"}]]}'
    with pytest.raises(ServiceError) as raised, serving(Call(strict=STRICT)):
        check(read_fields(body), ChatBody)
    assert (raised.value.code, raised.value.param) == ("unsupported_parameter", "messages[1][0].contents")


def test_a_message_whose_field_names_are_no_text_is_no_json():
    body = b'{"messages": [{"\xff": 1, "role": "user", "content": "x"}]}'
    with pytest.raises(ServiceError) as raised:
        check(read_fields(body), ChatBody)
    assert raised.value.code == "invalid_json"
    check(read_fields(b'{"messages": [1]}'), ChatBody)


def test_hints_and_unknown_fields_are_answered_and_told():
    messages = [{"role": "user", "content": "x", "audio": {"id": "x"}, "new": 1}] * 3
    options = {"include_usage": True, "new": 1, "include_obfuscation": True}
    made, ignored = lenient(
        chat, messages=messages, user="me", verbosity="low", chat_id="7", stream=True, stream_options=options, seed=3
    )
    assert made.params.seed == 3
    assert ignored == [
        "verbosity",
        "chat_id",
        "messages[].audio",
        "messages[].new",
        "stream_options.new",
        "stream_options.include_obfuscation",
    ]
    assert lenient(completion, **{"x" * 1000: 1})[1] == ["x" * (limits.FIELD_NAME_CHARS_MAX - 1) + "?"]
    assert lenient(chat, user="", metadata={}, store=False, new_field=None)[1] == []
    assert len(lenient(chat, **{f"new_{number}": 1 for number in range(100)})[1]) == limits.IGNORED_NAMES_MAX


@pytest.mark.parametrize(("name", "value"), [("guided_jason", {}), ("beam_width", 4), ("audio", {"voice": "x"})])
def test_what_the_answer_would_be_wrong_without_is_refused_always(name: str, value: Any):
    with pytest.raises(ServiceError) as raised:
        lenient(chat, **{name: value})
    assert (raised.value.code, raised.value.param) == ("unsupported_parameter", name)


def test_other_servers_names_of_fields_that_act_are_read_as_these():
    made, ignored = lenient(completion, n_predict=7, repeat_penalty=1.5, cache_prompt=True)
    assert (made.params.max_tokens, made.params.repetition_penalty, ignored) == (7, 1.5, ["cache_prompt"])
    assert lenient(chat, n_predict=-1)[0].params.max_tokens == 0
    made, ignored = lenient(completion, n_predict=7, max_tokens=3)
    assert (made.params.max_tokens, ignored) == (3, ["n_predict"])
    for name, kind, value in (
        ("json_schema", "json", {"type": "object"}),
        ("grammar", "grammar", 'root ::= "a"'),
        ("ebnf", "grammar", 'root ::= "a"'),
        ("regex", "regex", "a+"),
    ):
        grammar = lenient(chat, **{name: value})[0].params.grammar
        assert grammar is not None
        assert grammar.kind == kind
    variables = lenient(chat, enable_thinking=False, chat_template_kwargs={"a": 1})[0].inputs.template_variables
    assert json.loads(variables) == {"a": 1, "enable_thinking": False}
    _, ignored = lenient(chat, enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert ignored == ["enable_thinking"]


def test_members_of_the_object_reasoning_are_read_as_the_fields_that_act_here():
    def read(reasoning: Any, **fields: Any) -> tuple[ChatBody, list[str]]:
        call = Call()
        with serving(call):
            data = json.dumps({"messages": [], "reasoning": reasoning, **fields}, indent=1).encode()
            body = request_fields.read(data, CHAT_DECODER)
        return body, list(call.ignored)

    body, ignored = read({"max_tokens": 9, "effort": "high", "enabled": True, "exclude": True})
    assert (body.thinking_token_budget, body.reasoning_effort) == (9, "high")
    assert (body.chat_template_kwargs, ignored) == ({"enable_thinking": True}, ["reasoning.exclude"])
    body, ignored = read({"max_tokens": 9}, thinking_token_budget=5)
    assert (body.thinking_token_budget, ignored) == (5, ["reasoning.max_tokens"])
    assert read({}) == read(None) == (read(None)[0], [])
    assert read("high")[1] == ["reasoning"]
    with pytest.raises(ServiceError):
        read({"max_tokens": "many"})
    call = Call()
    with serving(call):
        request_fields.read(b'{"prompt": "x", "reasoning": {"max_tokens": 9}}', COMPLETION_DECODER)
    assert list(call.ignored) == ["reasoning"]


def test_a_request_id_in_the_body_is_that_of_the_header():
    call = Call()
    with serving(call):
        request_fields.read(b'{"prompt": "x", "request_id": "mine-1"}', COMPLETION_DECODER)
        request_fields.read(b'{"prompt": "x", "request_id": "second"}', COMPLETION_DECODER)
    assert (call.client_request_id, call.ignored) == ("mine-1", {})
    with serving(call := Call()):
        request_fields.read(b'{"prompt": "x", "request_id": "a b"}', COMPLETION_DECODER)
    assert call.client_request_id == ""


def test_an_answer_can_be_sent_back_as_a_message():
    nothing = {"refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": None}
    [message] = chat(messages=[{"role": "assistant", "content": "x", **nothing, "new_field": None}]).inputs.messages
    assert (message.content, message.fields) == ("x", b"")


@pytest.mark.parametrize("name", ["tools", "tool_choice", "functions", "documents", "continue_final_message"])
def test_what_belongs_to_conversations_is_refused_for_completions(name: str):
    error = refusal(completion, "unsupported_parameter", name, **{name: []})
    assert "/v1/chat/completions" in error.message


def test_what_acts_is_in_no_list_of_what_does_not():
    for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
        assert set(body.__struct_fields__) & set(REQUIREMENTS) <= {"suffix"}  # it acts on completions alone
        # These act on completions and chat, and are hints where nothing is generated.
        assert set(body.__struct_fields__) & HINTS <= {"user", "prompt_cache_retention"}
    assert not HINTS & set(REQUIREMENTS)
    assert max(map(len, (*REQUIREMENTS, *HINTS))) <= limits.FIELD_NAME_CHARS_MAX
