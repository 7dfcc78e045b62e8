"""`POST /generate` of a running system: both forms, compared with the OpenAI endpoints of the same system."""

import itertools
import json
import threading
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.system.api.asking import CONTEXT, PROMPT, chat, complete, texts
from tests.system.served import Served, fetch

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


def generate(served: Served, status: int = 200, **body: Any) -> Any:
    reply = fetch(served, "POST", "/generate", body)
    assert reply.status == status, reply.body
    return reply.json


def engine(served: Served, status: int = 200, **body: Any) -> Any:
    """An engine's request. Its sampling parameters are greedy unless they are given."""
    return generate(served, status, **{"request_id": "r1", "sampling_params": GREEDY, **body})


@pytest.mark.spec("S-API-003")
def test_a_flat_body_gives_the_prompt_and_the_text_of_a_completion(served: Served, client: openai.OpenAI) -> None:
    said = complete(client, **GREEDY).choices[0].text
    assert generate(served, prompt=PROMPT, **GREEDY) == {"text": [PROMPT + said]}
    sampled = {"n": 3, "seed": 4, "max_tokens": 6, "top_k": 20}
    assert generate(served, prompt=PROMPT, **sampled)["text"] == [
        PROMPT + one for one in texts(complete(client, **sampled))
    ]


@pytest.mark.spec("S-API-003")
def test_a_flat_stream_grows_to_the_whole_text(served: Served) -> None:
    whole = generate(served, prompt=PROMPT, **GREEDY)
    reply = fetch(served, "POST", "/generate", {"prompt": PROMPT, "stream": True, **GREEDY})
    *objects, rest = reply.body.split(b"\0")
    shown = [json.loads(one)["text"][0] for one in objects]
    assert rest == b""
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert shown[-1] == whole["text"][0]


@pytest.mark.spec("S-API-004", "S-API-049", "S-API-045b", "S-API-053")
def test_an_engines_request_gives_the_tokens_and_times(served: Served, tokenizer: Tokenizer, greedy: list[int]) -> None:
    times: dict[str, Any] = {"arrival_time": 1700000000.0, "preprocess_start_time": 1.0, "preprocess_end_time": 1.5}
    output = engine(served, prompt=PROMPT, **times)
    ids = tokenizer.encode(PROMPT).ids
    assert (output["request_id"], output["finished"], output["prompt_token_ids"]) == ("r1", True, ids)
    assert (output["error_code"], output["error_msg"]) == (None, None)
    [choice] = output["outputs"]
    assert (choice["index"], choice["token_ids"], choice["text"]) == (0, greedy[:8], tokenizer.decode(greedy[:8]))
    metrics = output["metrics"]
    assert (metrics["arrival_time"], metrics["preprocess_cost_time"]) == (1700000000.0, 0.5)
    assert 0 < metrics["model_forward_time"] <= metrics["model_execute_time"]
    assert metrics["time_in_queue"] + metrics["preprocess_cost_time"] <= metrics["model_execute_time"]
    given = engine(served, prompt_token_ids=ids, prompt_token_ids_len=len(ids))
    assert given["outputs"][0]["token_ids"] == greedy[:8]
    streamed = fetch(served, "POST", "/generate", {"request_id": "r", "prompt": PROMPT, "stream": True,
                                                   "sampling_params": GREEDY}).body.splitlines()  # fmt: skip
    assert json.loads(streamed[-1])["outputs"][0]["token_ids"] == greedy[:8]


@pytest.mark.spec("S-API-046", "S-API-047", "S-API-048")
def test_conversations_give_what_chat_gives(served: Served, client: openai.OpenAI) -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "U2"},
    ]
    said = chat(client, turns, **GREEDY).choices[0].message.content
    other = chat(client, turns[:2], **GREEDY).choices[0].message.content
    assert engine(served, system="S", history=[["U1", "A1"]], prompt="U2")["outputs"][0]["text"] == said
    assert engine(served, messages=[turns])["outputs"][0]["text"] == said
    assert engine(served, messages=[turns[1:]], system="S")["outputs"][0]["text"] == said
    both = engine(served, messages=[turns, turns[:2]])
    assert [(one["request_id"], one["outputs"][0]["text"]) for one in both] == [("r1-0", said), ("r1-1", other)]
    lengths = [len(one["prompt_token_ids"]) for one in both]
    assert lengths[0] > lengths[1] > 0


@pytest.mark.spec("S-API-038")
def test_end_tokens_of_the_request_replace_the_models(
    served: Served, client: openai.OpenAI, tokenizer: Tokenizer, greedy: list[int]
) -> None:
    replaced: dict[str, Any] = {"eos_token_ids": greedy[:1]}
    nested: dict[str, Any] = {"sampling_params": {**GREEDY, **replaced}}
    for where in (replaced, nested):
        [choice] = engine(served, prompt=PROMPT, **where)["outputs"]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", None, greedy[:1])
    ended = complete(client, eos_token_ids=greedy[:1], **GREEDY)
    assert (ended.choices[0].finish_reason, ended.choices[0].text) == ("stop", tokenizer.decode(greedy[:1]))
    ignored = complete(client, eos_token_ids=greedy[:1], ignore_eos=True, **GREEDY)
    assert ignored.choices[0].text == tokenizer.decode(greedy[:8])
    own = tokenizer.token_to_id("<|im_end|>")
    wild = {"temperature": 2, "n": 16, "max_tokens": 100, "seed": 0}
    # With another end token in its place, the model's own one is a token like any other.
    assert {choice.finish_reason for choice in complete(client, eos_token_ids=[330], **wild).choices} != {"stop"}
    assert texts(complete(client, eos_token_ids=[own], **wild)) == texts(complete(client, **wild))


@pytest.mark.spec("S-API-044", "S-API-084")
def test_an_id_is_free_again_when_its_request_has_ended(served: Served) -> None:
    long = {"max_tokens": CONTEXT - 20, "temperature": 0, "ignore_eos": True}
    statuses: list[int] = []

    def ask() -> None:
        body = {"request_id": "twice", "prompt": PROMPT, "sampling_params": long}
        statuses.append(fetch(served, "POST", "/generate", body).status)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 400]
    ask()
    assert statuses[-1] == 200
    refused = engine(served, 400, prompt_token_ids=[5, 6], prompt_token_ids_len=3)
    assert (refused["error_code"], refused["error"]["param"]) == (400, "prompt_token_ids_len")


# --- small parameters, through the whole system -----------------------------------------------------------------------


def test_a_truncated_prompt_keeps_its_last_tokens(served: Served, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    last = texts(complete(client, ids[-3:], **GREEDY))
    assert texts(complete(client, PROMPT, truncate_prompt_tokens=3, **GREEDY)) == last
    assert texts(complete(client, ids, truncate_prompt_tokens=3, **GREEDY)) == last
    flat = generate(served, prompt=PROMPT, truncate_prompt_tokens=3, **GREEDY)
    assert flat["text"] == [PROMPT + last[0]]
    long = complete(client, "word " * 1000, truncate_prompt_tokens=-1, max_tokens=5, ignore_eos=True)
    assert long.usage is not None
    assert (long.usage.prompt_tokens, long.usage.completion_tokens) == (CONTEXT - 5, 5)
    said = chat(client, [{"role": "user", "content": "word " * 1000}], truncate_prompt_tokens=-1, max_tokens=5)
    assert said.usage is not None
    assert said.usage.prompt_tokens == CONTEXT - 5


def test_an_output_without_text_has_its_token_ids(client: openai.OpenAI, greedy: list[int]) -> None:
    answer = complete(client, detokenize=False, logprobs=1, **GREEDY).choices[0]
    assert (answer.text, answer.to_dict()["token_ids"]) == ("", greedy[:8])
    assert answer.logprobs is not None
    assert answer.logprobs.tokens == [f"token_id:{one}" for one in greedy[:8]]
    said = chat(client, detokenize=False, max_tokens=2).choices[0].to_dict()
    assert said["message"]["content"] == ""  # pyright: ignore[reportIndexIssue]
    assert len(said["token_ids"]) == 2  # pyright: ignore[reportArgumentType]


def test_special_tokens_of_a_byte_level_tokenizer_have_no_spaces_to_leave_out(client: openai.OpenAI) -> None:
    wild = {"temperature": 2, "n": 8, "max_tokens": 60, "seed": 0, "ignore_eos": True, "skip_special_tokens": False}
    spaced, joined = (texts(complete(client, spaces_between_special_tokens=one, **wild)) for one in (True, False))
    assert joined == spaced
    assert any("<|im_end|>" in text for text in spaced)


def test_tokens_of_log_probabilities_are_ids_on_request(client: openai.OpenAI, greedy: list[int]) -> None:
    asked = {"return_tokens_as_token_ids": True, "temperature": 0, "max_tokens": 3}
    logprobs = complete(client, logprobs=2, **asked).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [f"token_id:{one}" for one in greedy[:3]]
    assert all(
        len(top) == 2 and all(name.startswith("token_id:") for name in top) for top in logprobs.top_logprobs or ()
    )
    content = chat(client, logprobs=True, **asked).choices[0].logprobs
    assert content is not None
    assert all(token.token.startswith("token_id:") for token in content.content or ())


def test_a_stream_can_tell_its_token_counts_in_every_chunk_and_its_times_at_the_end(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="model", prompt=PROMPT, max_tokens=200, temperature=0, stream=True, stream_options=options,
        extra_body={"ignore_eos": True, "timings": True},
    )  # fmt: skip
    chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 200
    times = chunks[-1].to_dict()["timings"]
    assert isinstance(times, dict)
    assert times["completion_tokens"] == 200
    rate = times["decode_tokens_per_s"]
    assert rate is None or rate > 0  # None: a busy machine gave all tokens at one moment
    assert times["queue_s"] + times["prefill_s"] + times["decode_s"] <= times["total_s"]


def test_a_request_may_have_128_choices_or_1024_prompts(client: openai.OpenAI) -> None:
    answer = complete(client, n=128, seed=1, max_tokens=2, ignore_eos=True)
    assert [choice.index for choice in answer.choices] == list(range(128))
    prompts = [f"prompt {number}" for number in range(1024)]
    many = complete(client, prompts, max_tokens=1, temperature=0)
    assert len(many.choices) == 1024
    assert texts(many)[1023] == texts(complete(client, prompts[1023], max_tokens=1, temperature=0))[0]
    with pytest.raises(openai.BadRequestError, match="1024"):
        complete(client, prompts[:513], n=2)
