"""Calls of tools that a request forces, through the whole system, with a model whose weights are random."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.system.api.asking import HELLO, chat

pytestmark = [pytest.mark.system, pytest.mark.nats]
COLOR: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"$ref": "#/$defs/Color"}, "shade": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["color", "shade"],
    "additionalProperties": False,
    "$defs": {"Color": {"enum": ["red", "green"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOR}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
"""Every call of these tools is short, whatever the model."""
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
PAINT: Any = {"type": "function", "function": {"name": "paint"}}


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_one_of_the_tools_and_its_arguments_match_the_schema(
    client: openai.OpenAI, seed: int
) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None), answer
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_named_function_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": PAINT, "seed": 7}
    [choice] = chat(client, **fields).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "paint"
    jsonschema.validate(json.loads(call.function.arguments), COLOR)
    stream = client.chat.completions.create(model="model", messages=HELLO, stream=True, extra_body=fields)  # type: ignore[call-overload]
    calls = [one for chunk in stream for choice in chunk.choices for one in choice.delta.tool_calls or ()]
    assert (calls[0].function.name, calls[0].index) == ("paint", 0)
    assert "".join(one.function.arguments for one in calls) == call.function.arguments


def test_a_schema_that_cannot_be_used_is_refused_by_name(client: openai.OpenAI) -> None:
    broken: Any = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/None"}}}
    named: Any = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        with pytest.raises(openai.BadRequestError) as error:
            chat(client, tools=[TOOLS[0], broken], tool_choice=choice)
        assert error.value.param == "tools[1].function.parameters"
