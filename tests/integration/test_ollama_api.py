"""Ollama's API against the HTTP edge. The backend is scripted: see `edge`."""

import json
from dataclasses import replace
from typing import Any

import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ModelFacts
from antiphon.shared.parameters.grammar import Grammar
from tests.integration.edge import CARD, Reply, ScriptedBackend, call, serving, text_batches
from tests.integration.test_pooling_endpoints import pooling_backend
from tests.unit.gateway.request_contexts import position

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
    assert [(one.role, one.content) for one in templated.inputs.messages] == [
        ("system", "Be brief."),
        ("user", "Hello?"),
    ]
    assert (plain.inputs.texts, plain.inputs.messages) == (("Hello?",), ())
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
        "top_a": 0.2,
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
    assert (params.min_p, params.top_a, params.seed, first.output.stop) == (0.1, 0.2, 5, ("x",))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.1)
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
        assert (request.params.grammar, request.pending.grammar_param) == (grammar, param)


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
        version = (await call(port, "GET", "/api/version")).json
        assert set(version) == {"version", "antiphon"}
        # The least that Codex accepts; VS Code accepts 0.6.4.
        assert tuple(map(int, version["version"].split("."))) >= (0, 13, 4)


FACTS = ModelFacts(
    architecture="llama",
    num_parameters=5_770_496,
    weight_bytes=11_547_040,
    file_format="gguf",
    quantization="Q4_K",
    on_device=True,
)


async def test_models_are_described_by_their_files():
    backend = ScriptedBackend(cards=[replace(CARD, facts=FACTS, content="abc")])
    async with serving(backend) as port:
        [listed] = (await call(port, "GET", "/api/tags")).json["models"]
        [loaded] = (await call(port, "GET", "/api/ps")).json["models"]
        shown = (await call(port, "POST", "/api/show", {"model": "org/toy"})).json
        backend.cards = [replace(CARD, facts=FACTS, content="other weights")]
        [other] = (await call(port, "GET", "/api/tags")).json["models"]
    details = {"format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "5.8M"}
    details |= {"quantization_level": "Q4_K", "parent_model": ""}
    assert listed["details"] == loaded["details"] == shown["details"] == details
    assert (listed["size"], loaded["size"], loaded["size_vram"]) == (FACTS.weight_bytes,) * 3
    assert listed["digest"] == loaded["digest"] != other["digest"]
    assert len(bytes.fromhex(listed["digest"])) == 32
    assert (loaded["context_length"], loaded["expires_at"][:4]) == (512, "9999")
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["model_info"]["general.parameter_count"] == FACTS.num_parameters


async def test_a_model_that_only_embeds_is_no_model_for_completions():
    async with serving(ScriptedBackend(cards=[replace(CARD, embedding_size=2, generates=False)])) as port:
        shown = (await call(port, "POST", "/api/show", {"model": "org/toy"})).json
    assert shown["capabilities"] == ["embedding"]


def told(reply: Reply) -> list[str]:
    return reply.headers.get("x-antiphon-ignored", "").split(", ")


async def test_what_has_no_effect_is_told():
    options = {"num_ctx": 4096, "mirostat": 2, "repeat_last_n": 64, "num_thread": 8, "num_predict": 2}
    message = {"role": "user", "content": "Hello?", "mood": "good"}
    asked = {"model": "org/toy", "messages": [message], "options": options, "keep_alive": "5m", "stream": False}
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/api/chat", {**asked, "truncate": True, "shift": True, "chat_id": "x"})
        fitting = await call(port, "POST", "/api/chat", {**HELLO, "options": {"num_ctx": 512}, "stream": False})
    assert reply.status == 200
    names = ["options.mirostat", "options.repeat_last_n", "options.num_thread", "options.num_ctx", "messages[].mood"]
    assert sorted(told(reply)) == sorted([*names, "keep_alive", "truncate", "shift", "chat_id"])
    assert told(fitting) == [""]


def with_logprobs(request: GenerationRequest) -> list[Any]:
    assert request.params.logprobs == 2
    found = [("Good ", position("Good ", -0.5, ("Good ", -0.5), ("Bad ", -1.0))), ("day", position("day", -0.25))]
    updates = [[SequenceUpdate(index=0, text=text, token_ids=(1,), logprobs=(one,))] for text, one in found]
    return [*updates, [SequenceUpdate(index=0, text="", finish_reason="stop")]]


async def test_log_probabilities_are_beside_the_text():
    prompt = {"model": "org/toy", "prompt": "Hello?"}
    asked = {"logprobs": True, "top_logprobs": 2}
    async with serving(ScriptedBackend(reply=with_logprobs)) as port:
        for path, body in (("chat", HELLO), ("generate", prompt), ("generate", {**prompt, "raw": True})):
            whole = (await call(port, "POST", f"/api/{path}", {**body, **asked, "stream": False})).json["logprobs"]
            streamed = lines(await call(port, "POST", f"/api/{path}", {**body, **asked}))
            assert [one.get("logprobs") for one in streamed] == [whole[:1], whole[1:], None]
            first = {"token": "Good ", "logprob": -0.5, "bytes": list(b"Good ")}
            other = {"token": "Bad ", "logprob": -1.0, "bytes": list(b"Bad ")}
            assert whole[0] == {**first, "top_logprobs": [first, other]}


@pytest.mark.parametrize("think", [True, False, None])
async def test_thinking_is_switched_in_the_chat_template(think: bool | None):
    backend = ScriptedBackend(cards=[replace(CARD, reasoning_format="deepseek_r1")])
    async with serving(backend) as port:
        assert (await call(port, "POST", "/api/chat", {**HELLO, "think": think})).status == 200
    variables = json.loads(backend.requests[0].inputs.template_variables or b"{}")
    assert variables.get("enable_thinking") is think


async def test_a_suffix_fills_a_gap_without_the_chat_template():
    backend = ScriptedBackend()
    body = {"model": "org/toy", "prompt": "def f(", "suffix": "return 1", "stream": False}
    async with serving(backend) as port:
        reply = await call(port, "POST", "/api/generate", body)
        refused = await call(port, "POST", "/api/generate", {**body, "system": "Be brief."})
        await call(port, "POST", "/api/generate", {**body, "prompt": ""})
    assert reply.json["response"] == "Good day"
    assert [(one.inputs.texts, one.inputs.suffix, one.params.max_tokens) for one in backend.requests] == [
        (("def f(",), "return 1", 0),
        (("",), "return 1", 0),
    ]
    assert (refused.status, refused.json["error"]) == (400, "'system' with 'suffix' is not supported yet.")


async def test_texts_become_vectors():
    backend = pooling_backend()
    async with serving(backend) as port:
        many = await call(port, "POST", "/api/embed", {"model": "org/toy:latest", "input": ["a", "b"], "dimensions": 1})
        one = await call(port, "POST", "/api/embed", {"model": "org/toy", "input": "a", "options": {"num_ctx": 8}})
        whole = await call(port, "POST", "/api/embed", {"model": "org/toy", "input": "a", "truncate": False})
        former = await call(port, "POST", "/api/embeddings", {"model": "org/toy", "prompt": "a"})
        nothing = await call(port, "POST", "/api/embed", {"model": "org/toy", "input": []})
        refused = await call(port, "POST", "/api/embed", {"model": "org/toy", "input": "a", "dimensions": 9})
        nowhere = await call(port, "POST", "/api/embed", {"model": "other", "input": "a"})
    assert many.json["embeddings"] == [[0.0, 0.5], [1.0, 0.5]]
    assert (many.json["model"], many.json["prompt_eval_count"], many.json["load_duration"]) == ("org/toy", 6, 0)
    assert (one.json["embeddings"], told(one)) == ([[0.0, 0.5]], ["options"])
    assert former.json == {"embedding": [0.0, 0.5]}
    assert nothing.json["embeddings"] == []
    assert (refused.status, "'dimensions'" in refused.json["error"]) == (400, True)
    assert nowhere.status == 404
    assert [(one.inputs.truncate_prompt_tokens, one.pooling.normalize) for one in backend.requests if one.pooling] == [
        (512, True),
        (512, True),
        (0, True),
        (512, False),
    ]
    assert whole.status == 200


async def test_pulling_a_served_model_succeeds_and_any_other_says_what_to_do():
    async with serving(ScriptedBackend()) as port:
        *_, last = lines(await call(port, "POST", "/api/pull", {"model": "org/toy:latest", "insecure": True}))
        whole = await call(port, "POST", "/api/pull", {"name": "org/toy", "stream": False})
        other = await call(port, "POST", "/api/pull", {"model": "llama3.2"})
        assert (await call(port, "POST", "/api/pull", {})).status == 400
    assert last == whole.json == {"status": "success"}
    assert (other.status, set(other.json)) == (404, {"error"})
    assert "antiphon models set" in other.json["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "known", "unknown"),
    [
        ("POST", "copy", "source", 400, 404),
        ("DELETE", "delete", "model", 400, 404),
        ("POST", "push", "model", 400, 404),
        ("POST", "create", "model", 400, 400),
    ],
)
async def test_what_would_change_the_models_is_refused_with_what_to_do(
    method: str, path: str, body: str, known: int, unknown: int
):
    async with serving(ScriptedBackend()) as port:
        for name, status in (("org/toy", known), ("other", unknown)):
            reply = await call(port, method, f"/api/{path}", {body: name, "destination": "x"})
            assert (reply.status, set(reply.json)) == (status, {"error"})
            assert "cannot be" in reply.json["error"]


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
        ({"messages": [{"role": "user", "images": ["eA=="]}]}, "'messages[0].images[0]': Images are taken only by"),
        ({"messages": [*HELLO["messages"], {"role": "assistant", "content": ""}]}, "'messages[1].role' must be 'user'"),
        ({"options": {"temperature": 3}}, "'options.temperature' must be between 0 and 2."),
        ({"options": {"temperature": "hot"}}, "'options.temperature' must be a number or null, not a string."),
        ({"options": {"num_predict": 0}}, "'options.num_predict' must be at least 1."),
        ({"template": "{{ .Prompt }}"}, "The parameter 'template' is not supported yet."),
        ({"suffix": "}"}, "Prompts with a suffix go to /api/generate."),
        ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs' to be true."),
        ({"logprobs": True, "top_logprobs": 99}, "'top_logprobs' must be between 0 and 20."),
        ({"messages": [{**HELLO["messages"][0], "mood": 1}]}, "'messages[0].mood'"),
        ({"options": {"stop": [1]}}, "'options.stop[0]' must be a string"),
        ({"options": {"num_predct": 2}}, "'options.num_predct'. Did you mean 'options.num_predict'?"),
        ({"options": [1]}, "must be an object"),
        ({"format": "yaml"}, "'format' must be 'json' or a JSON Schema: an object."),
        ({"format": {"enum": ["x" * 70_000]}}, "'format' must not have a text longer than"),
        ({"tools": [{}]}, "Missing required parameter: 'tools[0].type'."),
        ({"temperature": 1}, "Send it in 'options'."),
    ],
)
async def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], told: str):
    async with serving(ScriptedBackend(), unknown_parameters="refuse") as port:
        reply = await call(port, "POST", "/api/chat", {**HELLO, **change})
    assert reply.status in (400, 404)
    assert set(reply.json) == {"error"}
    assert told in reply.json["error"]


async def test_a_failure_in_a_stream_is_its_last_line():
    def reply(request: GenerationRequest) -> list[Any]:
        return [
            [SequenceUpdate(index=0, text="Good ", token_ids=(1,))],
            ServiceError("engine_failure", "The engine died."),
        ]

    async with serving(ScriptedBackend(reply=reply), api_keys="secret") as port:
        answer = await call(port, "POST", "/api/chat", HELLO, {"authorization": "Bearer secret"})
        assert lines(answer)[-1] == {"error": "The engine died."}
        refused = await call(port, "POST", "/api/chat", HELLO)
        assert (refused.status, set(refused.json)) == (401, {"error"})
