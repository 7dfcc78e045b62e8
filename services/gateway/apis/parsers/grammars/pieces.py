"""What the grammars of all formats use: the tools of a request, their arguments, and pieces of grammars. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.shared.parameters.tagged_text import Chain, Choice, Json, Literal, Piece, Repeat, Some, Space, TaggedText
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.schemas.relaxation import relaxed
from antiphon.shared.request.tools import tool_name, tool_parameters

SPACE = Space()
_DEFINITIONS = ("$defs", "definitions")
OBJECT_MEMBERS = frozenset({"type", "properties", "required", "additionalProperties", *_DEFINITIONS})
"""Supported keywords in the schema of the arguments, for formats that do not write arguments as one JSON object."""
STRING_MEMBERS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
"""Supported keywords in the schema of a string, for formats that write strings without quotes."""
_RESTRICTING = frozenset({
    "type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "pattern", "format", "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems",
    "uniqueItems", "contains", "minContains", "maxContains", "properties", "patternProperties", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "minProperties", "maxProperties", "required", "dependencies",
    "dependentRequired", "dependentSchemas",
})  # fmt: skip
"""The keywords of JSON Schema that restrict values. Other members, such as `title` or a client's own, do not."""


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
    found = relaxed(tool_parameters(tool), exact=is_strict, bare=True)
    return CallableTool(
        name=tool_name(tool),
        schema=found.schema,
        place=place,
        path=path,
        is_strict=all_strict or is_strict,
        ignored=found.ignored,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of a strict tool. `definitions`: the `$defs` to which its schema refers."""

    key: str
    schema: dict[str, Any]
    definitions: dict[str, Any]
    is_required: bool
    tool: CallableTool

    @property
    def json(self) -> Json:
        """Grammar of its value as JSON."""
        return Json({**self.schema, **self.definitions}, self.tool.place)


def arguments(tool: CallableTool) -> list[Argument]:
    """Returns the arguments of a strict tool. Raises ServiceError if its schema does not list them one by one."""
    schema, path = tool.schema, tool.path
    check_members(schema, OBJECT_MEMBERS, path)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if schema.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        refuse(path, "must be the schema of an object with 'properties'")
    for name in required:
        if name not in properties:
            refuse(path, f"requires {name!r}, which is not one of its 'properties'")
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    found: list[Argument] = []
    for key, value in properties.items():
        if value is not True and not isinstance(value, dict):
            refuse(f"{path}.properties.{key}", "must be a JSON Schema: an object")
        found.append(
            Argument(
                key=key,
                schema={} if value is True else value,
                definitions=definitions,
                is_required=key in required,
                tool=tool,
            )
        )
    return found


def check_members(schema: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    """Raises ServiceError for a schema with a member that restricts values and is not one of `known`."""
    for name in schema:
        if name in _RESTRICTING and name not in known:
            message = f"has the member {name!r}, which cannot be enforced in this model's format of calls"
            refuse(path, f"{message}: leave it out, or let 'tool_choice' force the call")


def length(schema: Mapping[str, Any], name: str, path: str, default: int | None) -> int | None:
    """Returns the member `name` of a schema, `default` if it has none. Raises ServiceError unless it is a length."""
    value = schema.get(name, default)
    if value is not default and (type(value) is not int or value < 0):
        refuse(f"{path}.{name}", "must be an integer that is not negative")
    return value


def json_call(tool: CallableTool, member: str = "arguments") -> Piece:
    """Returns the grammar of a call as a JSON object with the members `name` and `arguments`."""
    name = (SPACE, '"name"', SPACE, ":", SPACE, f'"{tool.name}"', SPACE, ",")
    return chain("{", *name, SPACE, f'"{member}"', SPACE, ":", SPACE, tool.arguments, SPACE, "}")


def calls(call: Piece, several: bool, separator: str = "") -> Piece:
    """Returns the grammar of one call or, if `several`, of one or more, separated by whitespace and `separator`."""
    between = (SPACE, separator, SPACE) if separator else (SPACE,)
    return chain(call, Repeat(chain(*between, call))) if several else call


def any_of(tools: Sequence[CallableTool], call: Callable[[CallableTool], Piece]) -> Piece:
    """Returns the grammar of a call of one of the tools. `call` returns that of one tool."""
    return Choice(tuple(map(call, tools)))


def chain(*pieces: Piece | str) -> Chain:
    """Returns the grammar of a sequence of pieces; strings are literals."""
    return Chain(tuple(Literal(piece) if isinstance(piece, str) else piece for piece in pieces))


def listed(required: Sequence[Piece], others: Sequence[Piece]) -> Piece:
    """Returns the grammar of a comma-separated list: all of `required`, then any of `others`, in their order."""
    if required:
        behind = [Repeat(chain(",", SPACE, one), at_most_once=True) for one in others]
        head = [piece for one in required for piece in (",", SPACE, one)]
        return chain(*head[2:], *behind)
    return Repeat(Some(tuple(others)), at_most_once=True) if others else chain()
