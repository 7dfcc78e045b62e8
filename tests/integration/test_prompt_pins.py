"""How long prompts are kept, as the official clients of Anthropic and OpenAI ask for it, against the HTTP edge."""

from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from antiphon.services.gateway.path.generation import ModelCard
from tests.integration.edge import CARD, ScriptedBackend, call, serving

KEEPS = replace(CARD, kept_block_size=16)
HELLO: Any = {"model": "org/toy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello?"}]}
TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}
IGNORED = "x-antiphon-ignored"


def text(cache_control: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "Be brief.", "cache_control": cache_control}]


def result(cache_control: Any) -> list[dict[str, Any]]:
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": text(cache_control)}
    return [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [block]},
    ]


FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
MARKED: list[tuple[dict[str, Any], float]] = [
    ({}, 0),
    ({"cache_control": FIVE}, 300),
    ({"system": text({"type": "ephemeral", "ttl": "5m"})}, 300),
    ({"system": text(FIVE), "messages": [{"role": "user", "content": text(HOUR)}]}, 3600),
    ({"tools": [{**TOOL, "cache_control": HOUR}], "tool_choice": {"type": "none"}}, 3600),
    ({"messages": result(HOUR)}, 3600),
]


async def ask_anthropic(card: ModelCard, **fields: Any) -> tuple[float, str | None]:
    """Returns how long the prompt is kept, and what the client was told to have no effect."""
    backend = ScriptedBackend(cards=[card])
    async with (
        serving(backend) as port,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="EMPTY", max_retries=0) as api,
    ):
        raw = await api.messages.with_raw_response.create(**{**HELLO, **fields})
        message = await raw.parse()
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == 3
    return backend.requests[0].kv_keep_s, raw.headers.get(IGNORED)


@pytest.mark.parametrize(("fields", "seconds"), MARKED)
async def test_marks_of_anthropic_s_api_keep_the_prompt_as_long_as_the_longest_asks(
    fields: dict[str, Any], seconds: float
) -> None:
    assert await ask_anthropic(KEEPS, **fields) == (seconds, None)


async def test_marks_are_told_where_nothing_keeps_the_prompt() -> None:
    assert await ask_anthropic(CARD, cache_control=FIVE) == (0, "cache_control")
    assert await ask_anthropic(CARD, system=text(HOUR)) == (0, "system[].cache_control")
    # Forms that this server does not know.
    assert await ask_anthropic(KEEPS, cache_control={"type": "eternal"}) == (0, "cache_control")
    assert await ask_anthropic(KEEPS, system=text({"type": "ephemeral", "ttl": ["1h"]})) == (
        0,
        "system[].cache_control",
    )
    assert await ask_anthropic(KEEPS, system=text("ephemeral")) == (0, "system[].cache_control")


@pytest.mark.parametrize(
    ("marked", "num_prompt_tokens", "created"), [(True, 1000, 992), (False, 1000, 0), (True, 200, 0)]
)
async def test_usage_tells_how_much_of_a_prompt_is_kept(marked: bool, num_prompt_tokens: int, created: int) -> None:
    backend = ScriptedBackend(cards=[KEEPS], num_prompt_tokens=num_prompt_tokens)
    async with (
        serving(backend) as port,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="EMPTY", max_retries=0) as api,
    ):
        fields: Any = {**HELLO, "cache_control": FIVE} if marked else HELLO
        message = await api.messages.create(**fields)
    usage = message.usage
    assert usage.cache_creation_input_tokens == created
    assert usage.input_tokens + created + (usage.cache_read_input_tokens or 0) == num_prompt_tokens


async def ask_openai(card: ModelCard, retention: Any) -> list[tuple[float, str | None]]:
    """The same of chat, completions and responses."""
    backend = ScriptedBackend(cards=[card])
    async with (
        serving(backend) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0) as api,
    ):
        asked: dict[str, Any] = {"model": "org/toy", "extra_body": {"prompt_cache_retention": retention}}
        told = [
            await api.chat.completions.with_raw_response.create(messages=HELLO["messages"], **asked),
            await api.completions.with_raw_response.create(prompt="Hello?", **asked),
            await api.responses.with_raw_response.create(input="Hello?", **asked),
        ]
        response = told[2].parse()
        assert getattr(response, "prompt_cache_retention", None) == retention
    return [(request.kv_keep_s, raw.headers.get(IGNORED)) for request, raw in zip(backend.requests, told, strict=True)]


async def test_the_retention_of_openai_s_apis() -> None:
    assert await ask_openai(KEEPS, "24h") == [(86_400, None)] * 3
    assert await ask_openai(CARD, "in_memory") == [(0, None)] * 3
    assert await ask_openai(CARD, "24h") == [(0, "prompt_cache_retention")] * 3
    assert await ask_openai(KEEPS, "forever") == [(0, "prompt_cache_retention")] * 3


async def test_a_mark_that_is_no_object_is_refused_by_name() -> None:
    async with serving(ScriptedBackend(cards=[KEEPS])) as port:
        answer = await call(port, "POST", "/v1/messages", {**HELLO, "cache_control": "5m"})
    assert answer.status == 400
    assert "cache_control" in answer.json["error"]["message"]
