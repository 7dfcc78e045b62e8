"""Log probabilities of prompts over HTTP and offline: those of transformers, in OpenAI's and in vLLM's format."""

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from antiphon import LLM, SamplingParams
from tests.models import reference_log_probabilities
from tests.system.api.asking import HELLO, PROMPT, chat, complete, refused, texts, usage
from tests.system.offline import FLAGS, generate

pytestmark = [pytest.mark.system, pytest.mark.nats]
GREEDY = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT).ids


@pytest.fixture(scope="module")
def expected(model: Path, ids: list[int]) -> Any:
    """[prompt - 1, vocab]: what transformers says of the token after each token of the prompt."""
    return reference_log_probabilities(model, [ids[:end] for end in range(1, len(ids))], "float32").numpy()


def chosen(expected: Any, ids: list[int]) -> list[float]:
    return expected[np.arange(len(ids) - 1), ids[1:]].tolist()


def test_an_echo_with_log_probabilities_begins_with_those_of_the_prompt(
    client: openai.OpenAI, tokenizer: Tokenizer, ids: list[int], expected: Any
) -> None:
    alone = complete(client, logprobs=2, **GREEDY).choices[0].logprobs
    for prompt in (PROMPT, ids):
        answer = complete(client, prompt, echo=True, logprobs=2, **GREEDY)
        shown = answer.choices[0].logprobs
        assert shown is not None
        assert alone is not None
        assert shown.token_logprobs is not None
        assert shown.token_logprobs[0] is None
        assert shown.token_logprobs[1 : len(ids)] == pytest.approx(chosen(expected, ids), abs=1e-4)
        assert shown.token_logprobs[len(ids) :] == pytest.approx(alone.token_logprobs, abs=1e-4)
        assert shown.tokens == [tokenizer.decode([one]) for one in ids] + (alone.tokens or [])
        assert "".join(shown.tokens or []) == texts(answer)[0]
        assert shown.top_logprobs is not None
        assert shown.top_logprobs[0] is None
        best = [max(top.values()) for top in shown.top_logprobs[1 : len(ids)]]
        assert best == pytest.approx(expected.max(axis=1), abs=1e-4)
        # Tokens with the same text count once.
        assert {len(top) for top in shown.top_logprobs[1:]} <= {1, 2, 3}
        assert shown.text_offset is not None
        assert shown.text_offset[0] == 0
        assert shown.text_offset[len(ids)] == len(PROMPT)


def test_an_echo_without_output_is_only_the_prompt(client: openai.OpenAI, ids: list[int], expected: Any) -> None:
    answer = complete(client, [PROMPT, "the"], echo=True, logprobs=1, max_tokens=0)
    assert texts(answer) == [PROMPT, "the"]
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert shown.token_logprobs is not None
    assert shown.token_logprobs[0] is None
    assert shown.token_logprobs[1:] == pytest.approx(chosen(expected, ids), abs=1e-4)
    assert answer.choices[0].finish_reason == "length"
    assert usage(answer)[1] == 0
    assert texts(complete(client, echo=True, max_tokens=0)) == [PROMPT]
    stream = client.completions.create(
        model="model", prompt=PROMPT, echo=True, max_tokens=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 0
    one = complete(client, [[65]], echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    assert one is not None
    assert one.token_logprobs == [None]


def test_prompt_logprobs_have_the_format_of_vllm(
    client: openai.OpenAI, tokenizer: Tokenizer, ids: list[int], expected: Any
) -> None:
    answer = complete(client, prompt_logprobs=3, n=2, max_tokens=2)
    for choice in answer.choices:
        first, *others = choice.prompt_logprobs  # pyright: ignore[reportAttributeAccessIssue]
        assert first is None
        assert len(others) == len(ids) - 1
        for entry, token_id, row in zip(others, ids[1:], expected, strict=True):
            assert entry[str(token_id)]["logprob"] == pytest.approx(row[token_id], abs=1e-4)
            assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id])
            assert entry[str(token_id)]["rank"] == 1 + int((row > row[token_id]).sum())
            ranked = {about["rank"]: about["logprob"] for about in entry.values()}
            assert sorted(ranked)[:3] == [1, 2, 3]
            assert [ranked[rank] for rank in (1, 2, 3)] == pytest.approx(-np.sort(-row)[:3], abs=1e-4)
    said = chat(client, HELLO, prompt_logprobs=0, max_tokens=2)
    shown: Any = said.model_dump()["prompt_logprobs"]
    assert len(shown) == usage(said)[0]
    assert [shown[0], *{len(entry) for entry in shown[1:]}] == [None, 1]
    assert "prompt_logprobs" not in complete(client, prompt_logprobs=False, max_tokens=1).choices[0].model_dump()


def test_several_prompts_samples_and_a_long_prompt_each_get_their_own(client: openai.OpenAI) -> None:
    prompts = ["one two three", "word " * 40]
    both = complete(client, prompts, prompt_logprobs=1, n=1, best_of=3, max_tokens=2)
    counts = [len(choice.prompt_logprobs) for choice in both.choices]  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(counts) == usage(both)[0]
    for prompt, choice in zip(prompts, both.choices, strict=True):
        [alone] = complete(client, prompt, prompt_logprobs=1, max_tokens=1).choices
        assert choice.prompt_logprobs == alone.prompt_logprobs  # pyright: ignore[reportAttributeAccessIssue]


def test_what_cannot_be_reported_is_refused_by_name(client: openai.OpenAI) -> None:
    refused(client, "prompt_logprobs", prompt_logprobs=-1)
    refused(client, "prompt_logprobs", prompt_logprobs=21)
    refused(client, "prompt_logprobs", prompt_logprobs=True)
    refused(client, "stream", prompt_logprobs=1, stream=True)
    refused(client, "prompt_logprobs", prompt_logprobs=1, use_beam_search=True, n=2, temperature=0)
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, echo=True, stream=True, logprobs=1)
    assert error.value.param == "stream"
    refused(client, "max_tokens", max_tokens=0)


def test_offline_gives_the_same(model: Path, ids: list[int], expected: Any) -> None:
    with LLM(str(model), **FLAGS) as llm:
        [found] = generate(llm, PROMPT, SamplingParams(prompt_logprobs=2, n=2, max_tokens=2))
        assert found.prompt_logprobs is not None
        assert found.prompt_logprobs[0] is None
        shown = [entry[token_id].logprob for entry, token_id in zip(found.prompt_logprobs[1:], ids[1:], strict=True)]
        assert shown == pytest.approx(chosen(expected, ids), abs=1e-4)
        assert generate(llm, PROMPT, SamplingParams(max_tokens=1))[0].prompt_logprobs is None
