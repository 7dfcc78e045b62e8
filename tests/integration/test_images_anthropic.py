"""Images in Anthropic's API with its official client. The backend is scripted: see `edge`."""

from typing import Any

import pytest

from tests.integration.edge import ScriptedBackend, call, serving
from tests.integration.seen_images import ONE, URL, eye, in_base64, seen
from tests.integration.test_anthropic_client import client as anthropic_client

SENT: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(ONE)}}
NAMED: Any = {"type": "image", "source": {"type": "url", "url": URL}, "cache_control": {"type": "ephemeral"}}


def words(text: str) -> Any:
    return {"type": "text", "text": text}


async def test_messages_of_anthropics_client_have_images():
    backend = eye()
    call_of_tool: Any = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    results: Any = [
        {"type": "tool_result", "tool_use_id": "a", "content": [words("Here"), SENT]},
        {"type": "tool_result", "tool_use_id": "b", "content": [NAMED], "is_error": True},
        words("and"),
        SENT,
    ]
    async with serving(backend) as port, anthropic_client(port) as api:
        messages: Any = [
            {"role": "user", "content": "Look."},
            {"role": "user", "content": [SENT, words("What is"), NAMED, words("this?")]},
            {"role": "assistant", "content": [call_of_tool, {**call_of_tool, "id": "b"}]},
            {"role": "user", "content": results},
        ]
        message = await api.messages.create(model="org/toy", max_tokens=9, messages=messages)
        assert [block.text for block in message.content if block.type == "text"] == ["Good day"]
        conversation = [
            ("user", ["Look.", ONE, "What is", URL, "this?"]),
            ("assistant", ""),
            ("tool", ["Here", ONE]),
            ("tool", ["Error: ", URL]),
            ("user", ["and", ONE]),
        ]
        assert seen(backend.requests[0]) == conversation
        async with api.messages.stream(model="org/toy", max_tokens=9, messages=messages) as stream:
            assert [text async for text in stream.text_stream] == ["Good ", "day"]
        counted = await api.messages.count_tokens(model="org/toy", messages=messages)
        assert counted.input_tokens >= 0
        assert [seen(request) for request in backend.requests[1:]] == [conversation] * 2


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"source": 5}, "source' must be an object"),
        ({"source": {"type": "file", "file_id": "a"}}, "source.type"),
        ({"source": {"type": "base64", "data": "AAAA"}}, "source.media_type"),
        (
            {"source": {"type": "base64", "media_type": "image/bmp", "data": "AAAA"}},
            "source.media_type' must be",
        ),
        ({"source": {"type": "base64", "media_type": "image/png", "data": 5}}, "source.data' must be a string"),
        ({"source": {"type": "base64", "media_type": "image/png", "data": "%%"}}, "source.data' has no image"),
        ({"source": {"type": "base64", "media_type": "image/png", "data": ""}}, "source.data' has no bytes"),
        ({"source": {"type": "url", "url": "file:///etc/passwd"}}, "source.url' must be a data URL"),
        ({"source": {"type": "url", "url": URL, "x": 1}}, "source' has an unknown field 'x'"),
        ({**SENT, "transformations": {"oversize": "crop"}}, "transformations"),
        ({**SENT, "x": 1}, "content[1]' has an unknown field 'x'"),
    ],
)
async def test_what_is_no_image_of_anthropics_api_is_refused_by_its_name(block: Any, told: str):
    body = {"model": "org/toy", "max_tokens": 9, "messages": [{"role": "user", "content": [words("a"), block]}]}
    body["messages"][0]["content"][1] = {"type": "image", **block}  # type: ignore[index]
    async with serving(eye(), unknown_parameters="refuse") as port:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = await call(port, "POST", path, body)
            assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
            assert "'messages[0].content[1]" in reply.json["error"]["message"]
            assert told in reply.json["error"]["message"]


async def test_images_of_anthropics_api_are_refused_where_no_model_takes_them():
    body: Any = {"model": "org/toy", "max_tokens": 9, "messages": [{"role": "user", "content": [SENT]}]}
    async with serving(ScriptedBackend()) as port:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = await call(port, "POST", path, body)
            assert reply.status == 400
            assert "'messages[0].content[0].type'" in reply.json["error"]["message"]
            assert "--enable-mm" in reply.json["error"]["message"]
    async with serving(eye(), limit_mm_per_prompt="image=1") as port:
        body["messages"][0]["content"] = [SENT, NAMED]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = await call(port, "POST", path, body)
            assert reply.status == 400
            assert "at most 1 images" in reply.json["error"]["message"]
