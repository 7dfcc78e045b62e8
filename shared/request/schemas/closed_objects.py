"""Closes the objects of a JSON Schema: they may have the properties that the schema names, and no others. Pure.

JSON Schema allows an object to have any further properties. A model that is bound to such a schema may write properties
of its own without end. The fields `guided_json` and `structured_outputs.json` come from servers that compile schemas
with outlines, where an object has the named properties only.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

_MAPS = ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
"""Keywords whose values are schemas: by name, in a list, alone. Other values (`enum`, `default`) are data."""
_SAYS_WHICH = frozenset({"additionalProperties", "patternProperties", "minProperties"})
"""Keywords with which an object tells what further properties it has."""
_COMBINE = frozenset({"not", "if", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties"})
_REFER = frozenset({"$dynamicRef", "$recursiveRef"})


def closed(schema: Any) -> Any:
    """Returns the schema with `additionalProperties: false` in each object that only names its properties.

    A schema that applies several schemas to one value (`allOf` of two parts, `properties` beside `anyOf`) is returned
    as it is: each part would forbid what the others name.
    """
    if any(_combines(one) for one in _schemas(schema)):
        return schema
    return _closed(schema)


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether more than one part of a schema says what properties an object has."""
    parts = sum(name in schema for name in ("properties", "anyOf", "oneOf", "$ref"))
    several = schema.get("allOf", ())
    parts += len(cast(list[Any], several)) if isinstance(several, list) else 0
    return parts > 1 or not (_COMBINE | _REFER).isdisjoint(schema)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    found = cast(Mapping[str, Any], schema)
    yield found
    for name, value in found.items():
        if name in _MAPS and isinstance(value, Mapping):
            for one in cast(Mapping[str, Any], value).values():
                yield from _schemas(one)
        elif name in _LISTS and isinstance(value, list):
            for one in cast(list[Any], value):
                yield from _schemas(one)
        elif name in _SINGLE:
            yield from _schemas(value)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _closed_value(name, value) for name, value in cast(Mapping[str, Any], schema).items()}
    return {**found, "additionalProperties": False} if _names_all(found) else found


def _closed_value(name: str, value: Any) -> Any:
    if name in _MAPS and isinstance(value, Mapping):
        return {key: _closed(one) for key, one in cast(Mapping[str, Any], value).items()}
    if name in _LISTS and isinstance(value, list):
        return [_closed(one) for one in cast(list[Any], value)]
    return _closed(value) if name in _SINGLE else value


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether a schema names properties, among them all that it requires, and says nothing of others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not properties or not isinstance(required, list):
        return False
    return _SAYS_WHICH.isdisjoint(schema) and all(name in properties for name in cast(list[Any], required))
