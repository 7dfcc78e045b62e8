"""The constraint on the output if a request forces tool calls (`tool_choice` required, or a function's name). Pure.

The output has calls in the model's own format, which the model writes best. If that format is unknown or has no grammar
of calls alone (`ToolFormat.only_calls`), the output consists of the arguments of the named function alone or, with
`required`, of a list of objects with `name` and `parameters`. `answer_format.AnswerFormat.parser` reads all of these
forms.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.formats import ToolFormat
from antiphon.services.gateway.apis.parsers.grammars.pieces import callable_tools
from antiphon.shared import limits
from antiphon.shared.parameters.tagged_text import TaggedText
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.structured import Constraint, json_constraint, tagged_constraint
from antiphon.shared.request.tools import tool_name, tool_parameters

_DEFINITIONS = ("$defs", "definitions")


def forced_calls(choice: ToolChoice, tool_format: ToolFormat | None) -> Constraint:
    """Returns the constraint of the output for the modes `named` and `required`. Raises ServiceError.

    `tool_format`: the model's own format of calls, None if it is unknown.
    """
    if tool_format is None or tool_format.only_calls is None:
        is_strict = choice.strict_param is not None
        return json_constraint(forced_calls_schema(choice), choice.tools_param, is_strict=is_strict)
    is_named = choice.mode == "named"
    places = dict(zip(choice.places, choice.tools, strict=True))
    if is_named:
        places = {at: tool for at, tool in places.items() if tool_name(tool) == choice.name}
    tools = callable_tools(list(places.values()), list(places), choice.schema_param, all_strict=True)
    calls = tool_format.only_calls(tools, choice.parallel and not is_named)
    constraint = tagged_constraint(TaggedText((), opening=calls, is_free=False), choice.schema_param)
    return constraint._replace(ignored=tuple(dict.fromkeys(name for tool in tools for name in tool.ignored)))


def forced_calls_schema(choice: ToolChoice) -> dict[str, Any]:
    """Returns the JSON Schema of output that is not in the model's own format, for the modes `named` and `required`."""
    assert choice.is_forced, choice.mode
    if choice.mode == "named":
        named = next(tool for tool in choice.tools if tool_name(tool) == choice.name)
        return {"type": "object", **tool_parameters(named)}
    calls = {"type": "array", "minItems": 1, "maxItems": limits.TOOLS_MAX if choice.parallel else 1}
    return {**calls, "items": {"anyOf": [_call(tool) for tool in choice.tools]}, **_definitions(choice)}


def _call(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {name: value for name, value in tool_parameters(tool).items() if name not in _DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": tool_name(tool)}, "parameters": {"type": "object", **parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(choice: ToolChoice) -> dict[str, Any]:
    """Returns the `$defs` of all tools for the combined schema, so that references such as `#/$defs/X` stay valid.

    Raises ServiceError if two tools define different things under one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, tool in zip(choice.places, choice.tools, strict=True):
        for kind in _DEFINITIONS:
            for name, schema in (tool_parameters(tool).get(kind) or {}).items():
                if found.setdefault(kind, {}).setdefault(name, schema) != schema:
                    path = f"tools[{number}].function.parameters.{kind}.{name}"
                    refuse(path, "differs from another tool's definition of that name, and 'tool_choice' is 'required'")
    return found
