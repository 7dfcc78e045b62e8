"""Structured output: a random model's outputs have their structure, and valid instances are taken token by token."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLTokenizer

from antiphon import LLM
from tests.models import make_model
from tests.structured import corpus, functions, outputs

PAIRS = 400


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return corpus.demo_tokenizer()


def test_a_random_model_s_outputs_have_their_structure(tmp_path: Path) -> None:
    with LLM(
        str(make_model(tmp_path, max_position_embeddings=4096)), dtype="float32", kv_cache_memory_gb=0.05, threads=1
    ) as llm:
        assert outputs.wrong_outputs(llm, 100, seed=1) == []


def test_valid_instances_are_taken_token_by_token_in_every_layout(tokenizer: LLTokenizer) -> None:
    chance, taken = random.Random(5), 0
    for _ in range(PAIRS):
        schema, value = corpus.drawn(chance)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        start = corpus.start_of(schema, tokenizer)
        assert start is not None, schema
        for text in corpus.layouts(value):
            assert corpus.takes(start, text), (schema, text)
            taken += 1
    assert taken == 3 * PAIRS


def test_a_directory_s_instances_are_counted(tmp_path: Path, tokenizer: LLTokenizer) -> None:
    tests = [
        {"description": "other order", "data": {"b": 1.0, "a": "x"}, "valid": True},
        {"description": "no integer", "data": {"a": "x", "b": 1.5}, "valid": False},
        {"description": "said to be valid", "data": {"a": 3}, "valid": True},
        {"description": "said to be invalid", "data": {}, "valid": False},
    ]
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "type": "object"}
    groups = [
        {"description": "object", "schema": schema, "tests": tests},
        {"description": "refused", "schema": {"uniqueItems": True}, "tests": tests},
    ]
    (tmp_path / "one.json").write_text(json.dumps(groups))
    found = corpus.of_directory(tmp_path, tokenizer)
    assert (found.refused_schemas, found.schemas, found.valid, found.invalid) == (1, 1, 2, 2)
    assert found.not_taken == ["one.json: object: said to be valid"]
    assert found.wrongly_taken == ["one.json: object: said to be invalid"]


def test_the_functions_of_a_benchmark_are_read_once_and_become_strict_tools(
    tmp_path: Path, tokenizer: LLTokenizer
) -> None:
    points = {"type": "tuple", "items": {"type": "float"}, "description": "two numbers"}
    options = {"type": "dict", "properties": {"deep": {"type": "array", "items": {"type": "any"}}}}
    parameters = {"points": points, "options": options, "names": {"type": "HashMap"}, "untyped": {}, "on": {"type": ""}}
    one = {
        "name": "shape.area",
        "description": "Area.",
        "parameters": {"type": "dict", "properties": parameters, "required": ["points"]},
    }
    other = {**one, "name": "other"}
    (tmp_path / "a.json").write_text("\n".join(json.dumps({"id": each, "function": one}) for each in "xy"))
    (tmp_path / "b.json").write_text(json.dumps({"id": "z", "function": [one, other]}) + "\n")
    (tmp_path / "none.json").write_text(json.dumps({"id": "z", "question": []}))
    (tmp_path / "multi_turn_func_doc").mkdir()
    (tmp_path / "multi_turn_func_doc" / "c.json").write_text(json.dumps(other) + "\n" + json.dumps(one))
    assert functions.distinct(tmp_path) == {"a": [one], "b": [other]}
    function = functions.tool(one)["function"]
    assert (function["name"], function["strict"]) == ("shape_area", True)
    found = function["parameters"]["properties"]
    assert {name: schema["type"] for name, schema in found.items()} == {
        "points": "array", "options": "object", "names": "object", "untyped": "string", "on": "string",
    }  # fmt: skip
    assert found["points"]["items"] == {"type": "number"}
    assert found["options"]["properties"]["deep"]["items"] == {"type": "string"}
    start = corpus.start_of(function["parameters"], tokenizer)
    assert start is not None
    assert corpus.takes(start, '{"points": [1.5, 2], "options": {"deep": ["a"]}, "untyped": "b"}')
    assert not corpus.takes(start, '{"points": ["1.5"]}')
    assert corpus.start_of(one["parameters"], tokenizer) is None
