"""Checks the tools of a chat request, and the other variables that a request gives to the chat template. Pure.

Tools reach the template as the client wrote them: a template may use members that this module does not know.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from antiphon.shared import limits
from antiphon.shared.request.checks import check_nesting, missing, refuse, unsupported

_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{limits.TOOL_NAME_CHARS_MAX}}}")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
"""Names of request fields, and names of parameters in transformers' `apply_chat_template`."""


def checked_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Returns the tools of a request; an empty list if it has none. Raises ServiceError that names the wrong member.

    A tool is an object `{"type": "function", "function": {"name", "description", "parameters", …}}`; `parameters` is a
    JSON Schema, which is passed on and not interpreted here.
    """
    tools = tools or ()
    if len(tools) > limits.TOOLS_MAX:
        refuse("tools", f"must hold at most {limits.TOOLS_MAX} tools")
    return [_checked_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def checked_functions(functions: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Returns the tools for the deprecated field `functions`. Raises ServiceError that names the member."""
    functions = functions or ()
    if len(functions) > limits.TOOLS_MAX:
        refuse("functions", f"must hold at most {limits.TOOLS_MAX} functions")
    for number, function in enumerate(functions):
        _check_function(function, f"functions[{number}]")
    return [{"type": "function", "function": function} for function in functions]


def is_tool_name(name: str) -> bool:
    """Whether a function may have this name."""
    return _NAME.fullmatch(name) is not None


def tool_name(tool: Mapping[str, Any]) -> str:
    """Returns the name of the function of a checked tool."""
    return tool["function"]["name"]


def tool_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a checked tool's arguments; without one, a schema that any object matches."""
    return tool["function"].get("parameters") or {"type": "object"}


def checked_documents(documents: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Returns the documents for the chat template.

    Raises ServiceError if a document is not an object or is nested too deeply.
    """
    found = list(documents or ())
    for number, document in enumerate(found):
        _object(document, f"documents[{number}]")
        check_nesting(document, f"documents[{number}]")
    return found


def checked_template_kwargs(kwargs: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Returns further variables for the chat template, with `effort` as `reasoning_effort`.

    Raises ServiceError for a name that the server sets itself, and for an unknown effort.
    """
    for name in kwargs or ():
        if name in _RESERVED:
            refuse(f"chat_template_kwargs.{name}", "cannot be set here: it is a field of the request or the server's")
    found = dict(kwargs or {})
    check_nesting(found, "chat_template_kwargs")
    if effort is None:
        return found
    if effort not in REASONING_EFFORTS:
        refuse("reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")
    if "reasoning_effort" in found:
        refuse("reasoning_effort", "cannot be given together with 'chat_template_kwargs.reasoning_effort'")
    return {**found, "reasoning_effort": effort}


def template_variables(
    tools: Sequence[Mapping[str, Any]], documents: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> bytes:
    """Returns variables of a chat template as a JSON object; b"" if there are none. The arguments must be checked."""
    variables: dict[str, Any] = dict(kwargs)
    if tools:
        variables["tools"] = tools
    if documents:
        variables["documents"] = documents
    return msgspec.json.encode(variables) if variables else b""


def _checked_tool(tool: Any, path: str) -> dict[str, Any]:
    found = _object(tool, path)
    kind = found.get("type")
    if kind is None:
        missing(f"{path}.type")
    if kind != "function":
        unsupported(f"{path}.type", f"Tools of a type other than 'function', such as {str(kind)[:40]!r}, are")
    if found.get("function") is None:
        missing(f"{path}.function")
    _check_function(found["function"], f"{path}.function")
    return found


def _check_function(function: Any, path: str) -> None:
    found = _object(function, path)
    name = found.get("name")
    if name is None:
        missing(f"{path}.name")
    if not isinstance(name, str) or not is_tool_name(name):
        rule = f"must be 1 to {limits.TOOL_NAME_CHARS_MAX} characters: letters, digits, '_' and '-'"
        refuse(f"{path}.name", rule)
    if not isinstance(found.get("description", ""), str | None):
        refuse(f"{path}.description", "must be a string")
    if not isinstance(found.get("strict", False), bool | None):
        refuse(f"{path}.strict", "must be true or false")
    if not isinstance(found.get("parameters", {}), dict | None):
        refuse(f"{path}.parameters", "must be an object, a JSON Schema")
    check_nesting(found, path)


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, "must be an object")
    return cast(dict[str, Any], value)
