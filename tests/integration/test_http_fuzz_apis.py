"""Any body at any endpoint of the other APIs: never a fault of ours, and always an error object of the API's form."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.services.gateway.app import create_app
from antiphon.shared.config import GatewaySettings
from tests.integration.seen_images import ONE, URL, data_url, eye, in_base64
from tests.integration.test_http_fuzz import JSON, NUMBERS, post

APP = create_app(eye(), GatewaySettings())
PATHS = st.sampled_from(
    [
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/v1/batches",
        "/v1/files",
    ]
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "output_text", "image"]) | JSON, "text": st.text() | JSON},
    optional={"cache_control": JSON, "annotations": JSON, "source": JSON},
) | st.fixed_dictionaries(
    {"type": st.sampled_from(["tool_use", "tool_result", "thinking"])},
    optional=dict.fromkeys(["id", "name", "tool_use_id", "thinking"], st.text() | JSON)
    | dict.fromkeys(["input", "content", "is_error"], JSON),
)
IMAGE_URL = st.sampled_from([data_url(ONE), URL, "data:image/png;base64,%", "file:///x"]) | JSON
SOURCE = JSON | st.fixed_dictionaries(
    {"type": st.sampled_from(["base64", "url"])},
    optional={"media_type": st.just("image/png") | JSON, "data": st.just(in_base64(ONE)) | JSON, "url": IMAGE_URL},
)
IMAGE = st.fixed_dictionaries(
    {"type": st.sampled_from(["image", "input_image"])},
    optional={"source": SOURCE, "image_url": IMAGE_URL}
    | dict.fromkeys(["detail", "file_id", "transformations"], st.just("auto") | JSON),
)
IMAGES = st.lists(st.just(in_base64(ONE)) | JSON, max_size=2) | JSON
TOOL = st.fixed_dictionaries(
    {"name": st.just("f") | JSON},
    optional={"type": st.sampled_from(["custom", "function"]) | JSON, "strict": st.booleans() | JSON}
    | dict.fromkeys(["input_schema", "parameters", "function", "description"], JSON),
)
CHOICE = JSON | st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none", "function"])})
ITEM = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON},
    optional={"content": st.text() | st.lists(BLOCK | IMAGE, max_size=2) | JSON, "type": st.just("message") | JSON}
    | dict.fromkeys(["tool_calls", "tool_name", "tool_call_id", "thinking"], JSON)
    | {"images": IMAGES},
) | st.fixed_dictionaries(
    {"type": st.sampled_from(["function_call", "function_call_output"])},
    optional=dict.fromkeys(["call_id", "name", "arguments"], st.text() | JSON)
    | {"output": st.text() | JSON | st.lists(BLOCK | IMAGE, max_size=2)},
)
ITEMS = st.lists(ITEM, max_size=3) | JSON
FIELDS: dict[str, Any] = {
    **dict.fromkeys(["max_tokens", "temperature", "top_k", "top_p", "max_output_tokens", "top_logprobs"], NUMBERS),
    "tools": st.lists(TOOL, max_size=2) | JSON,
    "tool_choice": CHOICE | st.sampled_from(["auto", "none", "required"]),
    **dict.fromkeys(["system", "thinking", "text", "metadata", "options", "include", "format", "think"], JSON),
    **dict.fromkeys(["stop_sequences", "instructions", "previous_response_id", "keep_alive", "input_file_id"], JSON),
    **dict.fromkeys(["stream", "store", "background", "raw"], st.booleans() | JSON),
    "endpoint": st.just("/v1/completions") | JSON,
    "completion_window": st.just("24h") | JSON,
    "messages": ITEMS,
    "input": ITEMS | st.text(),
    "prompt": st.text() | JSON,
    "images": IMAGES,
}
BODY = st.fixed_dictionaries({}, optional=FIELDS)
USABLE: dict[str, Any] = {
    "/v1/messages": st.fixed_dictionaries(
        {"messages": ITEMS, "max_tokens": st.integers(1, 9)},
        optional={"tools": FIELDS["tools"], "tool_choice": FIELDS["tool_choice"]},
    ),
    "/v1/messages/count_tokens": st.fixed_dictionaries({"messages": ITEMS}),
    "/v1/responses": st.fixed_dictionaries(
        {"input": ITEMS},
        optional={"background": st.booleans(), "tools": FIELDS["tools"], "tool_choice": FIELDS["tool_choice"]},
    ),
    "/api/chat": st.fixed_dictionaries(
        {"messages": ITEMS}, optional={name: FIELDS[name] for name in ("options", "tools", "think")}
    ),
    "/api/generate": st.fixed_dictionaries(
        {"prompt": st.text()}, optional={"options": FIELDS["options"], "images": IMAGES}
    ),
}
ALMOST_GOOD = st.sampled_from(sorted(USABLE)).flatmap(lambda path: st.tuples(st.just(path), USABLE[path]))


def check(path: str, body: bytes) -> None:
    reply = asyncio.run(post(APP, path, body))
    if reply.status == 200:
        return
    assert 400 <= reply.status < 500, (reply.status, reply.body, body)
    if path.startswith("/v1/messages"):
        assert (reply.json["type"], set(reply.json["error"])) == ("error", {"type", "message"})
        assert reply.json["error"]["message"]
    elif path.startswith("/api/"):
        assert isinstance(reply.json["error"], str)
        assert reply.json["error"]
    else:
        assert reply.error["message"]


@pytest.mark.matrix("G-08")
@settings(max_examples=60)
@given(PATHS, st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | JSON.map(json.dumps).map(str.encode))
def test_any_bytes_are_answered_with_an_error_object(path: str, body: bytes):
    check(path, body)


@pytest.mark.matrix("G-08")
@settings(max_examples=200)
@given(st.tuples(PATHS, BODY) | ALMOST_GOOD)
def test_any_fields_are_answered_or_refused(request_to: tuple[str, Any]):
    path, body = request_to
    check(path, json.dumps(body).encode())
