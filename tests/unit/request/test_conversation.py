"""Messages of a conversation with the structure that a chat template needs: calls of tools, results, reasoning."""

import json
from typing import Any

import msgspec
import pytest

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage
from antiphon.shared.request import conversation

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(*messages: dict[str, Any]) -> tuple[ChatMessage, ...]:
    return conversation.messages(msgspec.convert(messages, list[conversation.Turn]), 300)


def fields(**message: Any) -> Any:
    [found] = read(message)
    return json.loads(found.fields) if found.fields else {}


def refused(code: str, param: str, **message: Any) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        read({"role": "user", "content": "hi"}, message)
    assert (raised.value.code, raised.value.param) == (code, param), raised.value.message
    return raised.value


def test_a_call_reaches_the_template_with_its_arguments_as_an_object() -> None:
    [found] = read({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert (found.role, found.content) == ("assistant", "")
    function = {"name": "add", "arguments": {"a": 1}}
    assert json.loads(found.fields) == {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


@pytest.mark.parametrize(("written", "read_as"), [("", {}), (" ", {}), (None, {}), ({"a": [1]}, {"a": [1]})])
def test_arguments_may_be_empty_or_an_object_already(written: Any, read_as: Any) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": written}}
    [made] = fields(role="assistant", tool_calls=[call])["tool_calls"]
    assert made["function"]["arguments"] == read_as


def test_numbers_of_arguments_stay_what_they_are() -> None:
    text = '{"big": 123456789012345678901234567890, "float": 1.0}'
    call = {"id": "x", "function": {"name": "f", "arguments": text}}
    [found] = read({"role": "assistant", "tool_calls": [call]})
    assert b'"big":123456789012345678901234567890' in found.fields
    assert b'"float":1.0' in found.fields


@pytest.mark.parametrize("text", ["{", "[1]", "5", "null", '{"a":' * 100 + "1" + "}" * 100, "[" * 10_000])
def test_arguments_that_are_no_object_are_refused_where_they_stand(text: str) -> None:
    calls = [CALL, {"id": "x", "function": {"name": "f", "arguments": text}}]
    refused("invalid_value", "messages[1].tool_calls[1].function.arguments", role="assistant", tool_calls=calls)


def test_a_tools_result_names_its_call() -> None:
    assert fields(role="tool", content="3", tool_call_id="call_1") == {"tool_call_id": "call_1"}
    refused("missing_required_parameter", "messages[1].tool_call_id", role="tool", content="3")
    refused("missing_required_parameter", "messages[1].content", role="tool", tool_call_id="c")


def test_a_result_gets_the_name_of_the_function_that_was_called() -> None:
    made = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2", "function": {"name": "sub"}}]}
    results = [{"role": "tool", "content": "3", "tool_call_id": name} for name in ("call_2", "call_1", "call_3")]
    assert [message.name for message in read(made, *results)][1:] == ["sub", "add", ""]
    assert read(made, {**results[0], "name": "own"})[1].name == "own"


def test_the_former_form_of_calls_and_results_is_read() -> None:
    [call] = fields(role="assistant", content=None, function_call={"name": "add", "arguments": "{}"})["tool_calls"]
    assert call == {"type": "function", "function": {"name": "add", "arguments": {}}}
    [result] = read({"role": "function", "name": "add", "content": "3"})
    assert result == ChatMessage(role="tool", content="3", name="add")
    refused("missing_required_parameter", "messages[1].name", role="function", content="3")
    refused(
        "invalid_value",
        "messages[1].function_call",
        role="assistant",
        tool_calls=[CALL],
        function_call={"name": "add", "arguments": "{}"},
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_given_to_the_template_under_both_names(name: str) -> None:
    expected = {"reasoning": "think", "reasoning_content": "think"}
    assert fields(role="assistant", content="x", **{name: "think"}) == expected


@pytest.mark.parametrize(
    ("code", "param", "message"),
    [
        ("missing_required_parameter", "messages[1].content", {"role": "assistant"}),
        ("missing_required_parameter", "messages[1].content", {"role": "assistant", "tool_calls": []}),
        ("invalid_value", "messages[1].tool_calls", {"role": "user", "content": "x", "tool_calls": [CALL]}),
        ("invalid_value", "messages[1].reasoning", {"role": "system", "content": "x", "reasoning": "r"}),
        ("invalid_value", "messages[1].tool_call_id", {"role": "user", "content": "x", "tool_call_id": "c"}),
        ("unsupported_parameter", "messages[1].tool_calls[0].type", {
            "role": "assistant", "tool_calls": [{"type": "custom", "id": "x"}],
        }),
        ("missing_required_parameter", "messages[1].tool_calls[0].function", {
            "role": "assistant", "tool_calls": [{"id": "x"}],
        }),
        ("invalid_value", "messages[1].tool_calls", {
            "role": "assistant", "tool_calls": [CALL] * (limits.TOOLS_MAX + 1),
        }),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_the_role_are_refused(code: str, param: str, message: Any) -> None:
    refused(code, param, **message)
