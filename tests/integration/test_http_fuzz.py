"""Any body at any endpoint: never a fault of ours, and always an error object that names what is wrong."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import example, given, settings
from hypothesis import strategies as st

from antiphon.services.gateway.app import create_app
from antiphon.shared.config import GatewaySettings
from tests.integration.edge import CARD, Reply, ScriptedBackend

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2, 0.5, 10**30, True, "1", None])
FIELDS: dict[str, Any] = {
    **dict.fromkeys(["max_tokens", "min_tokens", "n", "best_of", "seed", "priority", "top_k", "top_logprobs"], NUMBERS),
    **dict.fromkeys(["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "logprobs"], NUMBERS),
    **dict.fromkeys(["stop", "stop_token_ids", "stream_options", "tools", "logit_bias", "response_format"], JSON),
    **dict.fromkeys(["suffix", "guided_json", "user", "cache_salt", "model"], JSON),
    **dict.fromkeys(["stream", "echo", "ignore_eos"], st.booleans() | st.none()),
    "prompt": JSON | st.text() | st.lists(st.integers(0, 299)) | st.lists(st.text()),
    "tokens": JSON | st.lists(st.integers(0, 299)),
}
CONTENT = JSON | st.text() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}))
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON, "content": CONTENT}
)
BODY = st.fixed_dictionaries({}, optional={**FIELDS, "messages": JSON | st.lists(TURN, max_size=3)})
FEW = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), max_size=2).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
USABLE = st.fixed_dictionaries({"prompt": st.text(), "messages": st.lists(TURN, min_size=1, max_size=3)})
ALMOST_GOOD = st.builds(lambda usable, few: {**usable, **few}, USABLE, FEW)
APP = create_app(ScriptedBackend(), GatewaySettings())
TOOL_APP = create_app(
    ScriptedBackend(cards=[dataclasses.replace(CARD, tool_format="hermes", reasoning_format="qwen3")]),
    GatewaySettings(),
)
NAME = st.sampled_from(["f", "g", "bad name", ""])
FUNCTION = st.fixed_dictionaries({"name": NAME}, optional={"parameters": JSON, "description": JSON, "arguments": JSON})
TOOL = st.fixed_dictionaries({"type": st.just("function") | JSON, "function": FUNCTION | JSON}, optional={"id": JSON})
TOOL_TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "function"]), "content": st.text() | st.none()},
    optional={
        "tool_calls": st.lists(TOOL, max_size=2) | JSON,
        "function_call": FUNCTION,
        **dict.fromkeys(["tool_call_id", "name", "reasoning", "reasoning_content"], st.text() | JSON),
    },
)
TOOL_BODY = st.fixed_dictionaries(
    {"messages": st.lists(TOOL_TURN, min_size=1, max_size=3)},
    optional={
        "tools": st.lists(TOOL, max_size=2) | JSON,
        "functions": st.lists(FUNCTION, max_size=2),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | TOOL | JSON,
        "function_call": st.sampled_from(["none", "auto"]) | FUNCTION,
        "documents": JSON | st.lists(JSON),
        "chat_template_kwargs": JSON | st.dictionaries(st.sampled_from(["tools", "a"]), JSON),
        **dict.fromkeys(["continue_final_message", "add_generation_prompt", "parallel_tool_calls"], st.booleans()),
        **dict.fromkeys(["include_reasoning", "stream"], st.booleans()),
    },
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])


async def post(app: FastAPI, path: str, body: bytes) -> Reply:
    """One request, straight into the application."""
    sent: list[Any] = []
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in asked:
            return message
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app({**scope, "http_version": "1.1", "server": ("x", 1), "client": ("x", 1), "scheme": "http"}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))


def check(path: str, body: bytes, app: FastAPI = APP) -> None:
    reply = asyncio.run(post(app, path, body))
    if reply.status == 200:
        return
    assert 400 <= reply.status < 500, (reply.status, reply.body, body)
    error = reply.error
    assert error["message"]
    if error["code"] not in ("invalid_json",) and "request body" not in error["message"]:
        assert error["param"], error


@pytest.mark.matrix("G-08")
@settings(max_examples=60)
@given(PATHS, st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | JSON.map(json.dumps).map(str.encode))
def test_any_bytes_are_answered_with_an_error_object(path: str, body: bytes):
    check(path, body)


@pytest.mark.matrix("G-08")
@settings(max_examples=200)
@given(PATHS, BODY | ALMOST_GOOD)
def test_any_fields_are_answered_or_refused_by_name(path: str, body: Any):
    check(path, json.dumps(body).encode())


SAMPLING = st.fixed_dictionaries({}, optional={**FIELDS, "eos_token_ids": JSON, "detokenize": st.booleans() | JSON})
GENERATE = st.fixed_dictionaries(
    {},
    optional={
        **{name: FIELDS[name] for name in ("prompt", "max_tokens", "n", "stop", "stream", "suffix", "model")},
        "request_id": JSON | st.text(min_size=1),
        "messages": JSON | st.lists(TURN | st.lists(TURN, max_size=2), max_size=3),
        "history": JSON | st.lists(st.lists(st.text(), min_size=2, max_size=2), max_size=2),
        "system": JSON | st.text(),
        "prompt_token_ids": JSON | st.lists(st.integers(0, 299)),
        "prompt_token_ids_len": NUMBERS,
        "sampling_params": JSON | SAMPLING,
        **dict.fromkeys(["arrival_time", "preprocess_start_time", "preprocess_end_time"], NUMBERS),
    },
)


@settings(max_examples=200)
@given(GENERATE)
@example({"sampling_params": {"\\": False}})
def test_any_request_to_generate_is_answered_or_refused_by_name(body: Any):
    reply = asyncio.run(post(APP, "/generate", json.dumps(body).encode()))
    if reply.status != 200:
        assert 400 <= reply.status < 500, (reply.status, reply.body, body)
        error = reply.json["error"]
        assert error["message"]
        assert error["param"] or error["code"] == "invalid_json", error


@settings(max_examples=300)
@given(st.sampled_from(["/v1/chat/completions", "/tokenize"]), TOOL_BODY)
def test_any_tools_and_messages_are_answered_or_refused_by_name(path: str, body: Any):
    check(path, json.dumps(body).encode(), TOOL_APP)
