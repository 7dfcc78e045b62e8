"""Objects that name their properties get no others, except where the schema or its parts say otherwise."""

from typing import Any

import pytest

from antiphon.shared.request.schemas.closed_objects import closed

NO_OTHERS = {"additionalProperties": False}


def named(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (named("a"), named("a") | NO_OTHERS),
        (named("a", required=["a"]), named("a", required=["a"]) | NO_OTHERS),
        ({"type": "array", "items": named("a")}, {"type": "array", "items": named("a") | NO_OTHERS}),
        ({"items": [named("a")]}, {"items": [named("a") | NO_OTHERS]}),
        ({"anyOf": [named("a"), named("b")]}, {"anyOf": [named("a") | NO_OTHERS, named("b") | NO_OTHERS]}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": named("a")}},
         {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": named("a") | NO_OTHERS}}),
        ({"$ref": "#/definitions/A", "definitions": {"A": named("a")}},
         {"$ref": "#/definitions/A", "definitions": {"A": named("a") | NO_OTHERS}}),
        ({"additionalProperties": named("a")}, {"additionalProperties": named("a") | NO_OTHERS}),
        # A property may be called like a keyword.
        ({"properties": {"properties": named("a"), "enum": {"enum": [named("a")]}}},
         {"properties": {"properties": named("a") | NO_OTHERS, "enum": {"enum": [named("a")]}}} | NO_OTHERS),
    ],
)  # fmt: skip
def test_objects_that_name_their_properties_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        named("a", additionalProperties=True),
        named("a", additionalProperties={"type": "string"}),
        named("a", patternProperties={"^x": {}}),
        named("a", unevaluatedProperties=False),
        named("a", minProperties=2),
        named("a", required=["b"]),
        named("a", anyOf=[{"required": ["a"]}, named("b")]),
        {"allOf": [named("a"), named("b")]},
        {"allOf": [named("a")], "$ref": "#/$defs/A", "$defs": {"A": named("b")}},
        {"items": {"allOf": [{"$ref": "#/$defs/A"}, named("b")]}, "$defs": {"A": named("a")}},
        {"not": named("a")},
        {"if": named("a"), "then": named("b")},
        {"enum": [named("a")], "default": named("a")},
        {"properties": 1, "allOf": 2, "items": None, "required": 3},
    ],
)
def test_a_schema_that_says_otherwise_or_combines_parts_stays(schema: Any) -> None:
    assert closed(schema) == schema
