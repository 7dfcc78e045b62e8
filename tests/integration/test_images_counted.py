"""Images at `/tokenize`, and in conversations of `/generate`. The backend is scripted: see `edge`."""

from typing import Any

from tests.integration.edge import ScriptedBackend, call, serving
from tests.integration.seen_images import ONE, TWO, URL, data_url, eye, seen


def words(text: str) -> Any:
    return {"type": "text", "text": text}


def chat_part(file: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


async def test_tokens_are_counted_with_images():
    backend = eye()
    content = [chat_part(ONE), words("What?"), {"type": "image_url", "image_url": URL}]
    asked = {"messages": [{"role": "user", "content": content}]}
    async with serving(backend, limit_mm_per_prompt="image=2") as port:
        assert (await call(port, "POST", "/tokenize", asked)).status == 200
        assert seen(backend.requests[0]) == [("user", [ONE, "What?", URL])]
        content.append(chat_part(TWO))
        many = await call(port, "POST", "/tokenize", asked)
        assert (many.status, many.error["param"]) == (400, "messages[0].content[3].image_url")
    async with serving(ScriptedBackend()) as port:
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = await call(port, "POST", path, asked)
            assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].type")


async def test_a_conversation_of_generate_may_have_images_but_not_several():
    backend = eye()
    one = [{"role": "user", "content": [words("What?"), chat_part(ONE)]}]
    async with serving(backend) as port:
        for messages in (one, [one]):
            assert (await call(port, "POST", "/generate", {"messages": messages})).status == 200
            assert seen(backend.requests[-1]) == [("user", ["What?", ONE])]
        refused = await call(port, "POST", "/generate", {"messages": [[{"role": "user", "content": "x"}], one]})
        assert refused.status == 400
        assert "'messages[1][0].content[1].image_url'" in str(refused.json)
