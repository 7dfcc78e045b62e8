"""Calls of strict functions that the model chooses itself, through the whole system, with random weights.

A bias makes the model begin with a brace, which begins a call in the format of the system, and end where it may.
"""

import json
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from tests.system.api.asking import HELLO, chat

pytestmark = [pytest.mark.system, pytest.mark.nats]
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"$ref": "#/$defs/Days"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": PLACE, "now": NOTHING}


def tool(name: str, schema: Any, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True, **fields}}


TOOLS = [tool(name, schema) for name, schema in SCHEMAS.items()]


@pytest.fixture
def calling(tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields of a request with which the model calls a tool and ends behind the call."""
    brace, end = tokenizer.token_to_id("{"), tokenizer.token_to_id("<|im_end|>")
    blanks = [tokenizer.encode(blank).ids[0] for blank in " \n\t\r"]
    bias = {str(brace): 50, str(end): 100, **{str(blank): -100 for blank in blanks}}
    return {"logit_bias": bias, "min_tokens": 1, "temperature": 1, "max_tokens": 180}


@pytest.mark.parametrize("seed", range(6))
def test_a_strict_function_that_the_model_calls_gets_arguments_that_follow_its_schema(
    client: openai.OpenAI, calling: dict[str, Any], seed: int
) -> None:
    fields: Any = {**calling, "tools": TOOLS, "tool_choice": "auto", "seed": seed}
    [choice] = chat(client, **fields).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None), choice
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    stream = client.chat.completions.create(model="model", messages=HELLO, stream=True, extra_body=fields)  # type: ignore[call-overload]
    pieces = [one for chunk in stream for choice in chunk.choices for one in choice.delta.tool_calls or ()]
    assert pieces[0].function.name == call.function.name
    assert "".join(one.function.arguments for one in pieces) == call.function.arguments


def test_without_a_call_the_text_is_free(client: openai.OpenAI) -> None:
    [choice] = chat(client, tools=TOOLS, temperature=1, max_tokens=40, ignore_eos=True, seed=2).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert len(choice.message.content or "") > 10


def test_a_schema_that_cannot_be_compiled_is_refused_by_its_name(client: openai.OpenAI) -> None:
    broken = tool("f", {"type": "object", "properties": {"x": {"type": "strng"}}})
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, tools=[*TOOLS, broken])
    assert (error.value.status_code, error.value.param) == (400, "tools[2].function.parameters")
    assert "'tools[2].function.parameters' cannot be used" in error.value.message
    # A function that is not strict takes any arguments, so its schema is only told to the model.
    broken["function"]["strict"] = False
    assert chat(client, tools=[*TOOLS, broken], max_tokens=1).choices[0].finish_reason == "length"
