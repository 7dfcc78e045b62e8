"""What is left out of a JSON Schema only widens it, and what is not named changes nothing."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.request.schemas.relaxation import relaxed
from antiphon.shared.text.grammars.constraint import byte_tokenizer, check_grammar

NAMES = ["a", "b", "not", "oneOf", "format"]
VALUES: list[Any] = [None, True, False, 0, 1, 1.0, 2, "", "a", "bb", [], [1, 1], [1, "a"], {}]
KINDS = ["string", "integer", "number", "object", "array", "null", "boolean"]
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True),
    "const": st.sampled_from(VALUES),
    "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3),
    "format": st.sampled_from(["byte", "date"]),
    "uniqueItems": st.booleans(),
    "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
    "minProperties": st.integers(0, 2),
    "maxProperties": st.integers(0, 2),
    "minContains": st.integers(0, 2),
    "dependentRequired": st.just({"a": ["b"]}),
    "minLength": st.integers(0, 2),
    "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
    "title": st.just("not"),
}
PLACES = [
    *("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    *("additionalProperties", "items"),
]


def parts_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    members = {
        **SCALARS,
        **dict.fromkeys(PLACES, inner),
        **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], several),
        **dict.fromkeys(["properties", "dependentSchemas"], named),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "o"]), inner, max_size=1),
    }
    return st.fixed_dictionaries({}, optional=members).map(lambda one: dict(list(one.items())[:5]))


SCHEMAS: Any = st.recursive(st.booleans() | st.fixed_dictionaries({}, optional=SCALARS), parts_of, max_leaves=8)
ACYCLIC: Any = SCHEMAS.map(lambda one: json.loads(json.dumps(one).replace('"$ref"', '"x-ref"')))
INSTANCES: Any = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=5,
)
KEY = {"properties": {"k": {"const": "a"}}, "required": ["k"], "type": "object"}
OTHER = {"properties": {"k": {"const": "b"}}, "required": ["k"]}


def accepts(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, ACYCLIC, ACYCLIC, st.lists(INSTANCES, min_size=1, max_size=12))
def test_every_value_that_a_schema_accepts_is_still_accepted(schema: Any, x: Any, y: Any, values: list[Any]) -> None:
    whole: Any = {"allOf": [schema], "$defs": {"x": x, "y": y}}
    wide, same = relaxed(whole), relaxed(whole, exact=True)
    assert same.ignored == ()
    for value in values:
        accepted = accepts(whole, value)
        assert accepts(same.schema, value) == accepted
        assert accepts(wide.schema, value) >= accepted
        if not set(wide.ignored) - {"format"}:  # the validator takes a format for a comment
            assert accepts(wide.schema, value) == accepted


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "string", "format": "uri-reference"}, ["format"]),
        ({"items": {"not": {"type": "null"}}, "uniqueItems": True}, ["not", "uniqueItems"]),
        ({"uniqueItems": False, "then": {}, "maxContains": 1}, []),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"]),
        ({"dependencies": {"a": ["b"]}, "contains": {}, "propertyNames": {}}, ["dependencies", "contains",
                                                                               "propertyNames"]),
        ({"$defs": {"a": {"unevaluatedProperties": False}}, "$ref": "#/$defs/a"}, ["unevaluatedProperties"]),
        ({"properties": {"a": {}}, "minProperties": 1, "maxProperties": 3}, ["minProperties", "maxProperties"]),
        ({"properties": {"a": {}}, "minProperties": 1, "additionalProperties": False}, []),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["oneOf"]),
        ({"oneOf": [{"type": "number"}, {"type": ["string", "null"]}]}, []),
        ({"oneOf": [{"enum": [1, True]}, {"enum": [0, "1"]}, {"const": None}]}, []),
        ({"oneOf": [{"const": 1}, {"enum": [1.0]}]}, ["oneOf"]),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": KEY, "b": OTHER}}, []),
        ({"oneOf": [{**KEY, "type": ["object", "null"]}, OTHER]}, ["oneOf"]),
        ({"oneOf": [{"type": "null"}, {}], "anyOf": [{"type": "null"}, {"not": {}}]}, ["not", "oneOf"]),
        ({"type": "integer", "format": "int32"}, []),
        ({"properties": {"not": {"const": {"not": 1}}, "if": {"default": {"oneOf": 1}}}}, []),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named_and_the_rest_compiles(schema: Any, ignored: list[str]) -> None:
    found = relaxed(schema)
    assert sorted(found.ignored) == sorted(ignored)
    check_grammar(Grammar("json", json.dumps(found.schema)), byte_tokenizer())


def test_a_schema_that_can_be_enforced_stays_as_it_is() -> None:
    schema: Any = {"type": "object", "properties": {"not": {"format": "date"}, "oneOf": {"enum": [{"not": 1}]}}}
    assert relaxed(schema) == (schema, ())


def test_annotations_are_left_out_if_asked_for_and_properties_of_their_names_are_not() -> None:
    inner = {"type": "string", "enum": ["a"]}
    told = {"description": "d", "title": "t", "default": "a", "examples": ["a"]}
    schema: Any = {"type": "object", "properties": {"title": {**inner, **told}}, "required": ["title"], **told}
    bare = {"type": "object", "properties": {"title": inner}, "required": ["title"]}
    assert relaxed(schema, bare=True) == relaxed(schema, exact=True, bare=True) == (bare, ())
    assert relaxed(schema) == (schema, ())


@pytest.mark.parametrize(
    "wrong",
    [{"oneOf": 1}, {"oneOf": [1, "a"], "allOf": 2}, {"properties": [{"not": 1}]}, {"required": 5, "minProperties": "x"},
     {"oneOf": [{"enum": [[1]], "type": 7}, {"required": [1], "properties": 3, "$ref": "#/a/~1"}]},
     {"properties": {}, "maxProperties": [], "format": {}}, {"type": [["string"]], "format": "x"}],
)  # fmt: skip
def test_what_is_malformed_is_left_to_the_compiler(wrong: Any) -> None:
    text = json.dumps(relaxed(wrong).schema)
    with pytest.raises(ServiceError):
        check_grammar(Grammar("json", text), byte_tokenizer())


def test_work_and_recursion_are_bounded() -> None:
    deep: Any = {"not": {}}
    for _ in range(400):
        deep = {"items": deep}
    assert relaxed(deep).schema == deep
    parts = [{"const": str(number)} for number in range(10_000)]
    assert relaxed({"oneOf": parts}) == ({"anyOf": parts}, ("oneOf",))


@pytest.mark.parametrize(
    ("schema", "advice"),
    [
        ({"type": "dict"}, "The types of JSON Schema are array, boolean, integer, null, number, object and string."),
        ({"properties": {"x": {"items": {"type": "float"}}}}, "The types of JSON Schema are"),
        (
            {"type": "object", "properties": {"x": {"type": "integer", "enum": ["1", "2"]}}, "required": ["x"]},
            "No value matches it: compare its 'type' with its 'enum', 'const' and limits.",
        ),
    ],
)
def test_a_refusal_says_what_to_change(schema: Any, advice: str) -> None:
    with pytest.raises(ServiceError, match=advice):
        check_grammar(Grammar("json", json.dumps(schema)), byte_tokenizer())
