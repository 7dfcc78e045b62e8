"""Structured output and constraints on tokens in the offline API."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest

from antiphon import LLM, GuidedDecodingRequest, SamplingParams
from tests.system.offline import generate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "tag": {"enum": ["a", "b"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
SHORT = {"max_tokens": 150, "temperature": 1.0, "seed": 7}


class Switch(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    on: bool


@pytest.mark.spec("S-API-060", "S-API-037")
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Switch], ids=["dict", "text", "class"])
def test_a_schema_may_be_a_dict_its_text_or_a_class(llm: LLM, schema: Any) -> None:
    params = SamplingParams(structured_outputs={"json": schema, "disable_any_whitespace": True}, **SHORT)
    [one] = generate(llm, "A", params)
    expected = Switch.model_json_schema() if schema is Switch else SCHEMA
    jsonschema.validate(json.loads(one.outputs[0].text or ""), expected)
    assert one.outputs[0].finish_reason == "stop"


@pytest.mark.spec("S-OFF-035")
def test_one_structure_holds_for_all_prompts_of_a_call(llm: LLM) -> None:
    params = [SamplingParams(**SHORT), SamplingParams(**{**SHORT, "seed": 8})]
    request = GuidedDecodingRequest(guided_regex="[ab]{3}")
    for form in (request, {"guided_regex": "[ab]{3}"}):
        texts = [one.outputs[0].text or "" for one in generate(llm, ["A", "B"], params, guided_options_request=form)]
        assert all(len(text) == 3 and set(text) <= {"a", "b"} for text in texts)
    assert params[0].grammar is None
    [yes] = generate(llm, "A", guided_options_request={"guided_choice": ["yes", "no"]})
    assert yes.outputs[0].text in ("yes", "no")
    for bad in ({}, {"guided_regex": "a", "guided_choice": ["b"]}, {"guided_json": "{"}):
        with pytest.raises(ValueError, match="guided_"):
            generate(llm, "A", guided_options_request=bad)
    with pytest.raises(TypeError):
        generate(llm, "A", guided_options_request={"guided_colour": "red"})
    with pytest.raises(ValueError, match="have a structure"):
        generate(llm, "A", SamplingParams(guided_json=SCHEMA), guided_options_request=request)


@pytest.mark.spec("S-OFF-040j")
def test_bad_words_do_not_occur(llm: LLM) -> None:
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    [plain] = generate(llm, "Once upon a time", SamplingParams(**greedy))
    first = plain.outputs[0].token_ids[0]
    [without] = generate(llm, "Once upon a time", SamplingParams(bad_words=[first], **greedy))
    assert first not in without.outputs[0].token_ids
    assert SamplingParams().bad_words is None
    [only] = generate(llm, "Once", SamplingParams(allowed_token_ids=[first], **greedy))
    assert set(only.outputs[0].token_ids) == {first}
    [biased] = generate(llm, "Once", SamplingParams(logit_bias={first: 100}, **greedy))
    assert set(biased.outputs[0].token_ids) == {first}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(llm, "Once", SamplingParams(bad_words=[10**6]))


def test_lookahead_keeps_the_structure_and_the_tokens(model: Path) -> None:
    """Draft tokens are checked against the grammar: the output is the same as without them."""
    flags = {"dtype": "float32", "block_size": 8, "kv_cache_memory_gb": 0.05, "threads": 1}
    request = GuidedDecodingRequest(guided_regex="(ab ){40}")
    found: list[Any] = []
    for more in ({}, {"use_v2_block_manager": True, "use_lookahead": True, "num_speculative_tokens": 4}):
        llm = LLM(str(model), **flags, **more)
        params = SamplingParams(temperature=0, max_tokens=150)
        [one] = generate(llm, "ab ab ab ab ab ab", params, guided_options_request=request)
        found.append(one.outputs[0].token_ids)
        assert one.outputs[0].text == "ab " * 40
        llm.close()
    assert found[0] == found[1]
