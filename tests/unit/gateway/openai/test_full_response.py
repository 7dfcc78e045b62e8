import json
from dataclasses import replace

import pytest

from antiphon.services.gateway.apis.openai.answers import full_response as responses
from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.request_context import Kind, RequestContext, system_fingerprint
from antiphon.services.gateway.path.generation import SequenceUpdate
from tests.unit.gateway.bodies import CARD
from tests.unit.gateway.request_contexts import ID, context, position, update


def answer(one: RequestContext, *updates: SequenceUpdate):
    accumulator = ChoiceAccumulator(len(one.echoes), one.request.n, keep_token_ids=one.return_token_ids)
    for item in updates:
        accumulator.choices[item.index].add(item)
        accumulator.choices[item.index].text.append(item.text)
    ids = [[1, 2, 3]] * len(one.echoes) if one.return_token_ids else ()
    return json.loads(responses.answer(one, accumulator, 3 * len(one.echoes), prompt_token_ids=ids))


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_answer_has_its_token_ids_when_they_are_asked_for(kind: Kind):
    updates = [update("a", token_ids=(5, 6)), update("b", index=1, token_ids=(7,)), update("c", token_ids=(8,))]
    body = answer(context(kind, n=2, return_token_ids=True), *updates)
    assert [choice["token_ids"] for choice in body["choices"]] == [[5, 6, 8], [7]]
    holders = body["choices"] if kind == "completion" else [body]
    assert all(holder["prompt_token_ids"] == [1, 2, 3] for holder in holders)
    assert all("token_ids" not in choice for choice in answer(context(kind, n=2), *updates)["choices"])


@pytest.mark.spec("S-API-001", "S-API-070", "S-API-071", "S-API-072", "S-API-073", "S-API-074", "S-API-076")
def test_a_completion_has_the_fields_of_the_api():
    last = update("day", finish_reason="stop", stop_reason="\n", cumulative_logprob=-1.5)
    body = answer(context("completion"), update("Good "), last)
    assert body["id"] == f"cmpl-{ID}"
    assert (body["object"], body["created"], body["model"]) == ("text_completion", 1_700_000_000, "toy")
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Good day",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "\n",
            "sentence_length": 8,
            "cum_log_probs": -1.5,
        }
    ]


@pytest.mark.spec("S-API-002", "S-API-071", "S-API-074")
def test_a_chat_completion_has_a_message():
    body = answer(context(), update("hi", finish_reason="length"))
    assert (body["id"], body["object"]) == (f"chatcmpl-{ID}", "chat.completion")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.spec("S-API-077", "S-API-078")
def test_length_and_log_probability_are_told_for_the_first_choice_and_for_each():
    body = answer(
        context(n=2),
        update("köln", 0, finish_reason="stop", cumulative_logprob=-1.0),
        update("😀", 1, finish_reason="stop", cumulative_logprob=-2.0),
    )
    assert (body["sentence_length"], body["cum_log_probs"]) == (4, -1.0)
    assert [(one["sentence_length"], one["cum_log_probs"]) for one in body["choices"]] == [(4, -1.0), (1, -2.0)]


@pytest.mark.spec("S-API-011", "S-API-018")
def test_choices_are_ordered_by_prompt():
    body = answer(
        context("completion", prompts=2, n=2, echoes=("p", "q")),
        *(update(str(index), index, finish_reason="stop") for index in (3, 1, 0, 2)),
    )
    assert [(one["index"], one["text"]) for one in body["choices"]] == [(0, "p0"), (1, "p1"), (2, "q2"), (3, "q3")]
    assert body["usage"]["prompt_tokens"] == 6


def test_logprobs_are_an_object_only_when_asked_for():
    body = answer(context(logprobs=0), update("a", logprobs=(position("a", -1.0),), finish_reason="stop"))
    assert [one["token"] for one in body["choices"][0]["logprobs"]["content"]] == ["a"]
    legacy = context("completion", logprobs=0)
    body = answer(legacy, update("a", logprobs=(position("a", -1.0),), finish_reason="stop"))
    assert body["choices"][0]["logprobs"]["tokens"] == ["a"]


@pytest.mark.spec("S-API-076")
def test_the_fingerprint_changes_with_the_model_its_limits_and_the_engines_configuration():
    changes = [{}, {"name": "other"}, {"path": "/models/other"}, {"max_model_len": 511}, {"vocab_size": 301}]
    changes += [{"configuration": ("c1",)}, {"configuration": ("c2",)}, {"configuration": ("c1", "c2")}]
    found = [system_fingerprint(replace(CARD, **change)) for change in changes]
    assert len(set(found)) == len(changes)
    assert system_fingerprint(replace(CARD, created=2)) == found[0]
