"""Converts `tools` and `tool_choice` of a response to the fields of a chat body. Pure.

Every error names the parameter of the Responses API.
"""

from collections.abc import Mapping
from typing import Any

from services.gateway.openai.bodies.content_blocks import check_fields
from services.gateway.responses.schemas import ResponsesBody
from shared.request.checks import missing, refuse, unsupported

NAMES = {"tools[].function": "tools[]", "tool_choice.allowed_tools": "tool_choice"}
"""Maps the fields of a chat body that `tool_fields` returns to the parameters of this API, for error messages."""
_FUNCTION = ("name", "description", "parameters", "strict")
_NO_EFFECT = {"defer_loading": (False,), "allowed_callers": (["direct"],), "output_schema": None}
"""Fields of a function without effect, and the values that they may have; None: any."""
_MODES = ("auto", "none", "required")


def tool_fields(body: ResponsesBody) -> dict[str, Any]:
    """Returns the tools as fields of a chat body. Raises ServiceError."""
    return {
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def shown_tools(body: ResponsesBody) -> list[dict[str, Any]]:
    """Returns the checked tools of a response in the form of its object: with all fields."""
    empty = dict.fromkeys(_FUNCTION)
    return [{**empty, **tool, "strict": bool(tool.get("strict"))} for tool in body.tools or ()]


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_function(tool.get("type"), f"{path}.type")
    check_fields(tool, ("type", *_FUNCTION), path, _NO_EFFECT)
    function = {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        if choice not in (None, *_MODES):
            refuse("tool_choice", "must be 'none', 'auto', 'required' or an object that names functions")
        return choice
    if choice.get("type") != "allowed_tools":
        _check_function(choice.get("type"), "tool_choice.type")
        check_fields(choice, ("type", "name"), "tool_choice")
        return _named(choice, "tool_choice")
    check_fields(choice, ("type", "mode", "tools"), "tool_choice")
    tools = choice.get("tools")
    if not isinstance(tools, list):
        missing("tool_choice.tools")
    named = [_allowed(tool, f"tool_choice.tools[{number}]") for number, tool in enumerate(tools)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}


def _allowed(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        refuse(path, "must be an object")
    _check_function(tool.get("type"), f"{path}.type")
    check_fields(tool, ("type", "name"), path)
    return _named(tool, path)


def _named(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        missing(f"{path}.name")
    return {"type": "function", "function": {"name": tool["name"]}}


def _check_function(kind: Any, path: str) -> None:
    """Raises ServiceError if the type of a tool is not `function`."""
    if kind is None:
        missing(path)
    if kind != "function":
        unsupported(path, f"Tools of a type other than 'function', such as {str(kind)[:40]!r}, are")
