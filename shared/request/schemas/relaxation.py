"""JSON Schemas that no grammar can enforce in full: leaves out what can only widen them, and names it. Pure.

A keyword may be left out if the grammar then still takes every value that the schema accepts: if it only adds a
condition, and no other keyword depends on it as `additionalProperties` does on `properties`. `not` and `if` turn
conditions round, so they are left out as a whole. Keywords are known by their place: a property may be named `not`.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple, cast

from antiphon.shared import limits

_LEFT_OUT = frozenset({
    "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "uniqueItems", "contains",
    "minContains", "maxContains", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
})  # fmt: skip
"""Keywords that restrict nothing."""
_WITHOUT_EFFECT_ALONE = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that mean nothing without another one."""
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
})  # fmt: skip
"""The formats of strings that the compiler knows. It refuses others."""
_SCHEMAS = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"})
"""Keywords with a schema or a list of schemas."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_KINDS: Mapping[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
_OBJECT = frozenset({"object"})
_ALL_KINDS = frozenset({*_KINDS.values(), "array"}) | _OBJECT


class Relaxed(NamedTuple):
    """A schema that accepts what the given one accepts, and the names of keywords because of which it accepts more."""

    schema: Any
    ignored: tuple[str, ...]


def relaxed(schema: Any, *, exact: bool = False, bare: bool = False) -> Relaxed:
    """Returns a schema without the keywords that the compiler refuses and that can be left out.

    `oneOf` becomes `anyOf`, which is the same if its parts are seen to exclude each other. `exact`: change only what
    keeps the meaning. `bare`: leave out titles, descriptions and the like, which may be most of the text. What is
    malformed, or too deep for the compiler, is left to the compiler.
    """
    walk = _Walk(exact, bare)
    return Relaxed(walk.relaxed(schema, schema, limits.SCHEMA_DEPTH_MAX), tuple(walk.ignored))


class _Walk:
    def __init__(self, exact: bool, bare: bool) -> None:
        self._exact, self._bare = exact, bare
        self._comparisons = limits.SCHEMA_COMPARISONS_MAX
        self._shapes: dict[tuple[int, int], _Shape] = {}
        """By the identities of a schema and of the base of its references. Both live as long as the walk."""
        self.ignored: dict[str, None] = {}

    def relaxed(self, value: Any, base: Any, depth: int) -> Any:
        """Returns a relaxed schema. `base`: the schema that references such as `#/$defs/x` start from."""
        if not depth or not isinstance(value, dict):
            return value
        given = cast(dict[str, Any], value)
        base = given if isinstance(given.get("$id", given.get("id")), str) else base
        kept = {
            name: self._member(name, member, base, depth - 1)
            for name, member in given.items()
            if not self._is_left_out(name, given)
        }
        return self._without_one_of(kept, given["oneOf"], base) if "oneOf" in given else kept

    def _member(self, name: str, value: Any, base: Any, depth: int) -> Any:
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            named = cast(dict[str, Any], value)
            return {each: self.relaxed(one, base, depth) for each, one in named.items()}
        if name not in _SCHEMAS:
            return value
        if isinstance(value, list):
            return [self.relaxed(each, base, depth) for each in cast(list[Any], value)]
        return self.relaxed(value, base, depth)

    def _is_left_out(self, name: str, schema: dict[str, Any]) -> bool:
        if name in _ANNOTATIONS:
            return self._bare
        if name not in _LEFT_OUT and not _is_unknown_format(name, schema) and not _is_uncountable(name, schema):
            return False
        if _WITHOUT_EFFECT_ALONE.get(name, name) not in schema or (name == "uniqueItems" and schema[name] is False):
            return True
        if not self._exact:
            self.ignored[name] = None
        return not self._exact

    def _without_one_of(self, kept: dict[str, Any], parts: Any, base: Any) -> dict[str, Any]:
        others = kept.get("allOf", [])
        if not isinstance(parts, list) or not isinstance(others, list):
            return kept
        if not all(self._are_disjoint(one, other, base) for one, other in combinations(cast(list[Any], parts), 2)):
            if self._exact:
                return kept
            self.ignored["oneOf"] = None
        either = {"anyOf": kept.pop("oneOf")}
        return {**kept, "allOf": [*cast(list[Any], others), either]} if "anyOf" in kept else {**kept, **either}

    def _are_disjoint(self, one: Any, other: Any, base: Any) -> bool:
        """Whether it is seen that no value satisfies both schemas. `base`: None if references are not followed."""
        self._comparisons -= 1
        if self._comparisons < 0:
            return False
        first, second = self._shape(one, base), self._shape(other, base)
        if first.values is not None and second.values is not None:
            return first.values.isdisjoint(second.values)
        kinds = first.kinds & second.kinds
        mine, theirs = first.required, second.required
        return not kinds or (
            kinds == _OBJECT
            and any(self._are_disjoint(mine[name], theirs[name], None) for name in mine.keys() & theirs.keys())
        )

    def _shape(self, schema: Any, base: Any) -> "_Shape":
        key = id(schema), id(base)
        if key not in self._shapes:
            self._shapes[key] = _shape(schema if base is None else _followed(schema, base))
        return self._shapes[key]


class _Shape(NamedTuple):
    """What the values of a schema have in common, as far as it is seen.

    `values`: the values that the schema lists, in a form that tells true from 1; None if it lists none. `kinds`: their
    types; integers are numbers. `required`: the properties that an object must have, with their schemas.
    """

    values: frozenset[Any] | None
    kinds: frozenset[str]
    required: dict[str, Any]


def _shape(schema: object) -> _Shape:
    if not isinstance(schema, dict):
        return _Shape(None, frozenset() if schema is False else _ALL_KINDS, {})
    given = cast(dict[str, Any], schema)
    values = _values(given)
    found = given.get("properties")
    properties = cast(dict[str, Any], found) if isinstance(found, dict) else {}
    required = {name: properties[name] for name in _texts(given.get("required")) if name in properties}
    return _Shape(values, _kinds(given) if values is None else frozenset(kind for kind, _ in values), required)


def _is_unknown_format(name: str, schema: dict[str, Any]) -> bool:
    """Whether it is a format that the compiler refuses: it looks only at those of strings."""
    value = schema[name]
    return name == "format" and isinstance(value, str) and value not in _FORMATS and "string" in _kinds(schema)


def _is_uncountable(name: str, schema: dict[str, Any]) -> bool:
    """Whether it is a number of properties that the compiler refuses, because named ones may be there or not."""
    if name not in ("minProperties", "maxProperties") or not isinstance(schema.get("properties"), dict):
        return False
    required, is_closed = set(_texts(schema.get("required"))), schema.get("additionalProperties") is False
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if required.issuperset(schema["properties"]) or not isinstance(least, int):
        return False
    if most is None:
        return least > max(len(required), int(is_closed))
    return not is_closed or most != 1 or bool(required)


def _followed(schema: Any, base: Any) -> object:
    """Returns the schema that a schema refers to in its own document; itself, if it refers to none."""
    reference = cast(dict[str, Any], schema).get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return cast(object, schema)
    found: object = base
    for name in reference[2:].split("/"):
        found = cast(dict[str, Any], found).get(name) if isinstance(found, dict) else None
    return found


def _values(schema: dict[str, Any]) -> frozenset[Any] | None:
    listed: Any = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or any(type(each) not in _KINDS for each in cast(list[Any], listed)):
        return None
    return frozenset((_KINDS[type(each)], each) for each in cast(list[Any], listed))


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else _texts(named) if isinstance(named, list) else _ALL_KINDS
    return frozenset("number" if each == "integer" else each for each in names)


def _texts(value: Any) -> list[str]:
    """Returns the texts in a list; none, if it is no list."""
    return [each for each in cast(list[Any], value) if isinstance(each, str)] if isinstance(value, list) else []
