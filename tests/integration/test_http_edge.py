"""The HTTP edge over real sockets, one whole response at a time. The backend is scripted: see `edge`."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route, WebSocketRoute

from antiphon.services.gateway import apis
from antiphon.services.gateway.apis.finding import find_apis
from antiphon.services.gateway.app import create_app
from antiphon.services.gateway.guests.adapters.guest import AdapterDirectory
from antiphon.services.gateway.path.guest import Guests
from antiphon.shared import limits
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from tests.integration.edge import CARD, Connection, ScriptedBackend, call, serving, text_batches
from tests.support.heartbeats import engine_status, heartbeat

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NO_ADAPTERS = AsyncMock(spec=AdapterDirectory)
"""Stands for the guest that has adapters, so that the routes for them are there."""
OPEN = {"/livez", "/readyz", "/health", "/ping", "/", "/console/{name:path}"}


def routes(app: FastAPI) -> list[tuple[str, str, set[str]]]:
    """Each route's pattern, a path that it matches, and all methods of that path."""
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, WebSocketRoute):
            continue
        assert isinstance(route, APIRoute | Route), route
        methods.setdefault(route.path, set()).update(route.methods or ())
    return [
        (path, path.replace("{model_id:path}", "org/toy").replace("{name:path}", "index.html"), allowed)
        for path, allowed in methods.items()
    ]


def every_route() -> list[tuple[str, str, set[str]]]:
    guests = Guests()
    guests.offer(NO_ADAPTERS)
    return routes(create_app(ScriptedBackend(), GatewaySettings(), guests=guests))


def has_own_errors(path: str) -> bool:
    """Whether error objects under a path do not have OpenAI's format."""
    return any(path.startswith(tuple(api.error_formats)) for api in find_apis(apis))


@pytest.mark.spec("S-API-005", "S-API-007")
async def test_the_models_are_listed_and_found_by_ids_with_slashes():
    async with serving(ScriptedBackend()) as port:
        listed = (await call(port, "GET", "/v1/models")).json
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("org/toy", "model", 512)
        assert (await call(port, "GET", "/v1/models/org/toy")).json == model
        assert (await call(port, "GET", "/v1/models/org%2Ftoy")).json == model
        unknown = await call(port, "GET", "/v1/models/org/other")
        assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.matrix("G-10")
@pytest.mark.spec("S-API-005")
async def test_probes_tell_what_is_missing():
    backend = ScriptedBackend(missing="No engine is ready.")
    async with serving(backend) as port:
        for path in ("/readyz", "/health", "/ping"):
            reply = await call(port, "GET", path)
            assert (reply.status, reply.json["reason"]) == (503, "No engine is ready.")
        assert (await call(port, "GET", "/livez")).status == 200
        backend.missing = ""
        for path in ("/readyz", "/health", "/livez"):
            assert (await call(port, "GET", path)).status == 200
            assert (await call(port, "HEAD", path)).status == 200


async def test_every_route_refuses_the_methods_it_does_not_have():
    async with serving(ScriptedBackend(), offers=[NO_ADAPTERS]) as port:
        for _, path, allowed in every_route():
            for method in METHODS:
                if method in allowed:
                    continue
                reply = await call(port, method, path)
                if path in ("/v1/responses/input_tokens", "/v1/responses/compact") and method in (
                    "GET",
                    "HEAD",
                    "DELETE",
                ):
                    assert reply.status == 404  # it could be the id of a response
                    continue
                if path in ("/admin/models/rollback", "/admin/models/shadow") and method == "DELETE":
                    assert reply.status == 404  # it could be the name of a model
                    continue
                assert reply.status == 405, (method, path)
                assert reply.headers["allow"]
                if method != "HEAD" and not has_own_errors(path):
                    assert reply.error["code"] == "method_not_allowed"


async def test_unknown_routes_are_not_found():
    async with serving(ScriptedBackend()) as port:
        for path in (
            "/index.html",
            "/v1",
            "/v1/",
            "/v1/completions/",
            "/v1/nothing",
            "/health/",
            "/v1/chat/completions/x",
            "/%00",
        ):
            for method in METHODS:
                reply = await call(port, method, path)
                assert reply.status == 404, (method, path)
                if method != "HEAD":
                    assert reply.error["code"] == "not_found"


@pytest.mark.matrix("S-10")
@pytest.mark.spec("S-API-006", "S-API-080", "S-SRV-013")
async def test_every_route_but_the_probes_needs_a_key():
    table = every_route()
    assert {path for path, _, _ in table} > OPEN
    async with serving(ScriptedBackend(), api_keys="one,two") as port:
        for path, url, allowed in table:
            for method in METHODS:
                bare = await call(port, method, url)
                wrong = await call(port, method, url, headers={"authorization": "Bearer three"})
                right = await call(port, method, url, headers={"authorization": "Bearer two"})
                assert right.status != 401, (method, path)
                if path in OPEN:
                    assert (bare.status == 200) == (method in allowed)
                else:
                    assert (bare.status, wrong.status) == (401, 401), (method, path)
                    assert bare.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD" and not has_own_errors(path):
                        assert (bare.error["code"], bare.error["type"]) == ("invalid_api_key", "authentication_error")
        assert (await call(port, "GET", "/nothing")).status == 401


@pytest.mark.matrix("S-12")
async def test_the_server_draws_each_request_s_id():
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/v1/completions", {"prompt": "x"})
        assert reply.json["id"] == "cmpl-" + reply.headers["x-request-id"]
        assert len(reply.headers["x-request-id"]) == 22
        other = await call(port, "GET", "/nothing")
        assert other.headers["x-request-id"] != reply.headers["x-request-id"]


async def test_a_client_s_own_id_is_repeated_beside_the_server_s():
    async with serving(ScriptedBackend()) as port:
        ids: set[str] = set()
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/completions", {"prompt": "x"}), ("/no", {})):
            reply = await call(port, "POST", path, body, {"x-request-id": "mine-1"})
            assert reply.headers["x-request-id"] == "mine-1"
            ids.add(reply.json.get("id", ""))
        assert len(ids) == 3, "ids of answers are unique whatever clients send"


@pytest.mark.spec("S-API-006", "S-API-079")
@pytest.mark.parametrize("content_type", [None, "application/json", "text/plain", "application/x-www-form-urlencoded"])
async def test_the_content_type_of_a_request_does_not_matter(content_type: str | None):
    async with serving(ScriptedBackend()) as port:
        headers = {"content-type": content_type} if content_type else {}
        reply = await call(port, "POST", "/v1/chat/completions", CHAT, headers)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")


@pytest.mark.spec("S-API-010:base", "S-API-082")
async def test_a_missing_or_default_model_is_the_served_one_and_an_unknown_one_is_not_found():
    async with serving(ScriptedBackend()) as port:
        for model in ({}, {"model": "default"}, {"model": None}, {"model": "org/toy"}):
            reply = await call(port, "POST", "/v1/chat/completions", {**CHAT, **model})
            assert reply.json["model"] == "org/toy"
        reply = await call(port, "POST", "/v1/chat/completions", {**CHAT, "model": "gpt"})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


async def test_bad_json_is_a_readable_error():
    async with serving(ScriptedBackend()) as port:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for body in (b"", b"{", b"not json", b'{"a": NaN}', b"\xff"):
                reply = await call(port, "POST", path, body)
                assert (reply.status, reply.error["code"]) == (400, "invalid_json"), (path, body)


@pytest.mark.matrix("G-09")
async def test_a_body_over_the_limit_is_refused_while_it_is_read():
    async with serving(ScriptedBackend()) as port:
        big = b'{"prompt": "' + b"x" * limits.BODY_BYTES_MAX + b'"}'
        reply = await call(port, "POST", "/v1/completions", big)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        async with Connection(port) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
            connection.writer.write(head.encode())
            piece = b"x" * 2**18
            for _ in range(limits.BODY_BYTES_MAX // len(piece) + 2):
                connection.writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await connection.writer.drain()
            connection.writer.write(b"0\r\n\r\n")
            reply = await connection.reply()
            assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert (await call(port, "POST", "/v1/chat/completions", CHAT)).status == 200


@pytest.mark.matrix("G-04")
async def test_refusals_say_when_to_come_back():
    backend = ScriptedBackend(refusal=ServiceError("server_is_overloaded", "Too many requests.", retry_after_s=3.0))
    async with serving(backend) as port:
        for stream in (False, True):
            reply = await call(port, "POST", "/v1/chat/completions", {**CHAT, "stream": stream})
            assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
            assert 3 <= int(reply.headers["retry-after"]) <= 4
            assert 3000 <= int(reply.headers["retry-after-ms"]) <= 3750
        backend.refusal = None
        assert (await call(port, "POST", "/v1/chat/completions", CHAT)).status == 200
        backend.cards = []
        reply = await call(port, "POST", "/v1/chat/completions", CHAT)
        assert (reply.status, reply.error["code"]) == (503, "no_engine")


async def test_a_fault_of_ours_is_a_500_without_its_details(caplog: pytest.LogCaptureFixture):
    backend = ScriptedBackend(refusal=RuntimeError("secret detail"))
    async with serving(backend) as port:
        for stream in (False, True):
            reply = await call(port, "POST", "/v1/chat/completions", {**CHAT, "stream": stream})
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert b"secret" not in reply.body
        assert sum("secret detail" in (record.exc_text or "") for record in caplog.records) == 2
        metrics = (await call(port, "GET", "/metrics")).body.decode()
        assert 'antiphon:request_errors_total{code="internal_error"} 2.0' in metrics


async def test_an_error_of_the_generation_has_its_status():
    backend = ScriptedBackend(reply=lambda _: [ServiceError("context_length_exceeded", "Too long.", param="prompt")])
    async with serving(backend) as port:
        for stream in (False, True):
            reply = await call(port, "POST", "/v1/completions", {"prompt": "x", "stream": stream})
            assert (reply.status, reply.error["param"]) == (400, "prompt")


async def test_an_answer_that_breaks_off_is_an_error():
    backend = ScriptedBackend(reply=lambda _: text_batches("a", "b")[:1])
    async with serving(backend) as port:
        assert (await call(port, "POST", "/v1/chat/completions", CHAT)).error["code"] == "internal_error"


@pytest.mark.spec("S-API-011", "S-API-027")
async def test_an_echo_is_the_prompt_as_text_whatever_its_form():
    async with serving(ScriptedBackend()) as port:

        async def texts(path: str, **body: Any) -> list[str]:
            choices = (await call(port, "POST", path, {"echo": True, **body})).json["choices"]
            return [one["text"] if "text" in one else one["message"]["content"] for one in choices]

        assert await texts("/v1/completions", prompt="say ") == ["say Good day"]
        assert await texts("/v1/completions", prompt=[65, 66]) == ["ABGood day"]
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
        assert await texts("/v1/chat/completions", messages=turns) == ["Well, Good day"]
        tokens = [{"role": "user", "content": [65, 66]}]
        assert await texts("/v1/chat/completions", messages=tokens) == ["ABGood day"]


async def test_texts_become_tokens_and_back():
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/tokenize", {"prompt": "ab"})
        assert reply.json == {"count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": None}
        reply = await call(port, "POST", "/tokenize", {**CHAT, "return_token_strs": True, "model": "org/toy"})
        assert reply.json["token_strs"] == ["h", "i"]
        assert (await call(port, "POST", "/detokenize", {"tokens": [104, 105]})).json == {"prompt": "hi"}
        assert (await call(port, "POST", "/detokenize", {"tokens": []})).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **CHAT}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, "model"),
    ],
)
async def test_token_requests_are_refused_by_parameter(path: str, body: Any, param: str):
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", path, body)
        assert reply.status in (400, 404)
        assert reply.error["param"] == param


@pytest.mark.spec("S-API-005")
async def test_metrics_show_requests_answers_and_engines():
    status = engine_status("org/toy", num_running=2)
    beats = [heartbeat("engine", "e0", "b", status)]
    async with serving(ScriptedBackend(), heartbeats=lambda: beats) as port:
        assert (await call(port, "GET", "/load")).json == {"server_load": 2}
        await call(port, "POST", "/v1/chat/completions", CHAT)
        await call(port, "POST", "/v1/chat/completions", {**CHAT, "n": 999})
        await call(port, "GET", "/v1/models/" + "x" * 50)
        reply = await call(port, "GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        text = reply.body.decode()
    lines = [
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 1.0',
        'http_request_duration_seconds_count{handler="/v1/chat/completions",method="POST"} 2.0',
        'vllm:request_success_total{finished_reason="stop",model_name="org/toy"} 1.0',
        'vllm:generation_tokens_total{model_name="org/toy"} 2.0',
        'vllm:num_requests_running{engine="e0",model_name="org/toy"} 2.0',
        'antiphon:request_errors_total{code="invalid_value"} 1.0',
    ]
    for line in lines:
        assert line in text
    assert "xxxxx" not in text


async def test_the_openapi_document_lists_the_routes_and_their_bodies():
    async with serving(ScriptedBackend(), offers=[NO_ADAPTERS]) as port:
        document = (await call(port, "GET", "/openapi.json")).json
        assert (await call(port, "GET", "/docs")).status == 200
        assert set((await call(port, "GET", "/version")).json) == {"version"}
    listed = sorted(f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item)
    golden = Path(__file__).parents[1] / "golden" / "openapi_routes.txt"
    assert listed == golden.read_text().splitlines()
    described = {
        path: item["post"]["requestBody"]
        for path, item in document["paths"].items()
        if "requestBody" in item.get("post", ())
    }
    assert len(described) == 42
    for path, body in described.items():
        schema = body["content"]["application/json"]["schema"]
        names = [form["$ref"].removeprefix("#/components/schemas/") for form in schema.get("anyOf", [schema])]
        assert len(names) == (2 if path == "/generate" else 1)
        assert document["components"]["schemas"].keys() >= {*names}
    for path, name in (("/v1/messages", "AnthropicError"), ("/api/tags", "OllamaError"), ("/v1/files", "Error")):
        [item, *_] = document["paths"][path].values()
        reference = item["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{name}"
        assert name in document["components"]["schemas"]
    for path, media_type in (
        ("/metrics", "text/plain"),
        ("/v1/models", "application/json"),
        ("/v1/files/{file_id}/content", "application/jsonl"),
    ):
        assert list(document["paths"][path]["get"]["responses"]["200"]["content"]) == [media_type]
    assert "$defs" not in json.dumps(document)
    assert document["components"]["schemas"]["CompletionBody"]["required"] == ["prompt"]


@pytest.mark.spec("S-DEP-040")
async def test_a_bare_chat_request_without_a_model_is_answered():
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/v1/chat/completions", {**CHAT, "temperature": 0.0})
        assert reply.json["choices"][0]["message"] == {"role": "assistant", "content": "Good day"}
        assert reply.json["model"] == CARD.name


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        (
            "POST",
            "/chat/completions",
            "Unknown request URL: POST /chat/completions. Did you mean /v1/chat/completions?",
        ),
        ("POST", "/v1/completions/", "Unknown request URL: POST /v1/completions/. Did you mean /v1/completions?"),
        ("POST", "/v1/chat/completion", "Unknown request URL: POST /v1/chat/completion. Did you mean"),
        ("GET", "/v1/readyz", "Unknown request URL: GET /v1/readyz. Did you mean /readyz?"),
        ("GET", "/nowhere", "Unknown request URL: GET /nowhere."),
        ("GET", f"/{'v1/models' * 20}", f"Unknown request URL: GET /{'v1/models' * 20}."),
        ("GET", "/v1/chat/completions", "Method not allowed: GET /v1/chat/completions. Use POST."),
        ("POST", "/v1/models", "Method not allowed: POST /v1/models. Use GET."),
        ("POST", "/v1/chat/completions", "The request body is empty: send a JSON object."),
    ],
)
async def test_a_wrong_path_or_method_is_answered_with_the_right_one(method: str, path: str, message: str):
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, method, path)
    if method == "POST" and "empty" in message:
        assert reply.status == 400
    assert reply.error["message"].startswith(message)
    if message.endswith((".", "?")):
        assert reply.error["message"] == message


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("limit=many", "limit", "Input should be a valid integer"),
        ("limit=", "limit", "Input should be a valid integer"),
        (f"limit={'9' * 5000}", "limit", "Unable to parse input string as an integer"),
        ("all=perhaps", "all", "Input should be a valid boolean"),
    ],
)
async def test_a_wrong_parameter_of_a_query_is_named(query: str, param: str, message: str):
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "GET", f"/v1/requests?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["message"].startswith(f"'{param}' is not valid: {message}")
