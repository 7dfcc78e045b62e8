"""Structured output: a random model's outputs have their structure, and valid instances are taken token by token."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLTokenizer

from antiphon import LLM
from tests.models import make_model
from tests.structured import corpus, outputs

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
