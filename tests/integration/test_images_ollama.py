"""Images in Ollama's API. The backend is scripted: see `edge`."""

from typing import Any

import pytest

from tests.integration.edge import ScriptedBackend, call, serving
from tests.integration.seen_images import ONE, TWO, data_url, eye, in_base64, seen


async def test_messages_and_prompts_of_ollamas_api_have_images():
    backend = eye()
    images = [in_base64(ONE), in_base64(TWO)]
    async with serving(backend) as port:
        messages: Any = [
            {"role": "user", "content": "Look", "images": images},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "tool_name": "f", "content": "here", "images": images[:1]},
            {"role": "user", "images": images[1:]},
        ]
        reply = await call(port, "POST", "/api/chat", {"model": "org/toy", "messages": messages, "stream": False})
        assert reply.json["message"]["content"] == "Good day"
        assert seen(backend.requests[0]) == [
            ("user", [ONE, TWO, "Look"]),
            ("assistant", ""),
            ("tool", [ONE, "here"]),
            ("user", [TWO]),
        ]
        asked: Any = {"model": "org/toy", "prompt": "What?", "system": "Be brief.", "images": images, "stream": False}
        assert (await call(port, "POST", "/api/generate", asked)).json["response"] == "Good day"
        assert seen(backend.requests[1]) == [("system", "Be brief."), ("user", [ONE, TWO, "What?"])]
        alone = {"model": "org/toy", "images": images, "stream": False}
        assert (await call(port, "POST", "/api/generate", alone)).json["response"] == "Good day"
        assert seen(backend.requests[2]) == [("user", [ONE, TWO])]
        shown = (await call(port, "POST", "/api/show", {"model": "org/toy"})).json
        assert shown["capabilities"] == ["completion", "vision"]


@pytest.mark.parametrize(
    ("path", "change", "told"),
    [
        ("chat", {"messages": [{"role": "user", "images": ["eA==", "%%"]}]}, "'messages[0].images[1]' has no image"),
        ("chat", {"messages": [{"role": "user", "images": [data_url(ONE)]}]}, "the file in base64 alone"),
        ("chat", {"messages": [{"role": "user", "images": [5]}]}, "messages[0].images[0]"),
        ("chat", {"messages": [{"role": "system", "images": ["eA=="]}]}, "'messages[0].images' is a field of messages"),
        ("chat", {"messages": [{"role": "user"}], "images": ["eA=="]}, "in its field 'images'"),
        ("generate", {"prompt": "x", "images": [""]}, "'images[0]' has no bytes"),
        ("generate", {"prompt": "x", "images": ["eA=="], "raw": True}, "'images' with 'raw' is not supported"),
    ],
)
async def test_what_is_no_image_of_ollamas_api_is_refused_by_its_name(path: str, change: Any, told: str):
    async with serving(eye()) as port:
        reply = await call(port, "POST", f"/api/{path}", {"model": "org/toy", **change})
    assert reply.status == 400
    assert told in reply.json["error"]


async def test_images_of_ollamas_api_are_refused_where_no_model_takes_them():
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/api/generate", {"model": "org/toy", "prompt": "x", "images": ["eA=="]})
        assert reply.status == 400
        assert "'images[0]': Images are taken only by a server that was started with" in reply.json["error"]
