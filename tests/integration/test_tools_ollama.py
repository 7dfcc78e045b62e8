"""Calls of tools in Ollama's API, with a scripted model behind the whole system."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.edge import CARD, Reply, ScriptedBackend, call, serving
from tests.integration.tool_script import CALL, ROME, TEXT_AND_CALLS, Script, calling_system
from tests.support.scripted import NAME

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ASK: Any = [{"role": "user", "content": "Weather in Rome?"}]
WRITTEN = f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(json.loads(ROME), ensure_ascii=False)}}}'


@dataclass
class System:
    port: int
    script: Script

    async def whole(self, path: str = "chat", **fields: Any) -> Any:
        reply = await self._ask(path, {"stream": False, **fields})
        assert reply.status == 200, reply.body
        return reply.json

    async def lines(self, path: str = "chat", **fields: Any) -> list[Any]:
        reply = await self._ask(path, fields)
        return [json.loads(line) for line in reply.body.splitlines()]

    async def _ask(self, path: str, fields: dict[str, Any]) -> Reply:
        body = {"messages": ASK, "tools": [WEATHER]} if path == "chat" else {"prompt": "Weather?"}
        return await call(self.port, "POST", f"/api/{path}", {"model": NAME, **body, **fields})


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with calling_system(tmp_path) as (port, script):
        yield System(port, script)


async def test_a_tool_is_called_and_its_result_is_sent_back(system: System) -> None:
    system.script.says = CALL
    answer = await system.whole()
    message = answer["message"]
    [made] = message["tool_calls"]
    assert (message["role"], message["content"], answer["done_reason"]) == ("assistant", "", "stop")
    assert made["function"] == {"index": 0, "name": "get_weather", "arguments": json.loads(ROME)}
    assert made["id"].startswith("call_")
    assert json.dumps(WEATHER) in system.script.prompts[0]

    system.script.says = "It is sunny."
    by_name = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    by_id = {"role": "tool", "tool_call_id": made["id"], "content": "sunny"}
    for result in (by_name, by_id, {"role": "tool", "content": "sunny"}):
        answer = await system.whole(messages=[*ASK, message, result])
        assert answer["message"] == {"role": "assistant", "content": "It is sunny."}
        assert f"<|assistant|>{WRITTEN}</tool_call><|tool|>sunny({made['id']})" in system.script.prompts[-1]


async def test_results_belong_to_calls_without_ids_by_their_names_and_order(system: System) -> None:
    made = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", **one} for one in (
        {"content": "1", "tool_name": "b"}, {"content": "2"}, {"content": "3"}, {"content": "4", "tool_name": "a"},
    )]  # fmt: skip
    system.script.says = "Well."
    await system.whole(messages=[*ASK, {"role": "assistant", "tool_calls": made}, *results])
    assert "<|tool|>1(call00001)<|tool|>2(call00000)<|tool|>3(call00002)<|tool|>4<|" in system.script.prompts[-1]


async def test_a_stream_has_a_line_for_each_call(system: System) -> None:
    system.script.says = TEXT_AND_CALLS
    whole = (await system.whole())["message"]
    assert (whole["content"], len(whole["tool_calls"])) == ("Let me see.", 2)
    *lines, last = await system.lines()
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    assert "".join(line["message"]["content"] for line in lines) == "Let me see."
    calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [len(one) for one in calls] == [1, 1]
    assert [one[0]["function"] for one in calls] == [one["function"] for one in whole["tool_calls"]]
    assert [one[0]["function"]["index"] for one in calls] == [0, 1]
    assert not any(line["done"] for line in lines)


async def test_reasoning_has_a_field_of_its_own_unless_it_is_not_wanted(system: System) -> None:
    system.script.says = f"<think>I need it.</think>{CALL}"
    message = (await system.whole())["message"]
    assert (message["thinking"], message["content"], len(message["tool_calls"])) == ("I need it.", "", 1)
    lines = await system.lines(think=True)
    assert "".join(line["message"].get("thinking", "") for line in lines) == "I need it."
    assert (await system.whole(think="low"))["message"]["thinking"] == "I need it."
    assert "<|assistant|>(low)" in system.script.prompts[-1]
    assert "thinking" not in (await system.whole(think=False))["message"]
    await system.whole(messages=[*ASK, message, {"role": "tool", "content": "sunny"}])
    assert f"<|assistant|><think>I need it.</think>{WRITTEN}" in system.script.prompts[-1]

    system.script.says = "<think>Hm.</think>Sunny."
    answer = await system.whole("generate")
    assert (answer["response"], answer["thinking"]) == ("Sunny.", "Hm.")
    assert "thinking" not in await system.whole("generate", think=False)
    lines = await system.lines("generate")
    assert "".join(line.get("thinking", "") for line in lines) == "Hm."
    assert "".join(line["response"] for line in lines) == "Sunny."


async def test_what_is_no_json_object_is_passed_on_as_text(system: System) -> None:
    system.script.says = CALL
    cut = await system.whole(options={"num_predict": 60})
    assert cut["done_reason"] == "length"
    assert ROME.startswith(cut["message"]["tool_calls"][0]["function"]["arguments"]["INVALID_JSON"])


async def test_a_model_shows_that_it_can_call_tools_and_reason(system: System) -> None:
    shown = await call(system.port, "POST", "/api/show", {"model": NAME})
    assert shown.json["capabilities"] == ["completion", "tools", "thinking"]


async def test_the_schema_of_a_strict_tool_is_named(system: System) -> None:
    broken = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": {"type": "y"}}}}
    body = {"model": NAME, "messages": ASK, "tools": [WEATHER, {"type": "function", "function": broken}]}
    reply = await call(system.port, "POST", "/api/chat", body)
    assert reply.status == 400
    assert "'tools[1].function.parameters' cannot be used" in reply.json["error"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tools": [{}]}, "Missing required parameter: 'tools[0].type'."),
        ({"tools": [{"type": "function", "function": {"name": "?"}}]}, "'tools[0].function.name' must be"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].tool_name' is needed"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "with the role 'assistant'"),
        ({"messages": [{"role": "user", "thinking": "x"}]}, "with the role 'assistant'"),
        ({"messages": [{"role": "user", "tool_name": "x"}]}, "with the role 'tool'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, *ASK]},
         "'messages[0].tool_calls[0].function.name' must not be empty"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, *ASK]},
         "must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}, *ASK]},
         "Tools of type 'x'"),
        ({"think": "much"}, "'think' must be true, false or one of low, medium, high"),
        ({"think": {}}, "'think' must be true, false or one of"),
        ({"think": "high"}, "'think' needs a model"),
        ({"think": True}, "'think' needs a model"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    async with serving(ScriptedBackend([replace(CARD, tool_format="hermes")])) as port:
        reply = await call(port, "POST", "/api/chat", {"model": CARD.name, "messages": ASK, **change})
    assert reply.status == 400
    assert told in reply.json["error"]


async def test_a_model_whose_format_of_calls_is_unknown_refuses_tools() -> None:
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", "/api/chat", {"model": CARD.name, "messages": ASK, "tools": [WEATHER]})
        raw = {"model": CARD.name, "prompt": "x", "raw": True, "think": True}
        thinking = await call(port, "POST", "/api/generate", raw)
    assert (reply.status, thinking.status) == (400, 400)
    assert "shows no known format of tool calls" in reply.json["error"]
    assert "'think' cannot be true together with 'raw'" in thinking.json["error"]
