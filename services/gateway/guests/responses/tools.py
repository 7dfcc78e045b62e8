"""Converts `tools` and `tool_choice` of a response to the fields of a chat body, and calls back to items. Pure.

The model knows functions only. A `custom` tool, whose input is free text, is told as a function with the text as its
only argument; `local_shell` as a function that takes a command. The functions of a `namespace` are told with its name
before theirs. `Tools` knows what each function of the model stands for. The model is not told of tools that a server
would run. Every error names the parameter of the Responses API.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.shared.request.checks import missing, refuse, unsupported

NAMES = {"tools[].function": "tools[]", "tool_choice.allowed_tools": "tool_choice"}
"""Maps the fields of a chat body that `tool_fields` returns to the parameters of this API, for error messages."""
Kind = Literal["function", "custom", "local_shell"]
INPUT = "input"
"""The only argument of the function that stands for a custom tool."""
_FUNCTION = ("name", "description", "parameters", "strict")
_NO_EFFECT = {"defer_loading": None, "allowed_callers": None, "output_schema": None}
_MODES = ("auto", "none", "required")
_SHELL = "local_shell"
_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
_SEPARATOR = "__"


class OwnTool(NamedTuple):
    """What a function of the model stands for in the API."""

    kind: Kind
    name: str
    namespace: str = ""


class Tools:
    """The tools of a response that the client runs: as functions for the model, and what these stand for."""

    def __init__(self, body: ResponsesBody) -> None:
        """Raises ServiceError for a tool that is not described as the API says."""
        self.functions: list[dict[str, Any]] = []
        self._owns: dict[str, OwnTool] = {}
        self._add(body.tools or (), "tools")
        for number, item in enumerate(body.input if isinstance(body.input, list) else ()):
            if item.get("type") == "additional_tools" and isinstance(item.get("tools"), list):
                self._add(item["tools"], f"input[{number}].tools")

    def own(self, function: str) -> OwnTool:
        """Returns what a function stands for, by the name that the model uses."""
        return self._owns.get(function, OwnTool("function", function))

    def _add(self, tools: Iterable[Any], path: str, namespace: str = "") -> None:
        for number, tool in enumerate(tools):
            place = f"{path}[{number}]"
            if not isinstance(tool, dict):
                refuse(place, "must be an object")
            kind = tool.get("type")
            if kind is None:
                missing(f"{place}.type")
            if kind == "namespace" and not namespace:
                self._add(tool.get("tools") or (), f"{place}.tools", _name(tool, place))
            elif kind in ("function", "custom", _SHELL):
                self._add_one(kind, tool, place, namespace)
            else:
                ignore(f"{place}.{kind}")

    def _add_one(self, kind: Kind, tool: dict[str, Any], path: str, namespace: str) -> None:
        function = _TOLD[kind](tool, path)
        own = OwnTool(kind, function["name"], namespace)
        function["name"] = told_name(own.name, namespace)
        self._owns[function["name"]] = own
        self.functions.append({"type": "function", "function": function})


def told_name(name: str, namespace: str) -> str:
    """Returns the name by which the model knows a tool."""
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}" if namespace else name


def tool_fields(body: ResponsesBody, tools: Tools) -> dict[str, Any]:
    """Returns the tools as fields of a chat body. Raises ServiceError."""
    return {
        "tools": tools.functions,
        "tool_choice": _choice(body.tool_choice, tools),
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def shown_tools(body: ResponsesBody) -> list[dict[str, Any]]:
    """Returns the checked tools of a response in the form of its object: with all fields that have an effect."""
    return [
        {"type": "function", **{name: tool.get(name) for name in _FUNCTION}, "strict": bool(tool.get("strict"))}
        if tool["type"] == "function"
        else tool
        for tool in body.tools or ()
    ]


def _function(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    check_fields(tool, ("type", *_FUNCTION), path, _NO_EFFECT)
    _name(tool, path)
    return {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}


def _custom(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    check_fields(tool, ("type", "name", "description", "format"), path, _NO_EFFECT)
    form, described = tool.get("format"), str(tool.get("description") or "")
    if isinstance(form, dict) and form.get("type") == "grammar":
        # The grammar is described to the model and not enforced: an argument is a text within JSON.
        ignore(f"{path}.format")
        described += f"\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    text = {"type": "string", "description": "The whole input of the tool, as plain text."}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return {"name": _name(tool, path), "description": described, "parameters": parameters}


def _shell(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    check_fields(tool, ("type",), path)
    return {"name": _SHELL, "description": "Runs a command on the user's machine.", "parameters": _SHELL_PARAMETERS}


_TOLD = {"function": _function, "custom": _custom, _SHELL: _shell}


def _name(tool: Mapping[str, Any], path: str) -> str:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        missing(f"{path}.name")
    return tool["name"]


def _choice(choice: str | dict[str, Any] | None, tools: Tools) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        if choice not in (None, *_MODES):
            refuse("tool_choice", "must be 'none', 'auto', 'required' or an object that names functions")
        if choice == "required" and not tools.functions:
            refuse("tool_choice", "needs 'tools' that the client runs when it is 'required'")
        return choice
    if choice.get("type") != "allowed_tools":
        return _named(choice, "tool_choice")
    check_fields(choice, ("type", "mode", "tools"), "tool_choice")
    listed = choice.get("tools")
    if not isinstance(listed, list):
        missing("tool_choice.tools")
    named = [_allowed(tool, f"tool_choice.tools[{number}]") for number, tool in enumerate(listed)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}


def _allowed(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        refuse(path, "must be an object")
    return _named(tool, path)


def _named(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind is None:
        missing(f"{path}.type")
    if kind not in _TOLD:
        unsupported(f"{path}.type", f"To force a tool of the type {str(kind)[:40]!r}, which the server would run, is")
    check_fields(tool, ("type", "name", "namespace"), path)
    name = _SHELL if kind == _SHELL else _name(tool, path)
    return {"type": "function", "function": {"name": told_name(name, tool.get("namespace") or "")}}


def names_of(tool: OwnTool) -> Iterator[tuple[str, str]]:
    """Yields the fields by which an item names its tool."""
    yield "name", tool.name
    if tool.namespace:
        yield "namespace", tool.namespace
