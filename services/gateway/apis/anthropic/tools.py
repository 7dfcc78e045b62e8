"""Converts `tools` and `tool_choice` of a message request to the fields of a chat body. Pure.

Every error names the parameter of Anthropic's API.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from antiphon.services.gateway.apis.anthropic import conversation
from antiphon.services.gateway.apis.anthropic.schemas import CountTokensBody
from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.shared.request.checks import missing, refuse

NAMES = {"tools[].function.parameters": "tools[].input_schema", "tools[].function": "tools[]"}
"""Maps the fields of a chat body that `tool_fields` returns to the parameters of this API, for error messages."""
_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict"})
_NO_EFFECT = {
    "cache_control": None,
    "eager_input_streaming": None,
    "defer_loading": None,
    "input_examples": None,
    "allowed_callers": None,
}
"""Fields of a tool without effect, and the values that they may have; None: any."""
_OWN = (None, "custom")
"""Types of tools that the client runs and describes. Tools of all other types are run by a server, or their description
is known to Anthropic's models alone."""
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_FIELDS = frozenset({"type", "name", "disable_parallel_tool_use"})


def tool_fields(body: CountTokensBody) -> dict[str, Any]:
    """Returns the tools as fields of a chat body. Raises ServiceError.

    The model is not told of tools that a server would run, and of deferred ones before a result refers to them.
    """
    referred = set(conversation.referred_tools(body.messages or ()))
    given = [(f"tools[{number}]", tool) for number, tool in enumerate(body.tools or ())]
    tools = [_tool(tool, path) for path, tool in given if _is_told(tool, path, referred)]
    return {"tools": tools, **(_choice(body.tool_choice, tools) if body.tool_choice is not None else {})}


def _is_told(tool: Mapping[str, Any], path: str, referred: Collection[str]) -> bool:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in _OWN:
        ignore(f"{path}.{kind}" if isinstance(kind, str) else path)
        return False
    if tool.get("defer_loading") is True and name not in referred:
        ignore(f"{path}.defer_loading")
        return False
    return True


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    check_fields(tool, _FIELDS, path, _NO_EFFECT)
    if tool.get("input_schema") is None:
        missing(f"{path}.input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": {**given, "parameters": tool["input_schema"]}}


def _choice(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    check_fields(choice, _CHOICE_FIELDS, "tool_choice")
    if kind is None:
        missing("tool_choice.type")
    if alone is not None and not isinstance(alone, bool):
        refuse("tool_choice.disable_parallel_tool_use", "must be true or false")
    if kind in ("any", "tool") and not tools:
        refuse("tool_choice", f"needs 'tools' that the client runs when its type is '{kind}'")
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
