"""Requests with images count towards the limits of their API key, also those that only count tokens.

The backend is scripted: see `edge`. It fetches nothing by itself, so all URLs that it saw are those that it was given.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.path.generation import GenerationRequest
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import Reply, ScriptedBackend, call, serving, text_batches
from tests.integration.seen_images import EYE, ONE, TWO, URL, eye, in_base64

KEYS = """
[[keys]]
name = "slow"
key = "sk-slow"
requests-per-minute = 1
tokens-per-minute = 1000

[[keys]]
name = "narrow"
key = "sk-narrow"
concurrent-requests = 1
"""
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
_CHAT_PARTS: Any = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "What?"}]
_CHAT_MESSAGES: Any = [{"role": "user", "content": _CHAT_PARTS}]
_ANTHROPIC_PARTS: Any = [{"type": "image", "source": {"type": "url", "url": URL}}]
_INPUT: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
ANTHROPIC: Any = {"model": EYE.name, "messages": [{"role": "user", "content": _ANTHROPIC_PARTS}]}
BODIES: dict[str, Any] = {
    CHAT: {"messages": _CHAT_MESSAGES, "max_tokens": 9},
    "/generate": {"messages": _CHAT_MESSAGES},
    "/tokenize": {"messages": _CHAT_MESSAGES},
    MESSAGES: {**ANTHROPIC, "max_tokens": 9},
    COUNT: ANTHROPIC,
    RESPONSES: {"input": _INPUT, "max_output_tokens": 9},
    "/api/chat": {
        "model": EYE.name,
        "stream": False,
        "messages": [{"role": "user", "content": "What?", "images": [in_base64(ONE)]}],
    },
}
COUNTING = ("/tokenize", COUNT)
DAMAGED = ServiceError("invalid_value", "The image is damaged.", param="messages")


class TokenizingBackend(ScriptedBackend):
    """Counts tokens when the test lets it."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__([EYE], remote={URL: TWO})
        self.num_tokens = num_tokens
        self.may_end = asyncio.Event()
        self.began = asyncio.Event()

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        self.requests.append(request)
        self.began.set()
        await self.may_end.wait()
        return [([1] * self.num_tokens, [])]


@contextlib.asynccontextmanager
async def limited(backend: ScriptedBackend) -> AsyncIterator[int]:
    async with serving(backend, keys=ApiKeys("", keys_of_text(KEYS, is_json=False, source=""))) as port:
        yield port


async def ask(port: int, path: str, key: str, **fields: Any) -> Reply:
    return await call(port, "POST", path, {**BODIES[path], **fields}, {"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_fetched_for_a_request_beyond_the_limits(path: str):
    backend = eye()
    async with limited(backend) as port:
        first = await ask(port, path, "sk-slow")
        assert first.status == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert backend.fetched == ([URL] if path == RESPONSES else [])
        backend.requests.clear()
        backend.fetched.clear()
        refused = await ask(port, path, "sk-slow")
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "1 requests per minute" in refused.body.decode()
        # The backend fetches the images of the requests that it gets.
        assert (backend.requests, backend.fetched) == ([], [])


@pytest.mark.parametrize("path", COUNTING)
async def test_counting_takes_a_place_and_the_tokens_of_the_prompt(path: str):
    backend = TokenizingBackend(2500)
    async with limited(backend) as port:
        first = asyncio.create_task(ask(port, path, "sk-narrow"))
        await backend.began.wait()
        assert (await ask(port, path, "sk-narrow")).status == 429
        backend.may_end.set()
        assert (await first).status == 200
        assert (await ask(port, path, "sk-narrow")).status == 200
        assert (await ask(port, path, "sk-slow")).status == 200
        refused = await ask(port, path, "sk-slow")
        # 1500 tokens more than a minute's quota: the next request waits longer for tokens than for a request.
        assert (refused.status, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        assert "1000 tokens per minute" in refused.body.decode()


@pytest.mark.parametrize("path", COUNTING)
async def test_counting_a_conversation_without_images_is_a_request_without_tokens(path: str):
    messages = [{"role": "user", "content": "What?"}]
    async with limited(eye()) as port:
        reply = await ask(port, path, "sk-slow", messages=messages)
        assert reply.status == 200
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        assert reply.headers["x-ratelimit-remaining-tokens"] == "1000"
        assert (await ask(port, path, "sk-slow", messages=messages)).status == 429


async def test_counting_that_fails_gives_its_place_back():
    class Failing(TokenizingBackend):
        async def tokenize(
            self, request: GenerationRequest, *, return_tokens: bool
        ) -> list[tuple[list[int], list[str]]]:
            raise DAMAGED

    async with limited(Failing(0)) as port:
        for _ in range(2):
            assert (await ask(port, "/tokenize", "sk-narrow")).status == 400


@pytest.mark.parametrize("end", [[*text_batches("Good ", "day"), None], [DAMAGED, None]])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_a_response_with_a_url_takes_one_place_and_gives_it_back(fields: Any, end: Any):
    backend = eye(manual=True)
    async with limited(backend) as port:
        running = asyncio.create_task(ask(port, RESPONSES, "sk-narrow", **fields))
        generation = await backend.generations.get()
        assert generation.request.inputs.images[0].file == TWO
        assert (await ask(port, RESPONSES, "sk-narrow", **fields)).status == 429
        generation.put(*end)
        await running
        async with asyncio.timeout(60):
            # In the background, a response ends after its answer.
            while not await _is_admitted(backend, asyncio.create_task(ask(port, CHAT, "sk-narrow"))):
                await asyncio.sleep(0.01)


async def _is_admitted(backend: ScriptedBackend, asked: "asyncio.Task[Reply]") -> bool:
    """Whether a request was admitted. If so, it is answered."""
    admitted = asyncio.create_task(backend.generations.get())
    await asyncio.wait([admitted, asked], return_when=asyncio.FIRST_COMPLETED)
    if admitted.done():
        admitted.result().put(*text_batches("Good ", "day"), None)
    else:
        admitted.cancel()
    return (await asked).status == 200


@pytest.mark.parametrize(
    ("remote", "fields", "headers", "status"),
    [
        ({}, {}, {}, 500),
        ({URL: TWO}, {}, {"x-request-timeout": "never"}, 400),
        ({URL: TWO}, {"stream": True}, {"x-request-timeout": "never"}, 400),
    ],
)
async def test_a_response_that_fails_before_it_runs_gives_its_place_back(
    remote: Any, fields: Any, headers: Any, status: int
):
    backend = ScriptedBackend([EYE], remote=remote)
    async with limited(backend) as port:
        body = {**BODIES[RESPONSES], **fields}
        for _ in range(2):
            reply = await call(port, "POST", RESPONSES, body, {"authorization": "Bearer sk-narrow", **headers})
            assert reply.status == status
