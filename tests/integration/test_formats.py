"""The formats whose marks are special tokens, through the whole system, with a scripted model."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from tests.integration.tool_script import Script
from tests.support.scripted import NAME, ScriptedWorker, scripted_system, write_scripted_model
from tests.unit.gateway.format_templates import TEMPLATES
from tests.unit.gateway.outputs import tool

TOOLS: Any = [tool("get_weather", city="string")]
ASK: Any = [{"role": "user", "content": "Weather in Rome?"}]
ROME = '{"city":"Rome"}'


@contextlib.asynccontextmanager
async def served(directory: Path, template: str, end: str, *others: str) -> AsyncIterator[tuple[Any, Script]]:
    """A client of a server whose model has the chat template and special tokens of a format."""
    written, script = TEMPLATES[template], Script()
    marks = (*TOOL_FORMATS[written.tool].special_tokens, *others)
    tokenizer = write_scripted_model(directory, written.template, [mark for mark in marks if mark != "<|end|>"])
    worker = ScriptedWorker(tokenizer, script, end=end)
    async with (
        scripted_system(directory, tokenizer, script, worker=worker) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0) as client,
    ):
        yield client, script


async def both(client: Any, **fields: Any) -> dict[str, Any]:
    """The message of a whole answer, which has to be that of a stream."""
    asked: Any = {"model": NAME, "messages": ASK, "tools": TOOLS, "temperature": 0, **fields}
    message = (await client.chat.completions.create(**asked)).choices[0].message.to_dict()
    text = {"content": "", "reasoning": "", "arguments": ""}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta.to_dict()
        for name in ("content", "reasoning"):
            text[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            text["arguments"] += call["function"]["arguments"]
    arguments = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    expected = {"content": message["content"] or "", "reasoning": message.get("reasoning", ""), "arguments": arguments}
    assert text == expected
    return message


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>"])
async def test_messages_of_gpt_oss_are_reasoning_calls_and_text(tmp_path: Path, end: str) -> None:
    async with served(tmp_path, "gpt-oss", end) as (client, script):
        script.says = (
            "<|channel|>analysis<|message|>Hm. Rome.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{ROME}"
        )
        message = await both(client)
        assert (message["content"], message["reasoning"]) == (None, "Hm. Rome.")
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": ROME}

        script.says = (
            "<|channel|>analysis<|message|>Sunny.<|end|><|start|>assistant<|channel|>final<|message|>It is <b>."
        )
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        message = await both(client, messages=[*ASK, message, result])
        assert (message["content"], message["reasoning"], "tool_calls" in message) == ("It is <b>.", "Sunny.", False)
        earlier = "<|channel|>analysis<|message|>Hm. Rome.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
        assert f"{earlier}commentary json<|message|>{json.dumps(json.loads(ROME))}<|call|>" in script.prompts[-1]

        message = await both(client, tools=[], messages=ASK)
        assert (message["content"], message["reasoning"]) == ("It is <b>.", "Sunny.")


async def test_the_ids_of_kimis_calls_are_those_that_it_writes(tmp_path: Path) -> None:
    async with served(tmp_path, "Kimi K2 Thinking", "<|im_end|>", "<|im_end|>") as (client, script):
        call = f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ROME}<|tool_call_end|>"
        script.says = f"<think>Hm.</think>One moment.<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
        message = await both(client)
        assert (message["content"], message["reasoning"]) == ("One moment.", "Hm.")
        assert [one["id"] for one in message["tool_calls"]] == ["functions.get_weather:0"]
        result = {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "sunny"}
        message = await both(client, messages=[*ASK, message, result])
        assert [one["id"] for one in message["tool_calls"]] == ["functions.get_weather:1"]
        assert "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{" in script.prompts[-1]


async def test_strings_of_gemma_are_marked_by_a_token(tmp_path: Path) -> None:
    async with served(tmp_path, "Gemma 4", "<turn|>", "<turn|>", "<|channel>", "<channel|>") as (client, script):
        script.says = '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
        message = await both(client)
        assert message["reasoning"] == "Hm."
        assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"city": "Rome"}']
