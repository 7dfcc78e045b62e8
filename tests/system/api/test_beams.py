"""Beam search and `best_of` over HTTP and offline: transformers' hypotheses, the best samples, refusals by name."""

from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from antiphon import LLM, SamplingParams
from tests.models import EOS_TOKEN_ID, beam_reference
from tests.system.api.asking import HELLO, PROMPT, chat, complete, refused, texts, usage
from tests.system.offline import FLAGS, generate

pytestmark = [pytest.mark.system, pytest.mark.nats]
BEAM = {"use_beam_search": True, "n": 2, "best_of": 4, "temperature": 0, "top_p": 1, "top_k": -1, "max_tokens": 12}


def reference(model: Path, tokenizer: Tokenizer, **options: Any) -> list[list[int]]:
    fixed = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12}
    return beam_reference(model, tokenizer.encode(PROMPT).ids, [EOS_TOKEN_ID], **{**fixed, **options})


@pytest.mark.spec("S-API-020", "S-API-021", "S-API-052")
@pytest.mark.parametrize("fields", [{}, {"length_penalty": 0.5}, {"length_penalty": 2.0, "early_stopping": "never"}])
def test_the_texts_are_those_of_transformers(
    client: openai.OpenAI, model: Path, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    answer = complete(client, **BEAM, **fields, return_token_ids=True)
    found = reference(model, tokenizer, **fields)
    assert [choice.token_ids for choice in answer.choices] == found  # pyright: ignore[reportAttributeAccessIssue]
    assert texts(answer) == [tokenizer.decode(ids) for ids in found]
    assert usage(answer)[1] == sum(map(len, found))


@pytest.mark.spec("S-API-020", "S-API-051")
def test_without_n_all_hypotheses_are_returned(client: openai.OpenAI) -> None:
    fields = {key: value for key, value in BEAM.items() if key != "n"}
    assert len(complete(client, **{**fields, "best_of": 2}).choices) == 2
    both = complete(client, ["one", "two"], **BEAM)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert texts(both)[:2] == texts(complete(client, "one", **BEAM))
    said = chat(client, **BEAM).choices
    assert len({choice.message.content for choice in said}) == 2


@pytest.mark.spec("S-API-051", "S-API-052")
@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("n", {"n": 1, "best_of": None}),
        ("temperature", {"temperature": 0.5}),
        ("top_p", {"top_p": 0.9}),
        ("top_k", {"top_k": 5}),
        ("stream", {"stream": True}),
        ("length_penalty", {"use_beam_search": False, "length_penalty": 0.8, "best_of": None, "n": 1}),
        ("best_of", {"best_of": 1}),
    ],
)
def test_what_contradicts_a_beam_search_is_refused_by_both_endpoints(
    client: openai.OpenAI, param: str, changed: dict[str, Any]
) -> None:
    refused(client, param, **{**BEAM, **changed})


def test_a_search_that_the_cache_cannot_hold_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="KV blocks"):
        complete(client, **{**BEAM, "n": 16, "best_of": 16, "max_tokens": 200})


@pytest.mark.spec("S-API-019", "S-API-057")
def test_best_of_returns_the_samples_with_the_highest_log_probability(client: openai.OpenAI) -> None:
    def cumulative(**fields: Any) -> list[float]:
        choices = complete(client, seed=5, max_tokens=8, **fields).choices
        return [choice.cum_log_probs for choice in choices]  # pyright: ignore[reportAttributeAccessIssue]

    every = cumulative(n=4)
    assert len(set(every)) == 4
    assert cumulative(n=1, best_of=4) == [max(every)]
    assert cumulative(n=3, best_of=4) == sorted(every, reverse=True)[:3]
    answer = complete(client, ["one", "two"], seed=5, n=2, best_of=3, max_tokens=8, ignore_eos=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert usage(answer)[1] == 4 * 8
    assert len(chat(client, HELLO, n=1, best_of=3, max_tokens=4).choices) == 1
    assert len(complete(client, n=2, max_tokens=1).choices) == 2
    refused(client, "stream", n=2, best_of=3, stream=True)
    refused(client, "best_of", best_of=2, temperature=0)
    refused(client, "best_of", n=3, best_of=2)


@pytest.mark.spec("S-OFF-040a")
def test_offline_gives_the_same(client: openai.OpenAI, model: Path, tokenizer: Tokenizer) -> None:
    with LLM(str(model), **FLAGS) as llm:
        fields = {key: value for key, value in BEAM.items() if key not in ("top_p", "top_k")}
        [found] = generate(llm, PROMPT, SamplingParams(**fields, length_penalty=0.5))
        assert [one.token_ids for one in found.outputs] == reference(model, tokenizer, length_penalty=0.5)
        assert [one.index for one in found.outputs] == [0, 1]
        [sampled] = generate(llm, PROMPT, SamplingParams(n=2, best_of=4, seed=5, max_tokens=8))
        assert [one.text for one in sampled.outputs] == texts(complete(client, seed=5, max_tokens=8, n=2, best_of=4))
        assert len(generate(llm, PROMPT, SamplingParams(max_tokens=1))[0].outputs) == 1
        assert len(generate(llm, PROMPT, SamplingParams(n=3, max_tokens=1))[0].outputs) == 3
