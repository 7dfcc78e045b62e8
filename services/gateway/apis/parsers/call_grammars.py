"""The grammars of tool calls in each format of `formats`, for constrained output. Pure.

With strict tools, a grammar is free text in which a call names one of the request's tools, and the arguments of a
strict tool follow its JSON Schema. In text that follows the grammar, everything that the format's parser recognises as
a call is such a call. If calls are forced, the grammar (`only_…`) consists of calls alone. Formats that do not write
arguments as one JSON object have no grammar of calls alone, because not every schema can be enforced in them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from antiphon.shared.parameters.tagged_text import (
    Chain,
    Choice,
    Json,
    Literal,
    Name,
    Piece,
    Raw,
    Repeat,
    Space,
    Tag,
    TaggedText,
)
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.schemas.relaxation import relaxed
from antiphon.shared.request.tools import tool_name, tool_parameters

_SPACE = Space()
_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_CALLS, _CALL = "[TOOL_CALLS]", "<｜tool▁call▁begin｜>"
_ANNOTATIONS = frozenset({"title", "description", "$schema", "$id", "$comment", "examples", "default"})
"""Members of a schema that do not restrict values."""
_DEFINITIONS = ("$defs", "definitions")
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", *_DEFINITIONS, *_ANNOTATIONS})
"""Supported keywords in the schema of the arguments, for formats that do not write arguments as one JSON object."""
_TEXT = frozenset({"type", "enum", "const", "minLength", "maxLength", *_ANNOTATIONS})
"""Supported keywords in the schema of a string, for formats that write strings without quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool of the request. `place`: its index in the request. `path`: path of its schema in the request, for errors.

    `is_strict`: whether the arguments must follow the schema; other tools take any arguments. `ignored`: keywords that
    were left out of the schema because no grammar can enforce them, unless the request says that the tool is strict.
    """

    name: str
    schema: dict[str, Any]
    place: int
    path: str
    is_strict: bool
    ignored: tuple[str, ...] = ()

    @property
    def arguments(self) -> Json:
        """Grammar of its arguments as a JSON object."""
        return Json({"type": "object", **self.schema}, self.place) if self.is_strict else Json({"type": "object"})


CallGrammar = Callable[[Sequence[CallableTool]], TaggedText]
"""Returns the grammar of a format for the tools of a request. Raises ServiceError that names the schema."""


OnlyCalls = Callable[[Sequence[CallableTool], bool], Piece]
"""Returns the grammar of one call of a tool or, if the second argument is true, of one or several calls."""


def callable_tools(
    tools: Sequence[Mapping[str, Any]], places: Sequence[int], path: str, *, all_strict: bool = False
) -> list[CallableTool]:
    """Returns the checked tools of a request. `path`: of a tool's schema; `[]` stands for its number in `places`."""
    return [
        _callable_tool(tool, number, path.replace("[]", f"[{number}]", 1), all_strict)
        for number, tool in zip(places, tools, strict=True)
    ]


def _callable_tool(tool: Mapping[str, Any], place: int, path: str, all_strict: bool) -> CallableTool:
    is_strict = bool(tool["function"].get("strict"))
    found = relaxed(tool_parameters(tool), exact=is_strict)
    return CallableTool(
        name=tool_name(tool),
        schema=found.schema,
        place=place,
        path=path,
        is_strict=all_strict or is_strict,
        ignored=found.ignored,
    )


def hermes(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `HermesParser`."""
    return TaggedText((Tag(_TAG, _hermes_call(tools)),))


def only_hermes(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    return _calls(_chain(_TAG, _hermes_call(tools)), several)


def _hermes_call(tools: Sequence[CallableTool]) -> Piece:
    return _chain(_SPACE, _any(tools, _json_call), _SPACE, _TAG_END)


def llama3_json(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Llama3JsonParser`. Output that begins with a brace or bracket is a call."""
    calls = only_llama3_json(tools, True)
    return TaggedText((Tag("<|python_tag|>", _chain(_SPACE, calls)),), opening=calls, not_first="{[;")


def only_llama3_json(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    return _calls(_any(tools, lambda tool: _json_call(tool, "parameters")), several, ";")


def mistral(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `MistralParser`, in both forms."""
    return TaggedText((Tag(_CALLS, _mistral_calls(tools, several=True)),))


def only_mistral(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    return _calls(_chain(_CALLS, _mistral_calls(tools, several=several)), several)


def _mistral_calls(tools: Sequence[CallableTool], *, several: bool) -> Piece:
    listed = _chain("[", _SPACE, _calls(_any(tools, _json_call), several, ","), _SPACE, "]")
    named = _any(tools, lambda tool: _chain(tool.name, Repeat(Literal("[ARGS]"), at_most_once=True), tool.arguments))
    return _chain(_SPACE, Choice((listed, named)))


def deepseek_v3(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `DeepseekV3Parser`, in both forms."""
    return TaggedText((Tag(_CALL, _deepseek_call(tools)),))


def only_deepseek_v3(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    begin, end = (Repeat(Literal(f"<｜tool▁calls▁{name}｜>"), at_most_once=True) for name in ("begin", "end"))
    return _chain(begin, _calls(_chain(_CALL, _deepseek_call(tools)), several), end)


def _deepseek_call(tools: Sequence[CallableTool]) -> Piece:
    separator, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def call(tool: CallableTool) -> Piece:
        block = _chain("function", separator, tool.name, "\n```json\n", tool.arguments, "\n```", end)
        return Choice((block, _chain(tool.name, separator, tool.arguments, end)))

    return _any(tools, call)


def glm45(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Glm45Parser`."""
    marks = _ArgumentMarks(
        before_key="<arg_key>",
        after_key="</arg_key>",
        before_value=(_SPACE, "<arg_value>"),
        before_end="",
        after_value="</arg_value>",
    )
    calls = [_chain(tool.name, _SPACE, _tagged_arguments(tool, marks)) for tool in tools]
    return TaggedText((Tag(_TAG, _chain(_SPACE, Choice(tuple(calls)), _TAG_END)),))


def qwen3_coder(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Qwen3CoderParser`."""
    marks = _ArgumentMarks(
        before_key="<parameter=", after_key=">", before_value=("\n",), before_end="\n", after_value="</parameter>"
    )
    calls = [_chain(tool.name, ">", _SPACE, _tagged_arguments(tool, marks)) for tool in tools]
    call = _chain(_SPACE, "<function=", Choice(tuple(calls)), "</function>", _SPACE, _TAG_END)
    return TaggedText((Tag(_TAG, call),))


def pythonic(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `PythonicParser`, with values in JSON. Output that begins with a bracket is a call."""
    call = _any(tools, lambda tool: _chain(tool.name, "(", _keyword_arguments(tool), ")"))
    calls = _chain("[", _SPACE, call, Repeat(_chain(",", _SPACE, call)), "]")
    tag = Tag("<|python_start|>", _chain(_SPACE, calls, _SPACE, "<|python_end|>"))
    return TaggedText((tag,), opening=calls, not_first="[")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """An argument of a strict tool. `definitions`: the `$defs` to which its schema refers."""

    key: str
    schema: dict[str, Any]
    definitions: dict[str, Any]
    is_required: bool
    tool: CallableTool

    @property
    def json(self) -> Json:
        return Json({**self.schema, **self.definitions}, self.tool.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArgumentMarks:
    """The markup around the key and the value of an argument, in formats with tags for each argument.

    `before_end`: text that ends each value and is not part of the value.
    """

    before_key: str
    after_key: str
    before_value: tuple[Piece | str, ...]
    before_end: str
    after_value: str


def _tagged_arguments(tool: CallableTool, marks: _ArgumentMarks) -> Piece:
    """Returns the grammar of a call's arguments, each with its own tags. Strings are written without quotes."""

    def argument(key: Piece, value: Piece) -> Piece:
        return _chain(marks.before_key, key, *marks.before_value, value, _SPACE)

    if not tool.is_strict:
        value = Raw(marks.after_value, marks.before_end)
        return Repeat(argument(Raw(marks.after_key), value))
    found: list[Piece] = []
    for one in _arguments(tool):
        if marks.after_key in one.key or one.key != one.key.strip() or not one.key:
            refuse(tool.path, f"has a property whose name this model's format of calls cannot hold: {one.key!r}")
        piece = argument(_chain(one.key, marks.after_key), _tagged_value(one, marks))
        found.append(piece if one.is_required else Repeat(piece, at_most_once=True))
    return _chain(*found)


def _tagged_value(argument: _Argument, marks: _ArgumentMarks) -> Piece:
    schema = argument.schema
    if schema.get("type") != "string":
        return _chain(_SPACE, argument.json, _SPACE, marks.after_value)
    path = f"{argument.tool.path}.properties.{argument.key}"
    _check_members(schema, _TEXT, path)
    least, most = _length(schema, "minLength", path, 0), _length(schema, "maxLength", path, None)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return Raw(marks.after_value, marks.before_end, least or 0, most)
    fitting = [one for one in values if isinstance(one, str) and one == schema.get("const", one)]
    fitting = [one for one in fitting if len(one) >= (least or 0) and (most is None or len(one) <= most)]
    if not fitting or any(marks.after_value in one for one in fitting):
        refuse(path, "has no value that this model's format of calls can hold")
    return _chain(Choice(tuple(map(Literal, fitting))), marks.before_end, marks.after_value)


def _keyword_arguments(tool: CallableTool) -> Piece:
    """Returns the grammar of a call's arguments in Python's syntax: all required ones, then any of the others."""
    if not tool.is_strict:
        one = _chain(Name(), "=", Json({}))
        return Repeat(_chain(one, Repeat(_chain(",", _SPACE, one))), at_most_once=True)
    found = _arguments(tool)
    for one in found:
        if not one.key.isascii() or not one.key.isidentifier() or iskeyword(one.key):
            refuse(
                tool.path, f"has a property whose name is no name in Python, as this model's calls need: {one.key!r}"
            )
    written = {one.key: _chain(one.key, "=", one.json) for one in found}
    return _listed(
        [written[one.key] for one in found if one.is_required],
        [written[one.key] for one in found if not one.is_required],
    )


def _listed(required: Sequence[Piece], others: Sequence[Piece]) -> Piece:
    """Returns the grammar of a comma-separated list: all of `required`, then any of `others`, in their order."""
    if required:
        behind = [Repeat(_chain(",", _SPACE, one), at_most_once=True) for one in others]
        head = [piece for one in required for piece in (",", _SPACE, one)]
        return _chain(*head[2:], *behind)
    beginnings = [_listed([first], others[number + 1 :]) for number, first in enumerate(others)]
    return Repeat(Choice(tuple(beginnings)), at_most_once=True) if beginnings else _chain()


def _arguments(tool: CallableTool) -> list[_Argument]:
    """Returns the arguments of a strict tool. Raises ServiceError if its schema does not list them one by one."""
    schema, path = tool.schema, tool.path
    _check_members(schema, _OBJECT, path)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if schema.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        refuse(path, "must be the schema of an object with 'properties'")
    for name in required:
        if name not in properties:
            refuse(path, f"requires {name!r}, which is not one of its 'properties'")
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    found: list[_Argument] = []
    for key, value in properties.items():
        if value is not True and not isinstance(value, dict):
            refuse(f"{path}.properties.{key}", "must be a JSON Schema: an object")
        found.append(
            _Argument(
                key=key,
                schema={} if value is True else value,
                definitions=definitions,
                is_required=key in required,
                tool=tool,
            )
        )
    return found


def _check_members(schema: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    for name in schema:
        if name not in known:
            message = f"has the member {name!r}, which cannot be enforced in this model's format of calls"
            refuse(path, f"{message}: leave it out, or let 'tool_choice' force the call")


def _length(schema: Mapping[str, Any], name: str, path: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    if value is not default and (type(value) is not int or value < 0):
        refuse(f"{path}.{name}", "must be an integer that is not negative")
    return value


def _json_call(tool: CallableTool, arguments: str = "arguments") -> Piece:
    """Returns the grammar of a call as a JSON object with the members `name` and `arguments`."""
    name = (_SPACE, '"name"', _SPACE, ":", _SPACE, f'"{tool.name}"', _SPACE, ",")
    return _chain("{", *name, _SPACE, f'"{arguments}"', _SPACE, ":", _SPACE, tool.arguments, _SPACE, "}")


def _calls(call: Piece, several: bool, separator: str = "") -> Piece:
    """Returns the grammar of one call or, if `several`, of one or more, separated by whitespace and `separator`."""
    between = (_SPACE, separator, _SPACE) if separator else (_SPACE,)
    return _chain(call, Repeat(_chain(*between, call))) if several else call


def _any(tools: Sequence[CallableTool], call: Callable[[CallableTool], Piece]) -> Piece:
    return Choice(tuple(map(call, tools)))


def _chain(*pieces: Piece | str) -> Chain:
    """Returns the grammar of a sequence of pieces; strings are literals."""
    return Chain(tuple(Literal(piece) if isinstance(piece, str) else piece for piece in pieces))
