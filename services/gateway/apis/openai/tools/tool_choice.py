"""Determines which tools the model of a request may call, and whether it has to. Pure.

The fields `functions` and `function_call` are the former form of `tools` and `tool_choice`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from antiphon.services.gateway.apis.openai.schemas import ChatBody
from antiphon.shared.request.checks import given, missing, refuse, unsupported
from antiphon.shared.request.tools import checked_functions, checked_tools, tool_name

Mode = Literal["none", "auto", "required", "named"]
_MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """The tools of one request.

    `tools` are those that the chat template gets: none with the mode `none`. `places`: their indexes in the request.
    `name`: the function that must be called with the mode `named`. `parallel`: whether an answer may have several
    calls. `legacy`: whether the request has `functions`, so that the answer has a `function_call`.
    """

    mode: Mode = "none"
    tools: tuple[dict[str, Any], ...] = ()
    places: tuple[int, ...] = ()
    name: str = ""
    parallel: bool = True
    legacy: bool = False

    @property
    def is_forced(self) -> bool:
        """Whether the model has to call a tool."""
        return self.mode in ("required", "named")

    @property
    def param(self) -> str:
        """Name of the request's field with the tool choice, for errors."""
        return "function_call" if self.legacy else "tool_choice"

    @property
    def tools_param(self) -> str:
        """Name of the request's field that has the tools, for errors."""
        return "functions" if self.legacy else "tools"

    @property
    def schema_param(self) -> str:
        """Name of the request's field with the schema of a tool's arguments. `[]` stands for the number of the tool."""
        return "functions[].parameters" if self.legacy else "tools[].function.parameters"

    @property
    def strict_param(self) -> str | None:
        """Path of the first field `strict` that is true, for errors; None if no tool is strict."""
        for place, tool in zip(self.places, self.tools, strict=True):
            if tool["function"].get("strict"):
                return self.schema_param.replace("[]", f"[{place}]").replace("parameters", "strict")
        return None


NO_TOOLS = ToolChoice()
"""The choice of a request that names neither tools nor functions."""


def tool_choice(body: ChatBody) -> ToolChoice:
    """Returns the tools of a request and how they may be called. Raises ServiceError that names the wrong field."""
    legacy = bool(body.functions) or body.function_call is not None
    if legacy and (body.tools or body.tool_choice is not None):
        refuse("functions" if body.functions else "function_call", "cannot be given together with 'tools'")
    tools = checked_functions(body.functions) if legacy else checked_tools(body.tools)
    choice = body.function_call if legacy else body.tool_choice
    param, field = ("function_call", "functions") if legacy else ("tool_choice", "tools")
    parallel = given(body.parallel_tool_calls, True) and not legacy
    places = range(len(tools))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and not legacy:
        choice, places = _allowed(choice, tools)
    if isinstance(choice, dict):
        name = _named(choice, legacy, param)
        if name not in map(tool_name, tools):
            refuse(param, f"names a function that is not in '{field}'")
        return ToolChoice(
            mode="named", tools=tuple(tools), places=tuple(places), name=name, parallel=parallel, legacy=legacy
        )
    mode = _MODES.get("auto" if choice is None else choice)
    if mode is None or (legacy and mode == "required"):
        modes = "'none', 'auto'" if legacy else "'none', 'auto', 'required'"
        refuse(param, f"must be {modes} or an object that names a function")
    if mode == "required" and not tools:
        refuse(param, f"needs '{field}' when it is 'required'")
    if mode == "none" or not tools:
        return ToolChoice(legacy=legacy)
    told = tuple(tools[place] for place in places)
    return ToolChoice(mode=mode, tools=told, places=tuple(places), parallel=parallel, legacy=legacy)


def _allowed(choice: dict[str, Any], tools: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
    """Returns the mode and the numbers of the tools in `{"allowed_tools": {"mode": …, "tools": […]}}`."""
    param = "tool_choice.allowed_tools"
    allowed: Any = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        missing(param)
    mode, listed = cast(dict[str, Any], allowed).get("mode"), cast(dict[str, Any], allowed).get("tools")
    if mode not in ("auto", "required"):
        refuse(f"{param}.mode", "must be 'auto' or 'required'")
    if not isinstance(listed, list) or not listed:
        refuse(f"{param}.tools", "must be a list of functions that is not empty")
    names = [_named(one, False, f"{param}.tools[{number}]") for number, one in enumerate(cast(list[Any], listed))]
    known = list(map(tool_name, tools))
    for number, name in enumerate(names):
        if name not in known:
            refuse(f"{param}.tools[{number}]", "names a function that is not in 'tools'")
    return mode, [place for place, name in enumerate(known) if name in names]


def _named(choice: Any, legacy: bool, param: str) -> str:
    """Returns the name in `{"type": "function", "function": {"name": …}}`, or in the former form `{"name": …}`."""
    if not isinstance(choice, dict):
        refuse(param, "must be an object that names a function")
    function: Any = choice
    if not legacy:
        kind = choice.get("type", "function")
        if kind != "function":
            unsupported(f"{param}.type", f"Choices of the type {str(kind)[:40]!r} are")
        function = choice.get("function")
        param = f"{param}.function"
    if not isinstance(function, dict):
        missing(param)
    name = cast(dict[str, Any], function).get("name")
    if not isinstance(name, str):
        missing(f"{param}.name")
    return name
