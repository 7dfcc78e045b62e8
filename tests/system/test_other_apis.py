"""The APIs besides completions and chat, on real systems: each gives the answer of the chat endpoint."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Batch

from tests.system.served import Served, fetch, serve_tiny, slowed, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats]
HELLO: Any = [{"role": "user", "content": "Hello"}]
SIZE = 12
END = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def said(served: Served) -> str:
    """What the chat endpoint answers."""
    body = {"messages": HELLO, "max_tokens": SIZE, "temperature": 0}
    answer = fetch(served, "POST", "/v1/chat/completions", body).json
    assert answer["usage"]["completion_tokens"] == SIZE
    return answer["choices"][0]["message"]["content"]


def test_messages_of_anthropic_s_api(served: Served, said: str) -> None:
    url = served.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="EMPTY", max_retries=0, timeout=60) as client:
        settings: Any = {"model": "tiny", "messages": HELLO, "max_tokens": SIZE, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**settings)
        assert "".join(block.text for block in whole.content if block.type == "text") == said
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", SIZE)
        with client.messages.stream(**settings) as stream:
            assert "".join(stream.text_stream) == said
            streamed = stream.get_final_message()
        assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
        counted = client.messages.count_tokens(model="tiny", messages=HELLO)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_responses_in_the_foreground_and_in_the_background(client: openai.OpenAI, said: str) -> None:
    settings: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": SIZE, "temperature": 0}
    whole = client.responses.create(**settings)
    assert (whole.output_text, whole.status) == (said, "incomplete")
    queued = client.responses.create(**settings, background=True)
    events = list(client.responses.retrieve(queued.id, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == said
    rest = list(client.responses.retrieve(queued.id, stream=True, starting_after=5))
    assert rest == events[6:]
    follow_up = client.responses.create(**{**settings, "input": "And?"}, previous_response_id=whole.id)
    assert follow_up.usage is not None
    assert whole.usage is not None
    assert follow_up.usage.input_tokens > whole.usage.input_tokens + SIZE


def test_ollama_s_api(served: Served, model: Path, said: str) -> None:
    options = {"num_predict": SIZE, "temperature": 0}
    chat = fetch(served, "POST", "/api/chat", {"model": "tiny", "messages": HELLO, "options": options})
    lines = [json.loads(line) for line in chat.body.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == said
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", SIZE)
    assert 0 < lines[-1]["eval_duration"] < lines[-1]["total_duration"]
    body = {"model": "tiny", "prompt": "Hello", "options": options, "stream": False}
    assert fetch(served, "POST", "/api/generate", body).json["response"] == said
    [listed] = fetch(served, "GET", "/api/tags").json["models"]
    assert listed["size"] == sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert listed["details"]["family"] == "llama"
    vectors = fetch(served, "POST", "/api/embed", {"model": "tiny", "input": ["Hello", "Hello"]}).json["embeddings"]
    assert vectors[0] == vectors[1] != []


def test_a_batch_runs_behind_other_requests_and_is_continued_after_its_gateway_was_killed(
    model: Path, tmp_path: Path
) -> None:
    count = 150
    requests = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": HELLO, "max_tokens": 40, "seed": number},
        }
        for number in range(count)
    ]
    data = "".join(json.dumps(request) + "\n" for request in requests).encode()
    flags = (f"--files-directory={tmp_path}", "--max-num-seqs=2")
    with (
        until_the_end(serve_tiny(model, *flags)) as served,
        openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=8, timeout=60) as client,
    ):
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        # The engine is slow, so that the batch does not go on while this process gets no processor.
        with slowed(served.pids()["engine-1"]):
            batch = until(client, batch.id, lambda batch: counts(batch) >= 10)
            client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
            # Of the 64 requests of the batch that were in the system, those that ran or were next had precedence.
            assert counts(client.batches.retrieve(batch.id)) - counts(batch) < 32
        os.kill(served.pids()["gateway-1"], signal.SIGKILL)
        batch = until(client, batch.id, lambda batch: batch.status in END)
        assert (batch.status, counts(batch)) == ("completed", count)
        assert batch.output_file_id is not None
        lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(request["custom_id"] for request in requests)


def counts(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts else 0


def until(client: openai.OpenAI, batch_id: str, condition: Any) -> Batch:
    deadline = time.monotonic() + 90
    while not condition(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def test_an_output_beyond_the_context_is_cut_and_told_in_every_api(served: Served) -> None:
    context = fetch(served, "GET", "/v1/models").json["data"][0]["max_model_len"]
    more: dict[str, Any] = {"messages": HELLO, "max_tokens": 10 * context}
    for path, body in (
        ("/v1/chat/completions", {**more, "ignore_eos": True}),
        ("/v1/chat/completions", {**more, "stream": True}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": context, "ignore_eos": True}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": context - 2}),
        ("/v1/messages", more),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": context}),
        ("/api/chat", {"messages": HELLO, "stream": False, "options": {"num_predict": context}}),
        ("/generate", {"prompt": "Hello", "max_tokens": context}),
    ):
        answer = fetch(served, "POST", path, body)
        assert answer.status == 200, (path, answer.body)
        assert answer.headers["x-antiphon-ignored"] == "max_tokens", path
        if "ignore_eos" in body:
            assert answer.json["usage"]["total_tokens"] == context
    fits = fetch(served, "POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": context - 3})
    assert "x-antiphon-ignored" not in fits.headers
    long = fetch(served, "POST", "/v1/completions", {"prompt": [5] * context, "max_tokens": 1})
    assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
