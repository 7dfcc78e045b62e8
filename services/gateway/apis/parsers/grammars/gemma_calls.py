"""The grammar of Gemma 4's calls, whose values are not JSON. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from antiphon.services.gateway.apis.parsers.gemma import QUOTE
from antiphon.services.gateway.apis.parsers.grammars.pieces import (
    OBJECT_MEMBERS,
    STRING_MEMBERS,
    CallableTool,
    any_of,
    arguments,
    chain,
    check_members,
    length,
    listed,
)
from antiphon.shared.parameters.tagged_text import Choice, Json, Name, Piece, Raw, Repeat, Tag, TaggedText
from antiphon.shared.request.checks import refuse

_KEY = re.compile(r"[^\s:,{}\[\]<]+")
_ANY_DEPTH = 2
"""Levels of lists and objects in a value that has no schema."""
_DEPTH_MAX = 16
"""Levels of schemas within schemas, so that a schema that refers to itself is refused."""
_SCALARS = ("integer", "number", "boolean", "null")
_NUMBER_MEMBERS = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def gemma4(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Gemma4Parser`."""
    call = any_of(tools, lambda tool: chain(f"call:{tool.name}{{", _members(tool), "}<tool_call|>"))
    return TaggedText((Tag("<|tool_call>", call),))


def _members(tool: CallableTool) -> Piece:
    if not tool.is_strict:
        return _several(_any_member(_ANY_DEPTH))
    found = arguments(tool)
    schemas = {one.key: one.schema for one in found}
    return _object_members(tool, schemas, {one.key for one in found if one.is_required}, tool.path, 0)


def _object_members(
    tool: CallableTool, properties: Mapping[str, Any], required: set[str], path: str, depth: int
) -> Piece:
    written: dict[str, Piece] = {}
    for key, schema in properties.items():
        if not _KEY.fullmatch(key):
            refuse(path, f"has a property whose name this model's format of calls cannot hold: {key!r}")
        written[key] = chain(f"{key}:", _value(tool, schema, f"{path}.properties.{key}", depth + 1))
    return listed(
        [piece for key, piece in written.items() if key in required],
        [piece for key, piece in written.items() if key not in required],
    )


def _value(tool: CallableTool, schema: Any, path: str, depth: int) -> Piece:
    """Returns the grammar of a value. Raises ServiceError for a schema that cannot be enforced."""
    if schema is True:
        return _any_value(_ANY_DEPTH)
    if not isinstance(schema, dict):
        refuse(path, "must be a JSON Schema: an object")
    if depth > _DEPTH_MAX:
        refuse(path, "refers to itself or is too deep for this model's format of calls")
    members = {key: value for key, value in cast(dict[str, Any], schema).items() if key not in ("$defs", "definitions")}
    if "$ref" in members:
        check_members(members, frozenset({"$ref"}), path)
        return _value(tool, _referenced(tool, members["$ref"], path), path, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(members.get(name), list):
            check_members(members, frozenset({name}), path)
            return Choice(tuple(_value(tool, one, path, depth + 1) for one in members[name]))
    kind = members.get("type")
    if isinstance(kind, list):
        kinds = cast(list[Any], kind)
        return Choice(tuple(_of_type(tool, {**_for(one, members), "type": one}, path, depth) for one in kinds))
    return _of_type(tool, members, path, depth)


def _of_type(tool: CallableTool, schema: dict[str, Any], path: str, depth: int) -> Piece:
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        return _constants(schema, path)
    if kind == "string":
        check_members(schema, STRING_MEMBERS, path)
        least, most = length(schema, "minLength", path, 0), length(schema, "maxLength", path, None)
        return chain(QUOTE, Raw(QUOTE, "", least or 0, most))
    if kind in _SCALARS:
        check_members(schema, _NUMBER_MEMBERS, path)
        return Json(schema, tool.place)
    if kind == "object":
        check_members(schema, OBJECT_MEMBERS, path)
        return chain("{", _members_of(tool, schema, path, depth), "}")
    if kind == "array":
        check_members(schema, frozenset({"type", "items"}), path)
        return chain("[", _several(_value(tool, schema.get("items", True), f"{path}.items", depth + 1)), "]")
    check_members(schema, frozenset(), path)
    return _any_value(_ANY_DEPTH)


def _members_of(tool: CallableTool, schema: dict[str, Any], path: str, depth: int) -> Piece:
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
    if properties or others is False:
        return _object_members(tool, properties, set(schema.get("required") or ()), path, depth)
    if schema.get("required"):
        refuse(path, "requires properties that are not among its 'properties'")
    return _several(chain(Name(), ":", _value(tool, others, f"{path}.additionalProperties", depth + 1)))


def _for(kind: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the members of a schema with several types that restrict values of the type `kind`."""
    known: dict[Any, frozenset[str]] = {
        "string": STRING_MEMBERS,
        "object": OBJECT_MEMBERS,
        "array": frozenset({"items"}),
        "integer": _NUMBER_MEMBERS,
        "number": _NUMBER_MEMBERS,
    }
    own = known.get(kind, frozenset[str]()) | {"enum", "const"}
    others = frozenset[str]().union(*known.values()) - own
    return {name: value for name, value in schema.items() if name not in others}


def _referenced(tool: CallableTool, reference: Any, path: str) -> Any:
    kind, _, name = str(reference).removeprefix("#/").partition("/")
    found: Any = (tool.schema.get(kind) or {}).get(name) if kind in ("$defs", "definitions") else None
    if found is None:
        refuse(path, f"refers to {str(reference)[:60]!r}, which this model's format of calls cannot follow")
    return found


def _constants(schema: dict[str, Any], path: str) -> Piece:
    check_members(schema, frozenset({"type", "enum", "const"}), path)
    values: list[Any] = schema.get("enum", [schema.get("const")])
    kind = schema.get("type")
    fitting = [one for one in values if one == schema.get("const", one) and (kind is None or _is_of(kind, one))]
    if not fitting or any(isinstance(one, list | dict) or (isinstance(one, str) and QUOTE in one) for one in fitting):
        refuse(path, "has no value that this model's format of calls can hold")
    return Choice(tuple(chain(QUOTE + one + QUOTE if isinstance(one, str) else json.dumps(one)) for one in fitting))


def _is_of(kind: Any, value: Any) -> bool:
    types: dict[Any, tuple[type, ...]] = {"string": (str,), "boolean": (bool,), "null": (type(None),)}
    return isinstance(value, types.get(kind, (int, float))) and isinstance(value, bool) == (kind == "boolean")


def _any_value(depth: int) -> Piece:
    """Returns the grammar of any value with at most so many levels of lists and objects."""
    scalars: list[Piece] = [chain(QUOTE, Raw(QUOTE)), Json({"type": list(_SCALARS)})]
    if not depth:
        return Choice(tuple(scalars))
    items = chain("[", _several(_any_value(depth - 1)), "]")
    return Choice((*scalars, items, chain("{", _several(_any_member(depth - 1)), "}")))


def _any_member(depth: int) -> Piece:
    return chain(Name(), ":", _any_value(depth))


def _several(one: Piece) -> Piece:
    """Returns the grammar of a list with commas, which may be empty."""
    return Repeat(chain(one, Repeat(chain(",", one))), at_most_once=True)
