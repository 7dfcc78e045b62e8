"""Structured output and constraints on tokens, through the whole system, with a model whose weights are random."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from tests.models import make_inclined_model
from tests.system.api.asking import PROMPT, chat, complete, refused, texts
from tests.system.served import Served, fetch, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats]
CHARACTER: dict[str, Any] = {
    "title": "Character",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "maxLength": 10, "type": "string"},
        "age": {"title": "Age", "type": "integer"},
        "armor": {"$ref": "#/definitions/Armor"},
        "weapon": {"$ref": "#/definitions/Weapon"},
        "strength": {"title": "Strength", "type": "integer"},
    },
    "required": ["name", "age", "armor", "weapon", "strength"],
    "definitions": {
        "Armor": {
            "title": "Armor",
            "description": "An enumeration.",
            "type": "string",
            "enum": ["leather", "chainmail", "plate"],
        },
        "Weapon": {
            "title": "Weapon",
            "description": "An enumeration.",
            "type": "string",
            "enum": ["sword", "axe", "mace", "spear", "bow", "crossbow"],
        },
    },
}
LOOP = {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}}
SHEET = "A knight called Knight, 32 years old, in plate armour, with a sword and strength 90. Write the sheet: "
SMALL = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "tag": {"enum": ["a", "b"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
"""Every output of this schema is short, whatever the model."""


def finite(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema whose outputs all are short."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chance.randint(0, 4)},
        {"type": "integer", "minimum": -9, "maximum": chance.randint(0, 999)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", 7, None, "blue"][: chance.randint(1, 4)]},
        {"const": "x"},
    ]
    if depth > 1 or chance.random() < 0.4:
        return chance.choice(kinds)
    if chance.random() < 0.3:
        return {"type": "array", "items": finite(chance, depth + 1), "minItems": 1, "maxItems": 2}
    names = [f"k{number}" for number in range(chance.randint(1, 3))]
    properties = {name: finite(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.spec("S-API-060", "S-API-061", "S-API-063", "S-DEP-045", "S-API-037")
def test_the_worked_example_gives_a_character_sheet(client: openai.OpenAI) -> None:
    # A random model rarely ends a number, so the few digits that it may write are given by the schema.
    schema = json.loads(json.dumps(CHARACTER))
    for name in ("age", "strength"):
        schema["properties"][name] |= {"minimum": 0, "maximum": 100}
    schema["properties"]["name"]["pattern"] = "^[A-Za-z ]*$"
    # It writes as much whitespace as it may, too.
    asked = {"max_tokens": 130, "temperature": 0, "guided_whitespace_pattern": " ?"}
    text = complete(client, SHEET, guided_json=json.dumps(schema), **asked)
    sheet = json.loads(text.choices[0].text)
    jsonschema.validate(sheet, CHARACTER)
    assert len(sheet["name"]) <= 10
    assert text.choices[0].finish_reason == "stop"
    assert texts(complete(client, SHEET, guided_json=schema, **asked)) == texts(text)
    said = chat(client, [{"role": "user", "content": SHEET}], guided_json=schema, **asked).choices[0]
    jsonschema.validate(json.loads(said.message.content or ""), CHARACTER)


@pytest.fixture(scope="module")
def sheet_writer(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model that would rather end an object than write on, but would never end a string."""
    inclinations = {"}": 30.0, ",": 20.0, '"': 10.0} | dict.fromkeys(" \n\t\r", -10.0)
    by_id = {tokenizer.encode(text).ids[0]: value for text, value in inclinations.items()}
    directory = make_inclined_model(tmp_path_factory.mktemp("inclined"), by_id)
    with until_the_end(Served(f"--model={directory}", "--dtype=float32")) as started:
        yield started


@pytest.mark.spec("S-API-060", "S-API-061", "S-API-063", "S-DEP-045")
def test_the_worked_example_to_the_letter(sheet_writer: Served) -> None:
    """The request of the documentation, with nothing added to help the model."""
    prompt = "A knight called Knight, 32 years old, in plate armour, armed with a sword, strength 90. "
    prompt += "Name, age, armour, weapon and strength of this character:"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 200, "temperature": 0}
    choices = []
    for schema in (json.dumps(CHARACTER), CHARACTER):
        answer = fetch(sheet_writer, "POST", "/v1/completions", {**body, "guided_json": schema})
        assert answer.status == 200, answer.body
        choices += answer.json["choices"]
    text = choices[0]["text"]
    assert choices[1]["text"] == text
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    sheet = json.loads(text)
    jsonschema.validate(sheet, CHARACTER)
    # Nothing but the schema ends this model's strings.
    assert len(sheet["name"]) == CHARACTER["properties"]["name"]["maxLength"] == 10
    assert sheet["armor"] in CHARACTER["definitions"]["Armor"]["enum"]
    assert sheet["weapon"] in CHARACTER["definitions"]["Weapon"]["enum"]
    assert fetch(sheet_writer, "POST", "/v1/completions", body).json["choices"][0]["finish_reason"] == "length"


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with until_the_end(Served()) as started:
        yield started


@pytest.mark.spec("S-API-060", "S-API-061", "S-API-063", "S-DEP-045")
def test_the_demo_model_ends_the_worked_example_to_the_letter(demo: Served) -> None:
    """Without further limits: a trained model that may write properties of its own repeats one until it is cut off."""
    prompt = (
        "Meet our brave character, named Knight, who is 32 years old. Clad in plate armor, Knight is ready for any "
    )
    prompt += (
        "battle. Armed with a sword and with a strength of 90, this character is a formidable warrior. Please give "
    )
    prompt += "the details of this character: Name, Age, preferred Armor, Weapon and Strength"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 200, "temperature": 0}
    for fields in ({"guided_json": json.dumps(CHARACTER)}, {"structured_outputs": {"json": CHARACTER}}):
        answer = fetch(demo, "POST", "/v1/completions", {**body, **fields})
        assert answer.status == 200, answer.body
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "stop", choice
        sheet = json.loads(choice["text"])
        jsonschema.validate(sheet, CHARACTER)
        assert list(sheet) == list(CHARACTER["properties"])


@pytest.mark.spec("S-API-062")
def test_a_prompt_without_the_facts_still_gives_a_valid_object(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}, "required": ["name"]}
    schema["additionalProperties"] = False
    answer = complete(client, "Nothing is known.", guided_json=schema, max_tokens=120, temperature=1, seed=3)
    jsonschema.validate(json.loads(answer.choices[0].text), schema)


def test_random_schemas_give_valid_outputs_in_one_batch(client: openai.OpenAI) -> None:
    for seed in range(40):
        schema = {"type": "object", "properties": {"v": finite(random.Random(seed))}, "required": ["v"]}
        schema["additionalProperties"] = False
        fields = {"guided_json": schema, "guided_whitespace_pattern": " ?", "n": 3, "temperature": 1, "seed": seed}
        answer = complete(client, max_tokens=200, **fields)
        for choice in answer.choices:
            assert choice.finish_reason == "stop", choice.text
            jsonschema.validate(json.loads(choice.text), schema)


def test_each_kind_of_structure_shapes_the_output(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 1, "seed": 1}
    assert complete(client, guided_choice=["left", "right"], **asked).choices[0].text in ("left", "right")
    assert complete(client, structured_outputs={"regex": "[a-c]{4}"}, **asked).choices[0].text.strip("abc") == ""
    ones = complete(client, guided_grammar='root ::= "(" root ")" | "1"', **asked).choices[0]
    assert ones.text.strip("()") == "1" or ones.finish_reason == "length"
    whole = complete(client, structured_outputs={"json": SMALL, "disable_any_whitespace": True}, **asked).choices[0]
    assert whole.text == json.dumps(json.loads(whole.text), separators=(",", ":"))
    jsonschema.validate(json.loads(whole.text), SMALL)
    ids = complete(client, [1, 2, 3], guided_json=SMALL, guided_whitespace_pattern=" ?", **asked).choices[0]
    jsonschema.validate(json.loads(ids.text), SMALL)


def test_the_official_client_parses_a_model_s_answer(client: openai.OpenAI) -> None:
    class Point(BaseModel):
        x: bool
        y: bool

    asked: Any = {"model": "model", "messages": [{"role": "user", "content": "Where?"}], "temperature": 1, "seed": 4}
    asked["extra_body"] = {"guided_whitespace_pattern": " ?"}
    parsed = client.chat.completions.parse(**asked, response_format=Point).choices[0].message.parsed
    assert isinstance(parsed, Point)
    formatted = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL}}, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in formatted if chunk.choices)
    jsonschema.validate(json.loads(text), SMALL)


def test_the_other_apis_have_the_same_structures(client: openai.OpenAI, served: Served) -> None:
    asked: dict[str, Any] = {"temperature": 1, "seed": 4}
    schema: Any = {"type": "json_schema", "name": "small", "schema": SMALL}
    response = client.responses.create(
        model="model", input="Where?", text={"format": schema}, temperature=1, extra_body={"seed": 4}
    )
    jsonschema.validate(json.loads(response.output_text), SMALL)
    body = {"model": "model", "prompt": "Where?", "options": asked, "stream": False}
    reply = fetch(served, "POST", "/api/generate", {**body, "format": SMALL})
    jsonschema.validate(json.loads(reply.json["response"]), SMALL)
    wrong = fetch(served, "POST", "/api/generate", {**body, "format": {"type": "strng"}})
    assert wrong.status == 400
    assert "'format'" in wrong.json["error"]
    mistaken: Any = {"format": {**schema, "schema": {"type": "x"}}}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="model", input="Where?", text=mistaken)
    assert error.value.param == "text.format.schema"


def test_a_complete_output_ends_whatever_else_is_asked(client: openai.OpenAI) -> None:
    answer = complete(client, guided_choice=["left"], ignore_eos=True, min_tokens=20, max_tokens=60)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("left", "stop")
    cut = complete(client, guided_json=SMALL, max_tokens=3, temperature=0).choices[0]
    assert cut.finish_reason == "length"


@pytest.mark.spec("S-API-037")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "strng"}}, "guided_json"),
        ({"guided_json": LOOP}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"guided_json": SMALL, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_a_structure_that_cannot_be_used_is_refused(client: openai.OpenAI, fields: Any, param: str) -> None:
    refused(client, param, **fields)


@pytest.mark.spec("S-API-025")
def test_a_bias_makes_tokens_likely_and_unlikely(
    client: openai.OpenAI, served: Served, greedy: list[int], tokenizer: Tokenizer, model: Path
) -> None:
    def ids(**fields: Any) -> list[int]:
        answer = fetch(served, "POST", "/v1/completions", {"prompt": PROMPT, "return_token_ids": True, **fields})
        assert answer.status == 200, answer.body
        return json.loads(answer.body)["choices"][0]["token_ids"]

    five = {"max_tokens": 5, "ignore_eos": True}
    assert ids(logit_bias={"77": 100}, temperature=1, **five) == [77] * 5
    assert ids(logit_bias={str(greedy[0]): -100}, temperature=0, **five)[0] != greedy[0]
    assert ids(logit_bias={}, temperature=0, **five) == greedy[:5]
    plain, biased = (
        complete(client, temperature=0, logprobs=0, max_tokens=1, logit_bias=bias).choices[0].logprobs
        for bias in ({}, {str(greedy[0]): 5})
    )
    assert plain is not None
    assert biased is not None
    # Log probabilities are the model's own, before the bias.
    assert biased.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-4)
    for bad in ({"77": 101}, {"77": -100.5}, {"word": 1}, {str(tokenizer.get_vocab_size() + 10_000): 1}):
        refused(client, "logit_bias", logit_bias=bad)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    refused(client, "logit_bias", logit_bias={str(vocab_size): 1})
    assert ids(logit_bias={str(vocab_size - 1): 1}, temperature=0, **five)


@pytest.mark.spec("S-API-032")
def test_bad_words_never_occur_and_allowed_tokens_alone_do(
    client: openai.OpenAI, greedy: list[int], tokenizer: Tokenizer
) -> None:
    asked: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 2, "n": 5, "return_token_ids": True}
    answer = complete(client, bad_words=greedy[:8], seed=2, **asked)
    found = {token_id for choice in answer.choices for token_id in (choice.model_extra or {})["token_ids"]}
    assert not found & set(greedy[:8])
    word = tokenizer.decode(greedy[:2])
    assert word not in complete(client, bad_words=[word.strip()], temperature=0, max_tokens=32).choices[0].text
    few = complete(client, allowed_token_ids=[50, 60], **asked)
    assert {token_id for choice in few.choices for token_id in (choice.model_extra or {})["token_ids"]} == {50, 60}
    refused(client, "bad_words", bad_words=[10**6])
    refused(client, "allowed_token_ids", allowed_token_ids=[])
    refused(client, "allowed_token_ids", allowed_token_ids=[10**6])
