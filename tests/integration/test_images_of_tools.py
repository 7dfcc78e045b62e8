"""Images that agents' tools have read, and the detail that they ask for. The backend is scripted: see `edge`."""

from typing import Any

import pytest

from antiphon.services.gateway.apis.openai.bodies.image_parts import UNSEEN
from tests.integration.edge import ScriptedBackend, call, serving
from tests.integration.seen_images import ONE, data_url, eye, in_base64, seen

ASK = {"role": "user", "content": "Look."}
IN_CHAT: Any = {"type": "image_url", "image_url": {"url": data_url(ONE), "detail": "high"}}
IN_RESPONSES: Any = {"type": "input_image", "image_url": data_url(ONE), "detail": "high"}
IN_MESSAGES: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": in_base64(ONE)},
}
HERE: Any = {"type": "text", "text": "Here"}
FUNCTION = {"name": "look", "arguments": "{}"}
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}]},
                {"role": "tool", "tool_call_id": "a", "content": [HERE, IN_CHAT]},
            ]
        },
        "messages[].content[].image_url",
    ),
    "/v1/responses": (
        {
            "input": [
                ASK,
                {"type": "function_call", "call_id": "a", **FUNCTION},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_text", "text": "Here"}, IN_RESPONSES],
                },
            ]
        },
        "input[].output[].image_url",
    ),
    "/v1/messages": (
        {
            "max_tokens": 9,
            "messages": [
                ASK,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "Here"}, IN_MESSAGES],
                        }
                    ],
                },
            ],
        },
        "messages[].content[].content[].source.data",
    ),
}


@pytest.mark.parametrize("path", RESULTS)
async def test_a_model_that_sees_nothing_is_told_of_images_that_a_tool_has_returned(path: str) -> None:
    body, name = RESULTS[path]
    backend = ScriptedBackend()
    async with serving(backend) as port:
        reply = await call(port, "POST", path, {"model": "org/toy", **body})
    assert reply.status == 200, reply.body
    assert name in reply.headers["x-antiphon-ignored"].split(", ")
    *_, (role, text) = seen(backend.requests[0])
    assert (role, text) == ("tool", f"Here\n{UNSEEN}")


@pytest.mark.parametrize("path", RESULTS)
async def test_a_model_that_sees_gets_them_in_its_own_size(path: str) -> None:
    body, name = RESULTS[path]
    backend = eye()
    async with serving(backend) as port:
        reply = await call(port, "POST", path, {"model": "org/toy", **body})
    assert reply.status == 200, reply.body
    told = {"/v1/chat/completions": f"{name}.detail", "/v1/responses": "input[].output[].detail"}
    assert reply.headers.get("x-antiphon-ignored") == told.get(path)
    *_, (role, content) = seen(backend.requests[0])
    assert (role, content) == ("tool", ["Here", ONE])
