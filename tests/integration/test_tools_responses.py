"""Calls of functions in the Responses API, with the official client and a scripted model behind the whole system."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.edge import call
from tests.integration.tool_script import CALL, ROME, TEXT_AND_CALLS, Script, calling_system
from tests.support.scripted import NAME

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}
OTHER: Any = {"type": "function", "name": "other", "strict": False}
ASK = "Weather in Rome?"
WRITTEN = f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(json.loads(ROME), ensure_ascii=False)}}}'
EVENTS_OF_A_CALL = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@dataclass
class System:
    port: int
    script: Script
    client: openai.AsyncOpenAI

    async def create(self, **fields: Any) -> Any:
        return await self.client.responses.create(**self._asked(fields))

    async def streamed(self, **fields: Any) -> tuple[list[Any], Any]:
        """The events of a stream, and what the client makes of them."""
        async with self.client.responses.stream(**self._asked(fields)) as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    def _asked(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": NAME, "input": ASK, "tools": [WEATHER], **fields}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    # The client builds its types at their first use, during which the engine's heartbeats are late.
    async with (
        calling_system(tmp_path) as (port, script),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=5) as client,
    ):
        yield System(port, script, client)


def calls(response: Any) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


async def test_a_function_is_called_and_its_output_is_sent_back_by_hand(system: System) -> None:
    system.script.says = CALL
    response = await system.create(store=False)
    assert (response.status, response.output_text) == ("completed", "")
    [made] = response.output
    assert (made.type, made.status, made.name, made.arguments) == ("function_call", "completed", "get_weather", ROME)
    assert made.id.startswith("fc_")
    assert made.call_id.startswith("call_")
    assert [tool.to_dict() for tool in response.tools] == [{**WEATHER, "strict": False}]
    told = {"name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}
    assert json.dumps({"type": "function", "function": told}) in system.script.prompts[0]

    system.script.says = "It is sunny."
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny"}
    history = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": "Let me see."},
        made.to_dict(),
        output,
    ]
    answer = await system.create(input=history)
    assert answer.output_text == "It is sunny."
    expected = f"<|assistant|>Let me see.{WRITTEN}</tool_call><|tool|>sunny({made.call_id})<|assistant|>"
    assert expected in system.script.prompts[-1]
    items = [item async for item in await system.client.responses.input_items.list(answer.id, order="asc")]
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert (items[2].arguments, items[3].output, items[3].call_id) == (ROME, "sunny", made.call_id)  # type: ignore[union-attr]


async def test_a_stored_response_is_continued_with_the_output_of_its_calls(system: System) -> None:
    system.script.says = TEXT_AND_CALLS
    response = await system.create()
    assert (response.output_text, calls(response)) == ("Let me see.", [("get_weather", ROME)] * 2)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": [{"type": "input_text", "text": text}]}
        for item, text in zip(response.output[1:], ("sunny", "hot"), strict=True)
    ]
    system.script.says = "Sunny and hot."
    answer = await system.create(previous_response_id=response.id, input=outputs)
    assert answer.output_text == "Sunny and hot."
    said = f"<|assistant|>Let me see.{WRITTEN}</tool_call>{WRITTEN}</tool_call><|tool|>sunny"
    assert said in system.script.prompts[-1]
    assert (await system.client.responses.retrieve(response.id)).output == response.output


async def test_a_stream_gives_the_same_items_in_pieces(system: System) -> None:
    system.script.says = TEXT_AND_CALLS
    whole = await system.create()
    events, final = await system.streamed()
    assert calls(final) == calls(whole) == [("get_weather", ROME)] * 2
    assert final.output_text == whole.output_text == "Let me see."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for index in (1, 2):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type for event in own]
        assert list(dict.fromkeys(kinds)) == EVENTS_OF_A_CALL
        assert (own[0].item.arguments, own[0].item.status) == ("", "in_progress")
        assert "".join(event.delta for event in own if event.type.endswith("arguments.delta")) == ROME
        done, item = own[-2], own[-1].item
        assert (done.arguments, done.item_id) == (item.arguments, item.id) == (ROME, own[0].item.id)
        assert (item.call_id, item.status) == (final.output[index].call_id, "completed")
    raw = await system.create(stream=True)
    last = [event async for event in raw][-1]
    assert [item.type for item in last.response.output] == ["message", "function_call", "function_call"]


async def test_a_background_response_shows_the_call_so_far(system: System) -> None:
    system.script.says = CALL
    response = await system.create(background=True)
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        response = await system.client.responses.retrieve(response.id)
    assert calls(response) == [("get_weather", ROME)]
    stream = await system.client.responses.retrieve(response.id, stream=True)
    assert {event.type async for event in stream} >= set(EVENTS_OF_A_CALL)


@pytest.mark.parametrize(
    ("fields", "says", "names"),
    [
        ({"tool_choice": "auto"}, CALL + CALL, ["get_weather"] * 2),
        ({"parallel_tool_calls": False}, CALL + CALL, ["get_weather"]),
        ({"tool_choice": "required"}, CALL, ["get_weather"]),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, CALL, ["get_weather"]),
        ({"tool_choice": "none"}, "Hello.", []),
    ],
)
async def test_the_choice_decides_whether_a_function_is_called(
    system: System, fields: Any, says: str, names: list[str]
) -> None:
    system.script.says = says
    response = await system.create(**fields)
    _, final = await system.streamed(**fields)
    assert calls(final) == calls(response) == [(name, ROME) for name in names]
    choice = response.tool_choice if isinstance(response.tool_choice, str) else response.tool_choice.to_dict()
    assert choice == fields.get("tool_choice", "auto")
    assert response.parallel_tool_calls is fields.get("parallel_tool_calls", True)
    assert ("Tools:" in system.script.prompts[-1]) is bool(names)


async def test_the_model_is_told_of_allowed_tools_only(system: System) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    system.script.says = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    response = await system.create(tools=[WEATHER, OTHER], tool_choice=choice)
    assert (calls(response), response.tool_choice.to_dict()) == ([("other", "{}")], choice)
    assert "get_weather" not in system.script.prompts[-1]
    assert [tool.name for tool in response.tools] == ["get_weather", "other"]
    required = await system.create(tools=[WEATHER, OTHER], tool_choice={**choice, "mode": "required"})
    assert calls(required) == [("other", "{}")]
    for wrong, param in (
        ({"mode": "none"}, "tool_choice.mode"),
        ({"tools": []}, "tool_choice.tools"),
        ({"tools": [{"type": "function", "name": "x"}]}, "tool_choice.tools[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            await system.create(tools=[OTHER], tool_choice={**choice, **wrong})
        assert error.value.param == param


async def test_a_call_that_is_cut_off_is_incomplete_and_no_part_of_the_conversation(system: System) -> None:
    system.script.says = CALL
    response = await system.create(max_output_tokens=60)
    [made] = response.output
    assert (response.status, made.status) == ("incomplete", "incomplete")
    assert ROME.startswith(made.arguments)
    system.script.says = "Hello."
    await system.create(previous_response_id=response.id, input="Again")
    assert "<|assistant|><|user|>Again" in system.script.prompts[-1]
    system.script.says = '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'
    wrong = await system.create()
    assert calls(wrong) == [("get_weather", "[1]")]
    await system.create(previous_response_id=wrong.id, input="Again")
    assert '{"INVALID_JSON": "[1]"}' in system.script.prompts[-1]


async def test_reasoning_is_not_part_of_the_output_but_counted(system: System) -> None:
    system.script.says = f"<think>I need it.</think>{CALL}"
    response = await system.create()
    assert [item.type for item in response.output] == ["function_call"]
    assert response.usage.output_tokens_details.reasoning_tokens > 10
    effort = await system.create(reasoning={"effort": "high"})
    assert effort.reasoning.effort == "high"
    assert system.script.prompts[-1].endswith("<|assistant|>(high)")


async def test_log_probabilities_belong_to_the_text(system: System) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"]}
    system.script.says = TEXT_AND_CALLS
    response = await system.create(**asked)
    assert response.output[0].content[0].logprobs
    system.script.says = CALL
    assert [item.type for item in (await system.create(**asked)).output] == ["function_call"]


async def test_the_schema_of_a_strict_function_is_named_as_this_api_names_it(system: System) -> None:
    broken = {**OTHER, "strict": True, "parameters": {"type": "object", "properties": {"x": {"type": "y"}}}}
    with pytest.raises(openai.BadRequestError) as error:
        await system.create(tools=[WEATHER, broken])
    assert error.value.param == "tools[1].parameters"
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    reply = await call(
        system.port,
        "POST",
        "/v1/responses",
        {"model": NAME, "input": ASK, "tools": [WEATHER, broken], "tool_choice": choice},
    )
    assert (reply.status, reply.error["param"]) == (400, "tools[1].parameters")
