"""The conversion of a chat body as a whole: strict functions, and what they cannot be combined with."""

import dataclasses
from typing import Any

import msgspec
import pytest

from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.chat import ChatRequest, chat_request
from antiphon.services.gateway.apis.openai.schemas import ChatBody
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters import tagged_text
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.tagged_text import TaggedText
from tests.unit.gateway.bodies import CARD, HELLO
from tests.unit.gateway.outputs import TOOLS

HERMES = dataclasses.replace(CARD, tool_format="hermes", reasoning_format="qwen3")
STRICT: list[Any] = [TOOLS[0], {"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
LEGACY = [one["function"] for one in STRICT]


def converted(card: ModelCard = HERMES, settings: Any = None, **fields: Any) -> ChatRequest:
    body = msgspec.convert({"messages": HELLO, **fields}, ChatBody)
    return chat_request(body, card, "r", RequestDefaults(), GatewaySettings(**(settings or {})))


def grammar(card: ModelCard = HERMES, **fields: Any) -> tuple[TaggedText, str] | None:
    request = converted(card, **fields).request
    found = request.params.grammar
    if found is None:
        return None
    assert found.kind == "tagged_text"
    return tagged_text.decode(found.text), request.pending.grammar_param


def test_only_a_strict_function_that_the_model_may_call_needs_a_grammar() -> None:
    assert grammar() is None
    assert grammar(tools=TOOLS) is None
    assert grammar(tools=STRICT, tool_choice="none") is None
    found = grammar(tools=STRICT)
    assert found is not None
    assert [tag.mark for tag in found[0].tags] == ["<tool_call>"]
    assert [one.place for one in tagged_text.schemas(found[0])] == [1]
    assert found[1] == "tools[].function.parameters"
    former = grammar(functions=LEGACY)
    assert former is not None
    assert former[1] == "functions[].parameters"


def test_a_call_without_a_mark_may_stand_behind_the_reasoning() -> None:
    found = grammar(dataclasses.replace(HERMES, tool_format="pythonic"), tools=STRICT)
    assert found is not None
    assert [tag.mark for tag in found[0].tags] == ["<|python_start|>", "</think>"]
    assert found[0].opening is not None


def test_a_whole_structure_leaves_no_room_for_calls() -> None:
    request = converted(tools=STRICT, response_format={"type": "json_object"}).request
    assert request.params.grammar == Grammar("json_object")


def test_the_format_of_the_text_has_no_effect_on_a_call_that_is_forced() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    for choice in ("required", {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}):
        forced = converted(tools=TOOLS, tool_choice=choice).request
        both = converted(tools=TOOLS, tool_choice=choice, response_format=wanted).request
        assert (both.params.grammar, both.pending) == (forced.params.grammar, forced.pending)


@pytest.mark.parametrize(
    ("fields", "settings", "param", "told"),
    [
        ({"tools": STRICT}, {"tool_call_parser": "none"}, "tools[1].function.strict", "reads no calls"),
        ({"functions": LEGACY}, {"tool_call_parser": "none"}, "functions[1].strict", "reads no calls"),
        ({"tools": STRICT, "use_beam_search": True, "best_of": 2, "temperature": 0}, {}, "tools[1].function.strict",
         "use_beam_search"),
        ({"tools": STRICT, "structured_outputs": {"structural_tag": {
            "structures": [{"begin": "<a>", "end": ""}], "triggers": ["<a>"]}}}, {}, "tools[1].function.strict",
         "structured_outputs.structural_tag"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, {}, "tools[0].function.strict",
         "must be true or false"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True,
                                                      "parameters": {"enum": ["x" * 70_000]}}}]}, {}, "tools",
         "must not be longer"),
    ],
)  # fmt: skip
def test_what_strict_functions_cannot_be_combined_with_is_refused(
    fields: dict[str, Any], settings: Any, param: str, told: str
) -> None:
    with pytest.raises(ServiceError) as error:
        converted(settings=settings, **fields)
    assert error.value.param == param
    assert told in error.value.message
