"""Request fields for structured output become one grammar, or an error that names the field."""

import json
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.request.structured import constraint_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
UNIQUE = {"type": "array", "uniqueItems": True}
CLOSED = {**SCHEMA, "additionalProperties": False}


def asked(**fields: Any) -> Grammar | None:
    constraint = constraint_of(SimpleNamespace(**fields))
    return None if constraint is None else constraint.grammar


class Pet(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json_object": False}, None),
        ({"guided_json": SCHEMA}, Grammar("json", json.dumps(CLOSED))),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json", json.dumps(CLOSED))),
        ({"guided_json": Pet}, Grammar("json", json.dumps({**Pet.model_json_schema(), "additionalProperties": False}))),
        ({"guided_json_object": True}, Grammar("json_object")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["x", "y"]}, Grammar("choice", '["x", "y"]')),
        ({"guided_grammar": "start: /a/"}, Grammar("grammar", "start: /a/")),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, Grammar("json", json.dumps(CLOSED), " ?")),
        (
            {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback"},
            Grammar("json", json.dumps(CLOSED)),
        ),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"json_object": True, "json": None}}, Grammar("json_object")),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            Grammar("json", json.dumps(CLOSED), compact=True),
        ),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json", json.dumps(SCHEMA))),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Grammar("json", json.dumps(SCHEMA)),
        ),
    ],
)
def test_each_field_gives_its_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert asked(**fields) == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 7}, "guided_json"),
        ({"guided_json": {"enum": ["x" * limits.GRAMMAR_BYTES_MAX]}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 60_000] * 5}}, "guided_json"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_decoding_backend": "mine"}, "guided_decoding_backend"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "colour": 1}}, "structured_outputs.colour"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"structural_tag": {"structures": []}}}, "structured_outputs.structural_tag"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}
                }
            },
            "structured_outputs.structural_tag.structures[0].begin",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServiceError) as error:
        asked(**fields)
    assert error.value.param == param
    assert param in error.value.message


def test_a_schema_of_many_texts_may_be_longer_than_other_grammars() -> None:
    assert asked(guided_json={"enum": ["x" * 60_000] * 4}) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": UNIQUE},
        {"structured_outputs": {"json": UNIQUE}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE, "strict": False}}},
        {"response_format": {"type": "json_object", "schema": UNIQUE}},
    ],
)
def test_keywords_that_cannot_be_enforced_are_left_out_and_named(fields: dict[str, Any]) -> None:
    constraint = constraint_of(SimpleNamespace(**fields))
    assert constraint is not None
    assert (constraint.grammar, constraint.ignored) == (Grammar("json", '{"type":"array"}'), ("uniqueItems",))


def test_a_strict_schema_keeps_all_that_it_asks_for() -> None:
    parts = [{"type": "null"}, {"type": "array", "uniqueItems": True}]
    wanted = {"type": "json_schema", "json_schema": {"schema": {"oneOf": parts}, "strict": True}}
    constraint = constraint_of(SimpleNamespace(response_format=wanted))
    assert constraint is not None
    assert (json.loads(constraint.grammar.text), constraint.ignored) == ({"anyOf": parts}, ())
