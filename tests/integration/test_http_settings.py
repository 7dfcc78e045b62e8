"""Settings of the gateway that change how the HTTP edge answers. The backend is scripted: see `edge`."""

from dataclasses import replace
from typing import Any

import pytest

from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.shared.messages import PositionLogprobs, TokenText
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import CARD, Reply, ScriptedBackend, call, serving, text_batches

HELLO = [{"role": "user", "content": "hi"}]
PAGE = "https://page.example"
ASKING = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.spec("S-API-007")
async def test_a_server_under_a_prefix_answers_with_it_and_without():
    async with serving(ScriptedBackend(), root_path="/llm/", api_keys="key") as port:
        for prefix in ("/llm", ""):
            assert (await call(port, "GET", f"{prefix}/readyz")).status == 200
            assert (await call(port, "GET", f"{prefix}/v1/models")).status == 401
            with_key = {"authorization": "Bearer key"}
            body = {"messages": HELLO}
            assert (await call(port, "POST", f"{prefix}/v1/chat/completions", body, with_key)).status == 200
        for elsewhere in ("/llmreadyz", "/other/readyz"):
            assert (await call(port, "GET", elsewhere)).status == 401
        document = (await call(port, "GET", "/openapi.json", headers=with_key)).json
        assert document["servers"] == [{"url": "/llm"}]


async def test_pages_of_other_origins_are_let_in_only_where_they_are_named():
    async with serving(ScriptedBackend()) as port:
        assert "access-control-allow-origin" not in (await call(port, "OPTIONS", "/v1/models", headers=ASKING)).headers
    settings: dict[str, Any] = {
        "allowed_origins": f'["{PAGE}"]', "allowed_methods": '["POST"]', "allowed_headers": '["Authorization"]',
    }  # fmt: skip
    async with serving(ScriptedBackend(), **settings, allow_credentials=True, api_keys="key") as port:
        asked = await call(port, "OPTIONS", "/v1/chat/completions", headers=ASKING)
        assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert asked.headers["access-control-allow-credentials"] == "true"
        stranger = {**ASKING, "origin": "https://other.example"}
        assert (await call(port, "OPTIONS", "/v1/chat/completions", headers=stranger)).status == 400
        for headers, status in (({"origin": PAGE}, 401), ({"origin": PAGE, "authorization": "Bearer key"}, 200)):
            body = {"messages": HELLO, "stream": True}
            answer = await call(port, "POST", "/v1/chat/completions", body, headers)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE)


async def ask(port: int, path: str, **fields: Any) -> Reply:
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HELLO}
    return await call(port, "POST", path, {**body, **fields})


@pytest.mark.spec("S-API-015:run")
async def test_a_chat_that_names_no_temperature_has_the_servers():
    cases: list[tuple[dict[str, Any], float]] = [({}, 1.0), ({"default_chat_temperature": 0.7}, 0.7)]
    for settings, chat in cases:
        backend = ScriptedBackend()
        async with serving(backend, **settings) as port:
            for fields in ({}, {"temperature": None}, {"temperature": 0.3}):
                await ask(port, "/v1/chat/completions", **fields)
            await ask(port, "/v1/completions")
        assert [request.params.temperature for request in backend.requests] == [chat, chat, 0.3, 1.0]


async def test_the_server_bounds_how_many_candidates_a_request_may_ask_for():
    async with serving(ScriptedBackend(), max_logprobs=2) as port:
        for path, fields, named in (
            ("/v1/completions", {"logprobs": 3}, "logprobs"),
            ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
            ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
        ):
            refused = await ask(port, path, **fields)
            assert (refused.status, refused.error["param"]) == (400, named)
            assert "2" in refused.error["message"]
        assert (await ask(port, "/v1/completions", logprobs=2)).status == 200
        assert (await ask(port, "/v1/chat/completions", logprobs=True, top_logprobs=2)).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_server_can_write_tokens_of_log_probabilities_as_ids_unless_a_request_refuses(path: str):
    chosen = TokenText(7, "a", b"a", -0.5)
    steps = text_batches("a", logprobs=(PositionLogprobs(chosen),))
    backend = ScriptedBackend(reply=lambda _: list(steps))
    async with serving(backend, return_tokens_as_token_ids=True) as port:
        for fields, named in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
            reply = await ask(port, path, logprobs=1, **fields)
            assert (b"token_id:7" in reply.body) == named


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_no_endpoint_ignores_a_field_in_silence(path: str):
    body = {"/detokenize": {"tokens": [65]}, "/v1/chat/completions": {"messages": HELLO}}.get(path, {"prompt": "hi"})
    async with serving(ScriptedBackend(), unknown_parameters="refuse") as port:
        for name, near in (("modle", "'model'"), ("system", "role 'system'")):
            refused = await call(port, "POST", path, {**body, name: "x"})
            assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
            assert refused.error["param"] == name
            assert near in refused.error["message"]
        assert (await call(port, "POST", path, {**body, "user": "x", "store": True, "new": None})).status == 200
    async with serving(ScriptedBackend()) as port:
        told = await call(port, "POST", path, {**body, "modle": "x", "store": True, "new\r\nx: y": 1, "ü": 1})
        assert (told.status, told.headers["x-antiphon-ignored"]) == (200, "modle, store, new??x:?y, ?")
        assert "x-antiphon-ignored" not in (await call(port, "POST", path, body)).headers


async def test_a_field_of_another_endpoint_is_answered_with_the_endpoint():
    async with serving(ScriptedBackend()) as port:
        for path, fields, said in (
            ("/v1/completions", {"messages": HELLO}, "Conversations go to /v1/chat/completions."),
            ("/v1/chat/completions", {"prompt": "hi"}, "Prompts go to /v1/completions."),
        ):
            refused = await ask(port, path, **fields)
            assert (refused.status, refused.error["param"]) == (400, next(iter(fields)))
            assert said in refused.error["message"]


async def test_the_tokens_of_a_whole_request_can_be_counted():
    body = {"messages": HELLO, "temperature": 0.5, "max_tokens": 7, "stop": ["x"], "stream": True, "n": 2}
    async with serving(ScriptedBackend()) as port:
        assert (await call(port, "POST", "/tokenize", body)).json["count"] == 2
        assert (await call(port, "POST", "/tokenize", {**body, "tools": [{}]})).status == 400
        counted = await call(port, "POST", "/v1/chat/completions/input_tokens", body)
        assert counted.json == {"object": "response.input_tokens", "input_tokens": 2}
        refused = await call(port, "POST", "/v1/chat/completions/input_tokens", {"prompt": "hi"})
        assert (refused.status, refused.error["param"]) == (400, "messages")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streams_end_with_the_token_counts_if_the_server_says_so(path: str):
    for forced in (False, True):
        async with serving(ScriptedBackend(), enable_force_include_usage=forced) as port:
            reply = await ask(port, path, stream=True)
            assert reply.body.count(b'"total_tokens"') == forced


async def test_a_model_is_found_by_any_of_its_names_and_listed_under_the_first():
    async with serving(ScriptedBackend(cards=[replace(CARD, aliases=("other",))])) as port:
        [listed] = (await call(port, "GET", "/v1/models")).json["data"]
        assert listed["id"] == CARD.name
        assert (await call(port, "GET", "/v1/models/other")).json == listed
        assert (await call(port, "GET", "/v1/models/third")).status == 404


KEY_FILE = """
[[keys]]
name = "toy"
key = "sk-toy"
models = ["org/toy"]

[[keys]]
name = "ops"
key = "sk-ops"
scopes = ["admin"]
"""


async def test_a_key_uses_its_own_models_and_routes_and_no_others():
    cards = [CARD, replace(CARD, name="org/other", path="/models/other")]
    keys = ApiKeys("sk-all", keys_of_text(KEY_FILE, is_json=False, source=""))
    async with serving(ScriptedBackend(cards=cards), keys=keys) as port:

        def ask_as(key: str, method: str, path: str, body: Any = b""):
            return call(port, method, path, body, {"authorization": f"Bearer {key}"})

        for key, names in (("sk-toy", ["org/toy"]), ("sk-all", ["org/toy", "org/other"])):
            assert [card["id"] for card in (await ask_as(key, "GET", "/v1/models")).json["data"]] == names
        for path, fields in (
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/tokenize", {"prompt": "hi"}),
            ("/detokenize", {"tokens": [65]}),
        ):
            assert (await ask_as("sk-toy", "POST", path, {**fields, "model": "org/toy"})).status == 200
            for model in ("org/other", "/models/other"):
                refused = await ask_as("sk-toy", "POST", path, {**fields, "model": model})
                assert (refused.status, refused.error["type"]) == (403, "permission_error")
                assert (refused.error["code"], refused.error["param"]) == ("permission_denied", "model")
            assert (await ask_as("sk-ops", "POST", path, fields)).status == 403
        assert (await ask_as("sk-toy", "GET", "/v1/models/org/other")).status == 403
        for key, told in (("sk-toy", "The API key 'toy' may use: 'org/toy'."), ("sk-all", "'org/toy', 'org/other'.")):
            unknown = await ask_as(key, "POST", "/v1/completions", {"prompt": "hi", "model": "third"})
            assert (unknown.status, unknown.error["param"]) == (404, "model")
            assert unknown.error["message"].startswith("The model 'third' does not exist.")
            assert unknown.error["message"].endswith(told)
        for key, status in (("sk-ops", 200), ("sk-toy", 403), ("sk-all", 200), ("sk-none", 401)):
            assert (await ask_as(key, "GET", "/metrics")).status == status
