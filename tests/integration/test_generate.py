"""`POST /generate` with a scripted backend: both forms, whole and streamed, their errors, and `USE_OPENAI=0`."""

import asyncio
import json
from typing import Any

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage, PositionLogprobs, TokenText
from tests.integration.edge import CARD, Connection, Reply, ScriptedBackend, Step, call, serving, text_batches

ENGINE: dict[str, Any] = {"request_id": "r1", "prompt": "Hi", "sampling_params": {"max_tokens": 4}}


async def generate(backend: ScriptedBackend, body: Any, **settings: Any) -> Reply:
    async with serving(backend, **settings) as port:
        return await call(port, "POST", "/generate", body)


async def asked(**fields: Any) -> GenerationRequest:
    """The generation that an engine's request starts."""
    backend = ScriptedBackend()
    reply = await generate(backend, {"request_id": "r1", **fields})
    assert reply.status == 200, reply.body
    return backend.requests[0]


async def refusal(**fields: Any) -> tuple[int, str | None]:
    """The status and the parameter with which an engine's request is refused, checked for its form."""
    reply = await generate(ScriptedBackend(), {"request_id": "r1", **fields}, unknown_parameters="refuse")
    body = reply.json
    assert (body["request_id"], body["outputs"], body["finished"]) == ("r1", [], True)
    assert body["error_code"] == reply.status
    assert body["error_msg"] == body["error"]["message"]
    return reply.status, body["error"]["param"]


# --- the form of vLLM's demonstration server --------------------------------------------------------------------------


@pytest.mark.spec("S-API-003")
async def test_a_flat_body_is_answered_with_prompt_and_output() -> None:
    backend = ScriptedBackend()
    reply = await generate(backend, {"prompt": "Hi ", "max_tokens": 4, "n": 2, "top_k": 5})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == {"text": ["Hi Good day", "Hi Good day"]}
    [request] = backend.requests
    assert (request.inputs.texts, request.n, request.params.max_tokens, request.params.top_k) == (("Hi ",), 2, 4, 5)


async def test_several_prompts_are_answered_in_order() -> None:
    reply = await generate(ScriptedBackend(), {"prompt": ["a ", "b "]})
    assert reply.json == {"text": ["a Good day", "b Good day"]}


@pytest.mark.spec("S-API-003")
async def test_a_flat_stream_repeats_the_text_so_far_and_ends_each_object_with_a_nul() -> None:
    reply = await generate(ScriptedBackend(), {"prompt": "Hi ", "stream": True})
    *objects, rest = reply.body.split(b"\0")
    assert rest == b""
    assert [json.loads(one) for one in objects] == [{"text": ["Hi Good "]}, {"text": ["Hi Good day"]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_flat_answer_has_its_times_when_they_are_asked_for(stream: bool) -> None:
    reply = await generate(ScriptedBackend(), {"prompt": "Hi ", "timings": True, "stream": stream})
    objects = [json.loads(one) for one in reply.body.split(b"\0") if one]
    assert ["timings" in one for one in objects] == [False] * (len(objects) - 1) + [True]
    assert objects[-1]["timings"]["completion_tokens"] == 2


async def test_an_update_without_text_adds_nothing_to_a_flat_stream() -> None:
    silent: list[Step] = [[SequenceUpdate(index=0, text="", token_ids=(1,))], *text_batches("x")]
    reply = await generate(ScriptedBackend(reply=lambda _: silent), {"prompt": "Hi ", "stream": True})
    assert reply.body == b'{"text":["Hi x"]}\0'


async def test_a_flat_stream_that_fails_ends_with_an_error_object() -> None:
    steps: list[Step] = [text_batches("Good ", "day")[0], ServiceError("engine_failure", "It broke.")]
    reply = await generate(ScriptedBackend(reply=lambda _: steps), {"prompt": "Hi ", "stream": True})
    objects = [json.loads(one) for one in reply.body.split(b"\0")[:-1]]
    assert objects[-1]["error"]["code"] == "engine_failure"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": [1, 2]}, "prompt[0]"),
        ({"prompt": "a", "logprobs": 2}, "logprobs"),
        ({"prompt": "a", "detokenize": False}, "detokenize"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "use_beam_search": True}, "n"),
        ({"prompt": "a", "model": "gpt"}, "model"),
    ],
)
async def test_a_flat_body_is_refused_by_parameter(body: Any, param: str) -> None:
    reply = await generate(ScriptedBackend(), body, unknown_parameters="refuse")
    assert reply.status in (400, 404)
    assert reply.error["param"] == param


# --- an engine's request ----------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-004", "S-API-044", "S-API-049", "S-API-053", "S-API-054a", "S-API-054b", "S-API-084")
async def test_an_engines_request_is_answered_with_a_request_output() -> None:
    body = {**ENGINE, "arrival_time": 1700000000.0, "preprocess_start_time": 1.0, "preprocess_end_time": 1.5}
    output = (await generate(ScriptedBackend(), body)).json
    assert (output["request_id"], output["prompt"], output["finished"]) == ("r1", "Hi", True)
    assert (output["prompt_token_ids"], output["num_cached_tokens"]) == ([0, 1, 2], 0)
    assert (output["error_code"], output["error_msg"]) == (None, None)
    assert output["outputs"] == [
        {
            "index": 0,
            "token_ids": [1, 2],
            "text": "Good day",
            "reasoning_content": None,
            "cumulative_logprob": -1.0,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    metrics = output["metrics"]
    assert (metrics["arrival_time"], metrics["preprocess_cost_time"]) == (1700000000.0, 0.5)
    assert metrics["model_forward_time"] <= metrics["model_execute_time"]
    assert metrics["time_in_queue"] + 0.5 <= metrics["model_execute_time"]


@pytest.mark.spec("S-API-044", "S-API-053")
async def test_an_id_and_an_arrival_time_are_filled_in() -> None:
    output = (await generate(ScriptedBackend(), {"prompt": "Hi", "sampling_params": {}})).json
    assert len(output["request_id"]) == 22
    metrics = output["metrics"]
    assert 0 <= metrics["inference_start_time"] - metrics["arrival_time"] < 60
    assert metrics["preprocess_cost_time"] == 0.0


async def test_log_probabilities_are_told_by_token_id() -> None:
    chosen, other = TokenText(7, "a", b"a", -0.5), TokenText(8, "b", b"b", -1.5)
    steps = text_batches("a", logprobs=(PositionLogprobs(chosen, (chosen, other)),))
    body = {**ENGINE, "sampling_params": {"logprobs": 2}}
    output = (await generate(ScriptedBackend(reply=lambda _: list(steps)), body)).json
    assert output["outputs"][0]["logprobs"] == [
        {
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        }
    ]


async def test_log_probabilities_of_the_prompt_are_told_by_token_id() -> None:
    first, second = TokenText(7, "a", b"a", float("nan")), TokenText(8, "b", b"b", -1.5)
    prompt = PositionLogprobs(first), PositionLogprobs(second, (second,))
    steps = [[SequenceUpdate(index=0, text="", prompt_logprobs=prompt)], *text_batches("a")]
    body = {**ENGINE, "sampling_params": {"prompt_logprobs": 1}}
    output = (await generate(ScriptedBackend(reply=lambda _: list(steps)), body)).json
    assert output["prompt_logprobs"] == [None, {"8": {"logprob": -1.5, "rank": 1, "decoded_token": "b"}}]


async def test_a_flat_body_has_no_log_probabilities() -> None:
    reply = await generate(ScriptedBackend(), {"prompt": "Hi", "prompt_logprobs": 1})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt_logprobs")
    assert "'sampling_params'" in reply.json["error"]["message"]


async def test_a_stream_of_an_engines_request_is_one_object_a_line_with_the_output_so_far() -> None:
    reply = await generate(ScriptedBackend(), {**ENGINE, "stream": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.body.splitlines()]
    assert [line["outputs"][0]["text"] for line in lines] == ["Good ", "Good day"]
    assert [line["outputs"][0]["token_ids"] for line in lines] == [[1], [1, 2]]
    assert [line["finished"] for line in lines] == [False, True]
    assert [(line["prompt"], line["prompt_token_ids"]) for line in lines] == [(None, None), ("Hi", [0, 1, 2])]
    assert lines[0]["metrics"]["model_execute_time"] is None


@pytest.mark.spec("S-API-084")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_a_request_output_with_the_http_status(stream: bool) -> None:
    error = ServiceError("no_engine", "None is there.")
    reply = await generate(ScriptedBackend(refusal=error), {**ENGINE, "stream": stream})
    assert (reply.status, reply.json["error_code"], reply.json["error_msg"]) == (503, 503, "None is there.")
    assert reply.headers["retry-after"]


@pytest.mark.spec("S-API-084")
async def test_a_stream_that_fails_ends_with_a_request_output_that_has_the_error() -> None:
    steps: list[Step] = [text_batches("Good ", "day")[0], ServiceError("engine_failure", "It broke.")]
    reply = await generate(ScriptedBackend(reply=lambda _: steps), {**ENGINE, "stream": True})
    last = json.loads(reply.body.splitlines()[-1])
    assert (last["request_id"], last["finished"], last["error_code"]) == ("r1", True, 500)
    assert last["error_msg"] == "It broke."


@pytest.mark.spec("S-API-045a", "S-API-045b")
async def test_the_input_is_a_text_or_token_ids() -> None:
    assert (await asked(prompt="Hi")).inputs.texts == ("Hi",)
    assert (await asked(prompt_token_ids=[5, 6])).inputs.token_ids == ((5, 6),)
    assert (await asked(prompt="Hi", prompt_token_ids=[5, 6])).inputs.token_ids == ((5, 6),)
    assert await refusal() == (400, "prompt")
    assert await refusal(prompt_token_ids=[]) == (400, "prompt_token_ids")
    assert await refusal(prompt_token_ids=[CARD.vocab_size]) == (400, "prompt_token_ids")


@pytest.mark.spec("S-API-045c")
async def test_the_number_of_token_ids_must_be_right() -> None:
    assert (await asked(prompt_token_ids=[5, 6], prompt_token_ids_len=2)).inputs.token_ids == ((5, 6),)
    assert (await asked(prompt_token_ids=[5, 6])).inputs.token_ids == ((5, 6),)
    assert await refusal(prompt_token_ids=[5, 6], prompt_token_ids_len=3) == (400, "prompt_token_ids_len")
    assert await refusal(prompt="a", prompt_token_ids_len=1) == (400, "prompt_token_ids_len")


@pytest.mark.spec("S-API-047", "S-API-048")
async def test_system_history_and_prompt_become_a_conversation() -> None:
    request = await asked(system="S", history=[["U1", "A1"]], prompt="U2")
    assert request.inputs.messages == (
        ChatMessage(role="system", content="S"),
        ChatMessage(role="user", content="U1"),
        ChatMessage(role="assistant", content="A1"),
        ChatMessage(role="user", content="U2"),
    )
    assert request.params.max_tokens == 16
    assert (await asked(history=[], prompt="U")).inputs.messages == (ChatMessage(role="user", content="U"),)
    assert (await asked(system="S", prompt="U")).inputs.messages == (
        ChatMessage(role="system", content="S"),
        ChatMessage(role="user", content="U"),
    )
    assert await refusal(history=[["U1", "A1"]]) == (400, "prompt")
    assert await refusal(history=[["U1"]], prompt="U") == (400, "history[0]")
    assert await refusal(system="S", prompt="U", prompt_token_ids=[1]) == (400, "prompt_token_ids")


@pytest.mark.spec("S-API-046", "S-API-048")
async def test_messages_are_a_batch_of_conversations() -> None:
    one, two = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
    assert (await asked(messages=[one])).inputs.messages == (ChatMessage(role="user", content="a"),)
    assert (await asked(messages=one)).inputs.messages == (ChatMessage(role="user", content="a"),)
    both = await asked(messages=[one, two], system="S")
    system = ChatMessage(role="system", content="S")
    assert both.inputs.conversations == (
        (system, ChatMessage(role="user", content="a")),
        (system, ChatMessage(role="user", content="b")),
    )
    for other in ({"prompt": "a"}, {"prompt_token_ids": [1]}, {"history": []}):
        assert await refusal(messages=[one], **other) == (400, next(iter(other)))
    with_system = [{"role": "system", "content": "x"}, *one]
    assert await refusal(messages=[with_system], system="S") == (400, "system")
    assert await refusal(messages=[one, one[0]]) == (400, "messages")
    assert await refusal(messages=[]) == (400, "messages")
    assert await refusal(messages=[one] * (limits.CONVERSATIONS_MAX + 1)) == (400, "messages")
    assert await refusal(messages=[one, [{"role": "user"}]]) == (400, "messages[1][0].content")


@pytest.mark.spec("S-API-046")
async def test_each_of_several_conversations_has_its_request_output() -> None:
    conversations = [[{"role": "user", "content": content}] for content in "ab"]
    body = {"request_id": "r", "messages": conversations, "sampling_params": {"n": 2, "seed": 1}}
    outputs = (await generate(ScriptedBackend(), body)).json
    assert [output["request_id"] for output in outputs] == ["r-0", "r-1"]
    assert [[one["index"] for one in output["outputs"]] for output in outputs] == [[0, 1], [0, 1]]
    streamed = (await generate(ScriptedBackend(), {**body, "stream": True})).body.splitlines()
    last = {line["request_id"]: line for line in map(json.loads, streamed)}
    assert {name: line["finished"] for name, line in last.items()} == {"r-0": True, "r-1": True}
    assert [one["text"] for one in last["r-1"]["outputs"]] == ["Good day"] * 2


@pytest.mark.spec("S-API-038")
async def test_end_tokens_are_given_beside_or_in_the_sampling_parameters() -> None:
    assert (await asked(prompt="a", eos_token_ids=[7])).params.eos_token_ids == (7,)
    assert (await asked(prompt="a", sampling_params={"eos_token_ids": [7]})).params.eos_token_ids == (7,)
    assert await refusal(prompt="a", eos_token_ids=[7], sampling_params={"eos_token_ids": [7]}) == (
        400,
        "eos_token_ids",
    )


@pytest.mark.spec("S-API-054a", "S-API-054b", "S-API-053", "S-API-055", "S-API-044")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"preprocess_start_time": 2.0, "preprocess_end_time": 1.5}, "preprocess_end_time"),
        ({"preprocess_start_time": 2.0}, "preprocess_end_time"),
        ({"preprocess_end_time": 2.0}, "preprocess_start_time"),
        ({"arrival_time": -1}, "arrival_time"),
        ({"arrival_time": "now"}, "arrival_time"),
        ({"multi_modal_inputs": {"image": "x"}}, "multi_modal_inputs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"sampling_params": {"temperature": 3}}, "temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"sampling_params": {"use_beam_search": True, "n": 1}}, "n"),
        ({"sampling_params": {"best_of": 2}, "stream": True}, "stream"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "stream"),
        ({"sampling_params": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": {"logprobs": 6}}, "logprobs"),
    ],
)
async def test_an_engines_request_is_refused_by_parameter(fields: dict[str, Any], param: str) -> None:
    assert await refusal(prompt="a", **fields) == (400, param)


@pytest.mark.parametrize("request_id", ["", "x" * (limits.CLIENT_REQUEST_ID_CHARS_MAX + 1), 5])
async def test_an_id_that_cannot_be_repeated_is_refused(request_id: Any) -> None:
    reply = await generate(ScriptedBackend(), {"request_id": request_id, "prompt": "a"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "request_id")


@pytest.mark.spec("S-API-044")
@pytest.mark.parametrize("stream", [False, True])
async def test_two_running_requests_cannot_have_the_same_id(stream: bool) -> None:
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, Connection(port) as first:
        await first.send("POST", "/generate", json.dumps({**ENGINE, "stream": stream}).encode())
        running = await backend.generations.get()
        second = await call(port, "POST", "/generate", ENGINE)
        assert (second.status, second.json["error"]["param"]) == (400, "request_id")
        other = asyncio.create_task(call(port, "POST", "/generate", {**ENGINE, "request_id": "r2"}))
        (await backend.generations.get()).put(*text_batches("x"), None)
        assert (await other).status == 200
        running.put(*text_batches("x"), None)
        await running.stopped.wait()
        backend.manual = False
        assert (await call(port, "POST", "/generate", ENGINE)).status == 200


# --- a server without OpenAI's API ------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-003")
async def test_without_openais_api_only_generate_and_the_probes_are_there() -> None:
    paths = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")]
    others = [("POST", "/v1/messages"), ("POST", "/v1/responses"), ("GET", "/v1/files"), ("GET", "/api/tags")]
    async with serving(ScriptedBackend(), use_openai=False) as port:
        for method, path in paths + others:
            reply = await call(port, method, path, {"prompt": "a"})
            assert reply.status == 404
            assert "USE_OPENAI=0" in reply.body.decode()
        for path in ("/tokenize", "/detokenize", "/version"):
            assert (await call(port, "POST", path, {})).status == 404
        for path in ("/health", "/livez", "/readyz", "/ping", "/load", "/metrics"):
            assert (await call(port, "GET", path)).status == 200
        assert (await call(port, "POST", "/generate", {"prompt": "a"})).status == 200
        assert (await call(port, "POST", "/generate", ENGINE)).status == 200


@pytest.mark.spec("S-API-003")
async def test_without_openais_api_a_model_in_a_request_has_no_effect() -> None:
    for body in ({"prompt": "a"}, ENGINE):
        assert (await generate(ScriptedBackend(), {**body, "model": "gpt"})).status == 404
        assert (await generate(ScriptedBackend(), {**body, "model": "gpt"}, use_openai=False)).status == 200
