"""Converts `tools` and `tool_choice` of a message request to the fields of a chat body. Pure.

Every error names the parameter of Anthropic's API.
"""

from collections.abc import Mapping
from typing import Any

from services.gateway.anthropic.schemas import CountTokensBody
from services.gateway.openai.bodies.content_blocks import check_fields
from shared.request.checks import missing, refuse, unsupported

NAMES = {"tools[].function.parameters": "tools[].input_schema", "tools[].function": "tools[]"}
"""Maps the fields of a chat body that `tool_fields` returns to the parameters of this API, for error messages."""
_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict"})
_NO_EFFECT = {
    "cache_control": None,
    "eager_input_streaming": None,
    "defer_loading": (False,),
    "input_examples": ([],),
    "allowed_callers": (["direct"],),
}
"""Fields of a tool without effect, and the values that they may have; None: any."""
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_FIELDS = frozenset({"type", "name", "disable_parallel_tool_use"})


def tool_fields(body: CountTokensBody) -> dict[str, Any]:
    """Returns the tools as fields of a chat body. Raises ServiceError."""
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    return {"tools": tools, **(_choice(body.tool_choice, bool(tools)) if body.tool_choice is not None else {})}


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        unsupported(f"{path}.type", f"Tools of the type {str(kind)[:40]!r}, which the server would run, are")
    check_fields(tool, _FIELDS, path, _NO_EFFECT)
    if tool.get("input_schema") is None:
        missing(f"{path}.input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": {**given, "parameters": tool["input_schema"]}}


def _choice(choice: Mapping[str, Any], has_tools: bool) -> dict[str, Any]:
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    check_fields(choice, _CHOICE_FIELDS, "tool_choice")
    if kind is None:
        missing("tool_choice.type")
    if alone is not None and not isinstance(alone, bool):
        refuse("tool_choice.disable_parallel_tool_use", "must be true or false")
    if kind in ("any", "tool") and not has_tools:
        refuse("tool_choice", f"needs 'tools' when its type is '{kind}'")
    parallel = {} if alone is None else {"parallel_tool_calls": not alone}
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            missing("tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}, **parallel}
    if choice.get("name") is not None:
        refuse("tool_choice.name", "needs the type 'tool'")
    if not isinstance(kind, str) or kind not in _MODES:
        refuse("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    return {"tool_choice": _MODES[kind], **parallel}
