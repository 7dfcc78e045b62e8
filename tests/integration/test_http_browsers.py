"""Requests of pages and programs at the HTTP edge. The backend is scripted: see `edge`."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.edge import ScriptedBackend, call, serving

PAGE = "http://evil.example"
CROSS_SITE = {"origin": PAGE, "content-type": "text/plain;charset=UTF-8", "sec-fetch-site": "cross-site"}
REBOUND = {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"}
BODY = {"model": "org/toy", "prompt": "x"}
ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/api/chat"), ("POST", "/v1/messages"),
    ("POST", "/admin/engines/e0/drain"), ("POST", "/admin/models"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/batches"), ("POST", "/v1/files"), ("GET", "/v1/requests"), ("GET", "/admin/topology"),
    ("GET", "/v1/files"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"),
]  # fmt: skip


@pytest.mark.parametrize("headers", [CROSS_SITE, REBOUND], ids=["a request to another site", "a name of its own"])
async def test_a_strangers_page_reaches_nothing(headers: dict[str, str]):
    backend = ScriptedBackend()
    async with serving(backend) as port:
        for method, path in ROUTES:
            reply = await call(port, method, path, BODY if method == "POST" else b"", headers)
            assert reply.status == 403, (method, path)
            assert b"--allowed-" in reply.body
        form = {**headers, "content-type": "multipart/form-data; boundary=B"}
        assert (await call(port, "POST", "/v1/files", b"--B--\r\n", form)).status == 403
        assert (await call(port, "GET", "/readyz", headers=headers)).status == 200
    assert not backend.requests


async def test_with_keys_the_key_is_the_proof_except_for_administrators():
    bearer = {"authorization": "Bearer sk-1"}
    async with serving(ScriptedBackend(), api_keys="sk-1") as port:
        for headers in (CROSS_SITE, REBOUND):
            assert (await call(port, "POST", "/v1/completions", BODY, {**headers, **bearer})).status == 200
            assert (await call(port, "POST", "/v1/completions", BODY, headers)).status == 401
            assert (await call(port, "GET", "/admin/topology", headers={**headers, **bearer})).status == 403
            assert (await call(port, "GET", "/metrics", headers={**headers, **bearer})).status == 403
        assert (await call(port, "GET", "/admin/topology", headers=bearer)).status == 200


async def test_pages_that_are_allowed_are_served_and_may_read_the_answers():
    settings: dict[str, Any] = {"allowed_origins": json.dumps([PAGE]), "allowed_hosts": '["llm.example"]'}
    async with serving(ScriptedBackend(), **settings) as port:
        asked = {"origin": PAGE, "access-control-request-method": "POST", "host": "llm.example"}
        assert (await call(port, "OPTIONS", "/v1/completions", headers=asked)).status == 200
        headers = {**CROSS_SITE, "content-type": "application/json", "host": "llm.example"}
        reply = await call(port, "POST", "/v1/completions", BODY, headers)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, PAGE)
        plain = await call(port, "POST", "/v1/completions", BODY, {**headers, "content-type": "text/plain"})
        assert (plain.status, plain.error["code"]) == (400, "invalid_value")


async def test_a_server_under_a_prefix_has_the_same_rules():
    async with serving(ScriptedBackend(), root_path="/llm") as port:
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert (await call(port, "GET", "/llm/docs", headers=link)).status == 200
        assert (await call(port, "GET", "/llm/admin/topology", headers=link)).status == 403


async def test_curl_is_served_as_in_ollamas_documentation():
    backend = ScriptedBackend()
    async with serving(backend) as port:
        for path, body in (
            ("/api/generate", {"model": "org/toy", "prompt": "Why is the sky blue?", "stream": False}),
            ("/api/chat", {"model": "org/toy", "messages": [{"role": "user", "content": "hi"}], "stream": False}),
            ("/api/show", {"model": "org/toy"}),
        ):
            for host in ("localhost", "127.0.0.1"):
                curl = await asyncio.create_subprocess_exec(
                    "curl", "-sS", "-4", f"http://{host}:{port}{path}", "-d", json.dumps(body),
                    stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                answer, _ = await curl.communicate()
                assert "error" not in json.loads(answer)
    assert len(backend.requests) == 4
