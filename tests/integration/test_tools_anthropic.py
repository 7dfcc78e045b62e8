"""Calls of tools in Anthropic's API, with the official client and a scripted model behind the whole system."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.integration.edge import CARD, ScriptedBackend, call, serving
from tests.integration.tool_script import CALL, ROME, TEXT_AND_CALLS, Script, calling_system
from tests.support.scripted import NAME

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}
ASK: Any = [{"role": "user", "content": "Weather in Rome?"}]


@dataclass
class System:
    port: int
    script: Script
    client: anthropic.AsyncAnthropic

    async def whole(self, **fields: Any) -> anthropic.types.Message:
        return await self.client.messages.create(**self._asked(fields))

    async def streamed(self, **fields: Any) -> anthropic.types.Message:
        """What the client itself makes of a stream."""
        async with self.client.messages.stream(**self._asked(fields)) as stream:
            return await stream.get_final_message()

    async def raw(self, path: str = "/v1/messages", **fields: Any) -> Any:
        return await call(self.port, "POST", path, self._asked(fields))

    def _asked(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": NAME, "max_tokens": 600, "messages": ASK, "tools": [WEATHER], **fields}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    # The client builds its types at their first use, during which the engine's heartbeats are late.
    async with (
        calling_system(tmp_path) as (port, script),
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="EMPTY", max_retries=5) as client,
    ):
        yield System(port, script, client)


def calls(message: anthropic.types.Message) -> list[anthropic.types.ToolUseBlock]:
    return [block for block in message.content if block.type == "tool_use"]


async def test_the_tool_runner_sends_the_whole_conversation(system: System) -> None:
    """Its conversation is a thread, which the server does not keep: without an error it would send only the results."""

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        system.script.says = "It is sunny."
        return f"sunny in {city}"

    system.script.says = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    asked: Any = {"model": NAME, "max_tokens": 600}
    runner = system.client.beta.messages.tool_runner(**asked, messages=ASK, tools=[get_weather])
    assert [one.stop_reason async for one in runner] == ["tool_use", "end_turn"]
    assert "Weather in Rome?" in system.script.prompts[-1]
    with pytest.raises(anthropic.BadRequestError, match="Send the whole conversation"):
        await system.client.beta.messages.thread(**asked).send(ASK[0])


async def test_a_tool_is_called_and_its_result_is_sent_back(system: System) -> None:
    system.script.says = CALL
    message = await system.whole()
    assert message.stop_reason == "tool_use"
    [made] = calls(message)
    assert [block.type for block in message.content] == ["tool_use"]
    assert (made.name, made.input) == ("get_weather", json.loads(ROME))
    assert made.id.startswith("toolu_")
    told = {"name": "get_weather", "description": WEATHER["description"], "parameters": SCHEMA}
    assert json.dumps({"type": "function", "function": told}) in system.script.prompts[0]

    system.script.says = "It is sunny."
    result: Any = {"type": "tool_result", "tool_use_id": made.id, "content": [{"type": "text", "text": "sunny"}]}
    failed: Any = {"type": "tool_result", "tool_use_id": made.id, "content": "no network", "is_error": True}
    history: Any = [*ASK, {"role": "assistant", "content": message.content}]
    answer = await system.whole(messages=[*history, {"role": "user", "content": [result]}])
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "It is sunny."}]
    assert answer.stop_reason == "end_turn"
    written = f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(json.loads(ROME), ensure_ascii=False)}}}'
    assert f"<|assistant|>{written}</tool_call><|tool|>sunny({made.id})<|assistant|>" in system.script.prompts[-1]
    text: Any = {"type": "text", "text": "And now?"}
    await system.whole(messages=[*history, {"role": "user", "content": [failed, text]}])
    assert f"<|tool|>Error: no network({made.id})<|user|>And now?<|assistant|>" in system.script.prompts[-1]


async def test_a_stream_gives_the_same_blocks_in_pieces(system: System) -> None:
    system.script.says = TEXT_AND_CALLS
    whole = await system.whole()
    streamed = await system.streamed()
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert (
        [block.input for block in calls(streamed)] == [block.input for block in calls(whole)] == [json.loads(ROME)] * 2
    )
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert len({block.id for block in [*calls(whole), *calls(streamed)]}) == 4
    events = [
        json.loads(line[6:])
        for line in (await system.raw(stream=True)).body.decode().split("\n")
        if line[:6] == "data: "
    ]
    blocks = [event for event in events if event["type"].startswith("content_block")]
    starts = [event for event in blocks if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert starts[1]["content_block"] == {**starts[1]["content_block"], "type": "tool_use", "input": {}}
    for index, kind in enumerate(["text_delta", "input_json_delta", "input_json_delta"]):
        own = [event for event in blocks if event["index"] == index]
        assert [event["type"] for event in (own[0], own[-1])] == ["content_block_start", "content_block_stop"]
        assert {event["delta"]["type"] for event in own[1:-1]} == {kind}
    assert (
        "".join(event["delta"]["partial_json"] for event in blocks if event["index"] == 1 and "delta" in event) == ROME
    )


@pytest.mark.parametrize(
    ("choice", "says", "names"),
    [
        ({"type": "auto"}, CALL + CALL, ["get_weather"] * 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL + CALL, ["get_weather"]),
        ({"type": "any"}, CALL, ["get_weather"]),
        ({"type": "tool", "name": "get_weather"}, CALL, ["get_weather"]),
    ],
)
async def test_the_choice_decides_whether_a_tool_is_called(
    system: System, choice: Any, says: str, names: list[str]
) -> None:
    system.script.says = says
    for ask in (system.whole, system.streamed):
        message = await ask(tool_choice=choice)
        assert [(one.name, one.input) for one in calls(message)] == [(name, json.loads(ROME)) for name in names]
        assert message.stop_reason == "tool_use"


async def test_without_a_choice_among_tools_the_model_is_not_told_of_them(system: System) -> None:
    system.script.says = "Hello."
    message = await system.whole(tool_choice={"type": "none"})
    assert message.stop_reason == "end_turn"
    assert "Tools:" not in system.script.prompts[-1]


async def test_reasoning_is_not_part_of_the_answer_and_may_be_sent_back(system: System) -> None:
    system.script.says = f"<think>I need it.</think>{CALL}"
    message = await system.whole()
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.usage.output_tokens > len(CALL)
    thinking: Any = {"type": "thinking", "thinking": "Hm.", "signature": "abc"}
    system.script.says = "<think>Well.</think>Sunny."
    history: Any = [*ASK, {"role": "assistant", "content": [thinking, {"type": "text", "text": "Yes."}]}, *ASK]
    for ask in (system.whole, system.streamed):
        answer = await ask(messages=history, tools=[])
        assert [block.to_dict()["text"] for block in answer.content] == ["Sunny."]
    assert "<|assistant|><think>Hm.</think>Yes.<|user|>" in system.script.prompts[-1]


async def test_what_is_no_json_object_is_passed_on_as_text(system: System) -> None:
    system.script.says = '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'
    message = await system.whole()
    assert ([one.input for one in calls(message)], message.stop_reason) == ([{"INVALID_JSON": "[1]"}], "tool_use")
    system.script.says = CALL
    cut = await system.whole(max_tokens=60)
    [made] = calls(cut)
    assert cut.stop_reason == "max_tokens"
    assert ROME.startswith(str(made.input["INVALID_JSON"]))


async def test_tokens_of_tools_are_counted(system: System) -> None:
    system.script.says = "Hello."
    message = await system.whole()
    counted = await system.client.messages.count_tokens(model=NAME, messages=ASK, tools=[WEATHER])
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    bare = await system.client.messages.count_tokens(
        model=NAME, messages=ASK, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert bare.input_tokens < counted.input_tokens


async def test_the_schema_of_a_strict_tool_is_named_as_this_api_names_it(system: System) -> None:
    strict = {
        **WEATHER,
        "name": "f",
        "strict": True,
        "input_schema": {"type": "object", "properties": {"x": {"type": "y"}}},
    }
    reply = await system.raw(tools=[WEATHER, strict])
    assert reply.status == 400
    assert "'tools[1].input_schema' cannot be used" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [{"input_schema": {}}]}, "Missing required parameter: 'tools[0].name'"),
        ({"tools": [{"name": "?", "input_schema": {}}]}, "'tools[0].name' must be 1 to 64 characters"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "'tools[0].input_schema' must be an object"),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": 1}]}, "'tools[0].strict' must be true or false"),
        ({"tools": [{"name": "f", "input_schema": {}, "x": 1}]}, "'tools[0]' has an unknown field 'x'"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "'tool_choice' needs 'tools'"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "names a function that is not in 'tools'"),
        ({"tool_choice": {"type": "must"}}, "'tool_choice.type' must be 'auto'"),
        ({"tool_choice": {}}, "'tool_choice.type'"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "'tool_choice.name' needs the type 'tool'"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "must be true or false"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "Content of type 'tool_use'"),
        ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, *ASK]},
         "'messages[1].content[0].id'"),
        ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f",
                                                                "input": "{}"}]}, *ASK]},
         "'messages[1].content[0].input' must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "'messages[0].content[0].tool_use_id'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]},
         "'messages[0].content[0].content' must be"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": 1}]}]},
         "'messages[0].content[0].is_error' must be"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                     "content": [{"type": "image"}]}]}]},
         "'messages[0].content[0].content[0].source'"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    backend = ScriptedBackend([replace(CARD, tool_format="hermes")])
    async with serving(backend, unknown_parameters="refuse") as port:
        body = {"model": CARD.name, "max_tokens": 9, "messages": ASK, "tools": [WEATHER], **change}
        reply = await call(port, "POST", "/v1/messages", body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert told in reply.json["error"]["message"]
    assert not backend.requests


async def test_a_model_whose_format_of_calls_is_unknown_refuses_tools(tmp_path: Path) -> None:
    async with calling_system(tmp_path, enable_auto_tool_choice=False) as (port, _):
        body = {"model": NAME, "max_tokens": 9, "messages": ASK, "tools": [WEATHER]}
        reply = await call(port, "POST", "/v1/messages", body)
    assert reply.status == 400
    assert "'tool_choice' cannot be 'auto'" in reply.json["error"]["message"]
