"""Ollama's API against the HTTP edge. The backend is scripted: see `edge`."""

import json
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.generation import GenerationRequest, SequenceUpdate
from shared.errors import ServiceError
from shared.parameters.grammar import Grammar
from tests.integration.edge import CARD, Reply, ScriptedBackend, call, serving, text_batches

HELLO = {"model": "org/toy", "messages": [{"role": "user", "content": "Hello?"}]}


def lines(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.body.endswith(b"\n")
    return [json.loads(line) for line in reply.body.splitlines()]


async def test_chat_is_streamed_as_lines_by_default():
    async with serving(ScriptedBackend()) as port:
        first, second, last = lines(await call(port, "POST", "/api/chat", HELLO))
    assert first["message"] == {"role": "assistant", "content": "Good "}
    assert (first["model"], first["done"]) == ("org/toy", False)
    assert first["created_at"].endswith("Z")
    assert second["message"]["content"] == "day"
    assert (last["message"]["content"], last["done"], last["done_reason"]) == ("", True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"], last["load_duration"]) == (3, 2, 0)
    assert last["total_duration"] == pytest.approx(last["prompt_eval_duration"] + last["eval_duration"], abs=2)
    assert last["total_duration"] > 0


async def test_a_whole_chat_is_one_object():
    def reply(request: GenerationRequest) -> list[Any]:
        return [*text_batches("Good ", "day", finish="length")]

    async with serving(ScriptedBackend(reply=reply)) as port:
        answer = await call(port, "POST", "/api/chat", {**HELLO, "stream": False})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["message"] == {"role": "assistant", "content": "Good day"}
    assert (answer.json["done"], answer.json["done_reason"], answer.json["eval_count"]) == (True, "length", 2)


async def test_a_prompt_goes_through_the_chat_template_unless_it_is_raw():
    backend = ScriptedBackend()
    async with serving(backend) as port:
        body = {"model": "org/toy:latest", "prompt": "Hello?", "stream": False}
        answer = await call(port, "POST", "/api/generate", {**body, "system": "Be brief.", "keep_alive": "5m"})
        assert (answer.json["response"], answer.json["model"]) == ("Good day", "org/toy")
        raw = await call(port, "POST", "/api/generate", {**body, "raw": True})
        assert raw.json["response"] == "Good day"
        streamed = lines(await call(port, "POST", "/api/generate", {**body, "stream": True}))
        assert [line["response"] for line in streamed] == ["Good ", "day", ""]
    templated, plain, _ = backend.requests
    assert [(one.role, one.content) for one in templated.messages] == [("system", "Be brief."), ("user", "Hello?")]
    assert (plain.texts, plain.messages) == (("Hello?",), ())
    assert templated.params.max_tokens == plain.params.max_tokens == 0


async def test_options_are_sampling_parameters():
    backend = ScriptedBackend()
    options = {
        "num_predict": 9,
        "num_ctx": 512,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "stop": ["x"],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "num_thread": 8,
    }
    async with serving(backend) as port:
        for body in ({**HELLO, "options": options}, {**HELLO, "options": {"num_predict": -1, "top_k": 0, "seed": -1}}):
            assert (await call(port, "POST", "/api/chat", body)).status == 200
    first, second = backend.requests
    params = first.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 7, 0.9)
    assert (params.min_p, params.seed, first.stop, params.repetition_penalty) == (0.1, 5, ("x",), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert (second.params.max_tokens, second.params.top_k) == (0, -1)
    assert second.params.seed != -1


@pytest.mark.parametrize(
    ("wanted", "grammar", "param"),
    [
        ("json", Grammar("json_object"), "format"),
        ({"type": "integer"}, Grammar("json", '{"type": "integer"}'), "format"),
        ("", None, ""),
        (None, None, ""),
    ],
)
async def test_the_format_is_a_grammar(wanted: Any, grammar: Grammar | None, param: str):
    backend = ScriptedBackend()
    async with serving(backend) as port:
        prompt = {"model": "org/toy", "prompt": "Hello?"}
        for path, body in (("chat", HELLO), ("generate", prompt), ("generate", {**prompt, "raw": True})):
            assert (await call(port, "POST", f"/api/{path}", {**body, "format": wanted})).status == 200
    for request in backend.requests:
        assert (request.params.grammar, request.grammar_param) == (grammar, param)


async def test_a_request_without_a_prompt_only_finds_the_model():
    backend = ScriptedBackend()
    async with serving(backend) as port:
        loaded = await call(port, "POST", "/api/chat", {"model": "org/toy", "messages": []})
        assert (loaded.json["done"], loaded.json["done_reason"]) == (True, "load")
        unloaded = await call(port, "POST", "/api/generate", {"model": "org/toy", "keep_alive": 0})
        assert (unloaded.json["response"], unloaded.json["done_reason"]) == ("", "unload")
    assert backend.requests == []


async def test_models_are_listed_and_described():
    async with serving(ScriptedBackend()) as port:
        [model] = (await call(port, "GET", "/api/tags")).json["models"]
        assert (model["name"], model["model"], model["modified_at"]) == ("org/toy", "org/toy", "2023-11-14T22:13:20Z")
        for body in ({"model": "org/toy"}, {"name": "org/toy:latest", "verbose": True}):
            shown = (await call(port, "POST", "/api/show", body)).json
            assert shown["capabilities"] == ["completion"]
            assert shown["model_info"]["antiphon.context_length"] == 512
        assert set((await call(port, "GET", "/api/version")).json) == {"version"}


async def test_a_model_whose_own_name_has_the_default_tag_is_found_by_it():
    tagged, plain = replace(CARD, name="foo:latest", path="/1"), replace(CARD, name="bar", path="/2")
    backend = ScriptedBackend(cards=[tagged, plain])
    async with serving(backend) as port:
        for asked, found in (("foo:latest", "foo:latest"), ("bar", "bar"), ("bar:latest", "bar")):
            answer = await call(port, "POST", "/api/chat", {**HELLO, "model": asked, "stream": False})
            assert (answer.status, answer.json["model"]) == (200, found)
        backend.cards.append(replace(CARD, name="bar:latest", path="/3"))
        both = [await call(port, "POST", "/api/show", {"model": name}) for name in ("bar", "bar:latest")]
        assert [one.json["model_info"]["general.basename"] for one in both] == ["bar", "bar:latest"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "other"}, "The model 'other' does not exist. Served here: 'org/toy'."),
        ({"messages": [{"role": "robot", "content": ""}]}, "'messages[0].role' must be"),
        ({"messages": [{"role": "user", "images": ["eA=="]}]}, "'messages[0].images[0]': Pictures are taken only by"),
        ({"messages": [*HELLO["messages"], {"role": "assistant", "content": ""}]}, "'messages[1].role' must be 'user'"),
        ({"options": {"temperature": 3}}, "'options.temperature' must be between 0 and 2."),
        ({"options": {"temperature": "hot"}}, "'options.temperature' must be a number or null, not a string."),
        ({"options": {"num_predict": 0}}, "'options.num_predict' must be at least 1."),
        ({"options": {"num_ctx": 4096}}, "'options.num_ctx' must not exceed the model's context length of 512 tokens."),
        ({"options": {"mirostat": 2}}, "The parameter 'options.mirostat' is not supported yet."),
        ({"options": {"stop": [1]}}, "'options.stop[0]' must be a string"),
        ({"options": {"num_predct": 2}}, "'options.num_predct'. Did you mean 'num_predict'?"),
        ({"options": [1]}, "must be an object"),
        ({"format": "yaml"}, "'format' must be 'json' or a JSON Schema: an object."),
        ({"format": {"enum": ["x" * 70_000]}}, "'format' must not be longer than"),
        ({"tools": [{}]}, "Missing required parameter: 'tools[0].type'."),
        ({"temperature": 1}, "Send it in 'options'."),
    ],
)
async def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], told: str):
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/api/chat", {**HELLO, **change})
    assert reply.status in (400, 404)
    assert set(reply.json) == {"error"}
    assert told in reply.json["error"]


async def test_a_failure_in_a_stream_is_its_last_line():
    def reply(request: GenerationRequest) -> list[Any]:
        return [[SequenceUpdate(0, "Good ", (1,))], ServiceError("engine_failure", "The engine died.")]

    async with serving(ScriptedBackend(reply=reply), api_keys="secret") as port:
        answer = await call(port, "POST", "/api/chat", HELLO, {"authorization": "Bearer secret"})
        assert lines(answer)[-1] == {"error": "The engine died."}
        refused = await call(port, "POST", "/api/chat", HELLO)
        assert (refused.status, set(refused.json)) == (401, {"error"})
