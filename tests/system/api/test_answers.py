"""What an answer looks like on the wire: whole, streamed, refused; and the endpoints around generation."""

import json
import re
import subprocess
import sys
import time
from typing import Any

import openai
import pytest

from tests.system.api.asking import CONTEXT, HELLO, chat, complete, usage
from tests.system.served import ROOT, Served, fetch

pytestmark = [pytest.mark.system, pytest.mark.nats]
BARE = {"messages": HELLO, "temperature": 0.0, "max_tokens": 12}


def events(body: bytes) -> list[str]:
    """The data of each event of a stream."""
    assert body.endswith(b"\n\n")
    parts = body.decode().split("\n\n")[:-1]
    assert all(part.startswith("data: ") for part in parts)
    return [part[5:].strip() for part in parts]


def streamed(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    *chunks, last = events(fetch(served, "POST", path, {"stream": True, **fields}).body)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


# --- whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec(
    "S-API-002", "S-API-070", "S-API-071", "S-API-072", "S-API-073", "S-API-074", "S-API-076", "S-API-079", "S-DEP-040"
)
def test_a_chat_answer_has_every_field(served: Served) -> None:
    before = int(time.time())
    answers = [fetch(served, "POST", "/v1/chat/completions", BARE) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].headers["content-type"] == "application/json"
    first, second = (answer.json for answer in answers)
    assert re.fullmatch(r"chatcmpl-[A-Za-z0-9]{22}", first["id"])
    assert first["id"] != second["id"]
    assert first["object"] == "chat.completion"
    assert before <= first["created"] <= time.time()
    assert first["model"] == "model"
    assert first["system_fingerprint"] == second["system_fingerprint"]
    [choice] = first["choices"]
    assert choice.keys() >= {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert choice["message"].keys() == {"role", "content"}
    assert (choice["index"], choice["message"]["role"], choice["finish_reason"]) == (0, "assistant", "length")


@pytest.mark.spec("S-API-001", "S-API-071", "S-API-074", "S-API-075a", "S-API-075b", "S-API-075c", "S-API-075d")
def test_a_completion_counts_its_tokens(served: Served) -> None:
    body = {"prompt": ["A prompt", "Another"], "n": 2, "max_tokens": 6, "ignore_eos": True}
    answer = fetch(served, "POST", "/v1/completions", body).json
    assert answer["object"] == "text_completion"
    assert all(c.keys() >= {"index", "text", "logprobs", "finish_reason", "stop_reason"} for c in answer["choices"])
    prompts = sum(fetch(served, "POST", "/tokenize", {"prompt": prompt}).json["count"] for prompt in body["prompt"])
    told = answer["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (prompts, 24)
    assert told["total_tokens"] == prompts + 24
    assert told["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.spec("S-API-075e")
def test_a_prompt_that_was_seen_before_is_told_as_cached(served: Served) -> None:
    body = {"prompt": "A prefix that no other test sends, and rather a long one. " * 2, "max_tokens": 1}
    first, again = (fetch(served, "POST", "/v1/completions", body).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert again["prompt_tokens"] - 8 <= cached < again["prompt_tokens"]
    assert cached % 8 == 0


@pytest.mark.spec("S-API-077", "S-API-078")
def test_length_and_log_probability_of_the_text_are_told_unasked(client: openai.OpenAI) -> None:
    asked = {"n": 2, "seed": 4, "max_tokens": 20}
    plain: dict[str, Any] = complete(client, **asked).to_dict()
    logged = complete(client, logprobs=0, **asked)
    for told, choice in zip(plain["choices"], logged.choices, strict=True):
        assert told["sentence_length"] == len(choice.text) == len(told["text"])
        assert choice.logprobs is not None
        assert told["cum_log_probs"] == pytest.approx(sum(choice.logprobs.token_logprobs or ()), abs=1e-4)
    for name in ("sentence_length", "cum_log_probs"):
        assert plain[name] == plain["choices"][0][name]


@pytest.mark.spec("S-API-077", "S-API-078")
@pytest.mark.parametrize("asked", [{"prompt": "one", "echo": True}, {"messages": HELLO}])
def test_a_stream_ends_with_the_length_and_log_probability_of_the_whole_answer(
    served: Served, asked: dict[str, Any]
) -> None:
    path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
    asked = {**asked, "n": 2, "seed": 4, "max_tokens": 20}
    whole = fetch(served, "POST", path, asked).json["choices"]
    ends = {
        choice["index"]: (choice["sentence_length"], choice["cum_log_probs"])
        for chunk in streamed(served, path, **asked)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    }
    assert ends == {choice["index"]: (choice["sentence_length"], choice["cum_log_probs"]) for choice in whole}


# --- streamed ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-085", "S-API-086", "S-API-087", "S-API-088", "S-API-089", "S-API-091")
def test_the_bytes_of_a_chat_stream(served: Served) -> None:
    answer = fetch(served, "POST", "/v1/chat/completions", {**BARE, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *raw, done = events(answer.body)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in raw]
    assert all(chunk.keys() >= {"id", "choices", "created", "model", "object"} for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert (chunks[0]["object"], chunks[0]["model"]) == ("chat.completion.chunk", "model")
    first, *middle, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert first["delta"] == {"role": "assistant"}
    assert all(choice["delta"].keys() == {"content"} and choice["finish_reason"] is None for choice in middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    # A client may look for the word and then read the text.
    assert all(("content" in text) == ("content" in json.loads(text)["choices"][0]["delta"]) for text in raw)


@pytest.mark.spec("S-API-034")
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "n": 3, "seed": 2, "max_tokens": 20}),
        ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "seed": 2, "max_tokens": 20}),
        ("/v1/completions", {"prompt": "one", "temperature": 0, "max_tokens": 20, "stop": "\x00", "echo": True}),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(served: Served, path: str, asked: dict[str, Any]) -> None:
    whole = fetch(served, "POST", path, {**asked, "stream": False}).json["choices"]
    said, ends = [""] * len(whole), [None] * len(whole)
    for chunk in streamed(served, path, **asked):
        for choice in chunk["choices"]:
            said[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert said == [choice.get("text") or choice["message"]["content"] for choice in whole]
    assert ends == [choice["finish_reason"] for choice in whole]


@pytest.mark.spec("S-API-035", "S-API-090")
def test_usage_is_the_last_chunk_of_a_stream_that_asks_for_it(client: openai.OpenAI, served: Served) -> None:
    told = chat(client, temperature=0, max_tokens=12)
    *others, last = streamed(served, "/v1/chat/completions", **BARE, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == usage(told)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)
    plain = streamed(served, "/v1/chat/completions", **BARE)
    assert not any("usage" in chunk for chunk in plain)
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, stream_options={"include_usage": True})
    assert error.value.param == "stream_options"


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-081", "S-API-082")
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "A", "temperature": 3}, 400, "temperature"),
        ("/v1/completions", {"prompt": "A", "max_tokens": "many"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": [[1], "A"]}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "guided_json": {"type": "obj"}}, 400, "guided_json"),
        ("/v1/completions", {"prompt": "A", "model": "unknown"}, 404, "model"),
        ("/v1/chat/completions", {"messages": HELLO, "model": "unknown", "stream": True}, 404, "model"),
    ],
)
def test_an_error_has_the_status_and_shape_of_the_api(
    served: Served, path: str, body: Any, status: int, param: str
) -> None:
    answer = fetch(served, "POST", path, body)
    assert answer.status == status
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert param in error["message"]
    assert error["code"]


# --- around generation ------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-005")
def test_health_models_metrics_and_version(served: Served) -> None:
    assert fetch(served, "GET", "/health").status == 200
    [card] = fetch(served, "GET", "/v1/models").json["data"]
    assert (card["id"], card["object"]) == ("model", "model")
    assert "vllm:num_requests_running" in fetch(served, "GET", "/metrics").body.decode()
    assert fetch(served, "GET", "/version").json["version"]


@pytest.mark.spec("S-SRV-012", "S-SRV-032", "S-SRV-041", "S-SRV-042")
def test_flags_have_arrived_where_they_act(served: Served) -> None:
    [card] = fetch(served, "GET", "/v1/models").json["data"]
    assert (card["id"], card["max_model_len"]) == ("model", CONTEXT)
    [config] = re.findall(r"vllm:cache_config_info{(.*)}", fetch(served, "GET", "/metrics").body.decode())
    assert 'block_size="8"' in config
    assert 'num_gpu_blocks="300"' in config


@pytest.mark.spec("S-API-007")
def test_the_server_does_not_mind_the_name_by_which_it_was_reached(served: Served) -> None:
    assert fetch(served, "POST", "/v1/chat/completions", BARE, Host="gateway.example:8501").status == 200


@pytest.mark.spec("S-DEP-040", "S-DEP-041")
@pytest.mark.parametrize("stream", [False, True])
def test_curl_needs_no_more_than_a_message(served: Served, stream: bool) -> None:
    body = json.dumps({**BARE, "stream": True} if stream else BARE)
    argv = ["curl", "--silent", "--fail", f"{served.url}/chat/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([*argv, "-d", body], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    if stream:
        assert events(done.stdout)[-1] == "[DONE]"
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.spec("S-DEP-042:sdk")
def test_the_openai_sdk_works_from_its_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", served.url)
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    asked: Any = {"model": "model", "messages": HELLO, "temperature": 0.7, "top_p": 1.0, "max_tokens": 128, "seed": 1}
    with openai.OpenAI() as client:
        whole = client.chat.completions.create(**asked).choices[0].message.content
        said = ""
        for chunk in client.chat.completions.create(stream=True, **asked):
            if chunk.choices and chunk.choices[0].delta.content:
                said += chunk.choices[0].delta.content
    assert said == whole


@pytest.mark.spec("S-DEP-043")
def test_the_terminal_client_prints_the_answer_to_a_pipe(served: Served, client: openai.OpenAI) -> None:
    flags = ["--max-tokens=8", "--temperature=0", "--top_p=1", "--system=Be brief."]
    argv = [sys.executable, "-m", "antiphon", "chat", "--server", served.url.removesuffix("/v1"), *flags]
    done = subprocess.run(argv, cwd=ROOT, input=b"Hello\n", capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    said = chat(client, messages, max_tokens=8, temperature=0).choices[0].message.content
    assert done.stdout.decode() == f"{said}\n"
