"""Responses whose tools the server runs: the official client, a scripted model, and a real MCP server over HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.shared import limits
from tests.integration.edge import call
from tests.integration.tool_script import Script, calling_system
from tests.support.mcp_server import NUMBER, TOOLS, Behaviour, running
from tests.support.scripted import NAME

MCP: Any = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
ASK = "Add it up."
LIST_EVENTS = [
    "response.output_item.added",
    "response.mcp_list_tools.in_progress",
    "response.mcp_list_tools.completed",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.mcp_call.in_progress",
    "response.mcp_call.completed",
    "response.output_item.done",
]


def said(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "sums__{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass
class System:
    port: int
    script: Script
    client: openai.AsyncOpenAI
    server: Behaviour

    def says(self, *texts: str) -> None:
        """Sets what the model says in each of its steps; the last text is repeated."""
        *self.script.next, self.script.says = texts

    async def create(self, **fields: Any) -> Any:
        return await self.client.responses.create(**{"model": NAME, "input": ASK, "tools": [MCP], **fields})


@pytest.fixture
def server() -> Iterator[tuple[Behaviour, str]]:
    behaviour = Behaviour()
    with running(behaviour) as url:
        yield behaviour, url


@pytest.fixture
async def system(tmp_path: Path, server: tuple[Behaviour, str]) -> AsyncIterator[System]:
    behaviour, url = server
    file = tmp_path / "servers.json"
    one = {"url": url, "headers": {"X-Secret": "operator"}, "timeout_s": 2.0}
    file.write_text(json.dumps({"servers": {"sums": one}}))
    async with (
        calling_system(tmp_path, mcp_servers=str(file)) as (port, script),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0) as client,
    ):
        yield System(port, script, client, behaviour)


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


@pytest.mark.parametrize("streams", [False, True])
async def test_the_server_calls_tools_until_the_model_answers(system: System, streams: bool) -> None:
    system.server.streams = streams
    system.says(said("add", n=1), said("add", n=2) + said("look_up", n=3), "Three.")
    response = await system.create()
    assert (response.status, response.output_text) == ("completed", "Three."), response
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call", "message"]
    listed, first = response.output[:2]
    assert [(tool.name, tool.input_schema) for tool in listed.tools] == [("add", NUMBER), ("look_up", NUMBER)]
    assert (first.name, first.arguments, first.output, first.status) == ("add", '{"n": 1}', '{"sum": 1}', "completed")
    assert system.server.keys == [item.id for item in response.output[1:4]]
    assert [one["arguments"]["n"] for one in system.server.calls] == [1, 2, 3]
    # The second step was told of the first call, the third one of all of them, each in its own turn.
    assert system.script.prompts[1].count('<tool_call>{"name": "sums') == 1
    assert f"({first.id})" in system.script.prompts[1]
    assert system.script.prompts[2].startswith(system.script.prompts[1].removesuffix("<|assistant|>"))
    assert all(one["X-Secret"] == "operator" for one in system.server.headers)
    assert response.usage.output_tokens > len("Three.") + len(said("add", n=1))


async def test_a_stream_has_the_events_of_lists_and_calls(system: System) -> None:
    system.says(said("add", n=1), "One.")
    async with system.client.responses.stream(model=NAME, input=ASK, tools=[MCP]) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[2:12] == LIST_EVENTS + CALL_EVENTS
    assert names[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "One."
    stored = await system.client.responses.retrieve(final.id)
    assert [item.model_dump()["id"] for item in stored.output] == [item.model_dump()["id"] for item in final.output]
    assert stored.output_text == final.output_text
    again: list[Any] = [event async for event in await system.client.responses.retrieve(final.id, stream=True)]
    assert [event.type for event in again] == names


async def test_a_response_continues_another_one_with_its_calls(system: System) -> None:
    system.says(said("add", n=1), "One.")
    first = await system.create()
    system.says("Still one.")
    second = await system.create(input="And now?", previous_response_id=first.id, tools=[])
    assert second.output_text == "Still one."
    assert '{"sum": 1}' in system.script.prompts[-1]
    # The client may keep the conversation itself.
    history = [{"role": "user", "content": ASK}, *(item.to_dict() for item in first.output)]
    third = await system.create(input=[*history, {"role": "user", "content": "And now?"}], tools=[])
    assert third.output_text == "Still one."
    assert system.script.prompts[-1] == system.script.prompts[-2]


async def test_a_call_waits_for_the_clients_approval(system: System) -> None:
    tool = {**MCP, "require_approval": {"never": {"tool_names": ["look_up"]}}}
    system.says(said("look_up", n=4) + said("add", n=5))
    first = await system.create(tools=[tool])
    assert (kinds(first), first.status) == (["mcp_list_tools", "mcp_call", "mcp_approval_request"], "completed")
    asked = first.output[-1]
    assert [one["name"] for one in system.server.calls] == ["look_up"]
    system.says("Done.")
    answer = {"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": True}
    second = await system.create(tools=[tool], input=[answer], previous_response_id=first.id)
    assert (kinds(second), second.output_text) == (["mcp_list_tools", "mcp_call", "message"], "Done.")
    assert second.output[1].approval_request_id == asked.id
    assert system.server.keys[-1] == asked.id
    assert f'<|tool|>{{"sum": 5}}({asked.id})' in system.script.prompts[-1]
    third = await system.create(tools=[tool], input="And?", previous_response_id=second.id)
    assert f'<|tool|>{{"sum": 5}}({asked.id})' in system.script.prompts[-1]
    assert third.output_text == "Done."
    refused = {**answer, "approve": False, "reason": "Too dear."}
    await system.create(tools=[tool], input=[refused], previous_response_id=first.id)
    assert "Error: the user does not allow this call. Too dear." in system.script.prompts[-1]
    assert len(system.server.calls) == 2


async def test_approval_is_needed_unless_the_request_says_otherwise(system: System) -> None:
    system.says(said("look_up", n=4))
    response = await system.create(tools=[{"type": "mcp", "server_label": "sums"}])
    assert kinds(response)[-1] == "mcp_approval_request"
    assert not system.server.calls


async def test_a_tool_of_the_clients_ends_the_response(system: System) -> None:
    own = {"type": "function", "name": "mine", "parameters": {"type": "object"}}
    mine = '<tool_call>\n{"name": "mine", "arguments": {}}\n</tool_call>'
    system.says(mine + said("add", n=1))
    first = await system.create(tools=[MCP, own])
    assert kinds(first) == ["mcp_list_tools", "function_call", "mcp_call"]
    system.says("Both.")
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "ours"}
    second = await system.create(tools=[MCP, own], input=[result], previous_response_id=first.id)
    assert second.output_text == "Both."
    assert all(text in system.script.prompts[-1] for text in ('{"sum": 1}', "ours"))


async def test_a_failed_call_is_told_to_the_model(system: System) -> None:
    system.server.is_error = True
    system.says(said("add", n=1), "It failed.")
    response = await system.create()
    failed = response.output[1]
    assert (failed.status, failed.error.type, response.output_text) == (
        "failed",
        "mcp_tool_execution_error",
        "It failed.",
    )
    assert "Error: " in system.script.prompts[-1]


async def test_max_tool_calls_limits_what_is_called(system: System) -> None:
    system.says(said("add", n=1) + said("add", n=2), said("add", n=3), "Enough.")
    response = await system.create(max_tool_calls=1)
    assert response.max_tool_calls == 1
    assert len(system.server.calls) == 1
    assert response.output[2].status == "failed"


async def test_a_lost_result_stops_the_response_unless_the_tool_is_idempotent(system: System) -> None:
    system.server.breaks = 1
    system.says(said("look_up", n=1), "Found.")
    response = await system.create()
    assert (response.status, response.output[1].status) == ("completed", "completed")
    first, second = system.server.keys
    assert first == second
    system.server.calls.clear()
    system.server.breaks = 1
    system.says(said("add", n=1), "Never said.")
    stopped = await system.create()
    assert (stopped.status, stopped.incomplete_details.reason) == ("incomplete", "tool_result_unknown")
    unknown = stopped.output[1]
    assert (unknown.status, len(system.server.calls)) == ("incomplete", 1)
    # The client tells the result, or has the call sent again with the same key.
    system.says("Told.")
    given = {"type": "function_call_output", "call_id": unknown.id, "output": "it was seven"}
    told = await system.create(input=[given], previous_response_id=stopped.id)
    assert told.output_text == "Told."
    assert f"<|tool|>it was seven({unknown.id})" in system.script.prompts[-1]
    approve = {"type": "mcp_approval_response", "approval_request_id": unknown.id, "approve": True}
    again = await system.create(input=[approve], previous_response_id=stopped.id)
    assert again.output_text == "Told."
    assert system.server.keys == [unknown.id, unknown.id]


OK = b"HTTP/1.1 200 OK\r\n"
BAD = {
    "huge": OK + b"Content-Type: application/json\r\n\r\n" + b"x" * 2**21,
    "endless": OK + b"Content-Type: text/event-stream\r\n\r\n" + b"data: x\n" * 2**18,
    "malformed": b"\x00\xff not http at all\r\n\r\n",
    "no json": OK + b"Content-Length: 3\r\n\r\n{{{",
    "status": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    "redirect": b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "slow": b"",
}


async def test_a_hostile_server_harms_only_its_own_turn(system: System) -> None:
    for kind, raw in BAD.items():
        system.server.raw, system.server.delay_s = raw, 0.0 if raw else 3.0
        system.server.calls.clear()
        system.says(said("add", n=1), "Over.")
        started = time.monotonic()
        response = await system.create()
        assert time.monotonic() - started < 30
        is_unknown = kind in ("slow", "malformed")
        assert response.status == ("incomplete" if is_unknown else "completed"), (kind, response)
        assert response.output[1].status == ("incomplete" if is_unknown else "failed")
        assert len(system.server.calls) == 1
        assert (await call(system.port, "GET", "/health")).status == 200


LIES: Any = (
    [{"name": "a" * 80, "inputSchema": {"type": "object"}}],
    [{"name": "add", "inputSchema": {"type": "array"}}],
    [{"name": "add", "inputSchema": "no"}],
    [TOOLS[0], TOOLS[0]],
    [{"name": f"t{number}", "inputSchema": {"type": "object"}} for number in range(200)],
    "nothing",
    ["nothing"],
)


async def test_a_server_that_lies_about_its_tools_fails_the_response(system: System) -> None:
    for tools in LIES:
        system.server.tools = tools
        response = await system.create()
        assert response.status == "failed"
        assert "'sums'" in response.error.message
        assert kinds(response) == ["mcp_list_tools"]
        assert response.output[0].error


WRONG: Any = (
    ({"server_url": "http://169.254.169.254/latest"}, "tools[0].server_url"),
    ({"server_url": "http://127.0.0.1:9/mcp"}, "tools[0].server_url"),
    ({"server_url": "file:///etc/passwd"}, "tools[0].server_url"),
    ({"server_label": "other"}, "tools[0].server_label"),
    ({"connector_id": "other"}, "tools[0].connector_id"),
    ({"server_label": "a b"}, "tools[0].server_label"),
    ({"require_approval": "sometimes"}, "tools[0].require_approval"),
    ({"allowed_tools": 3}, "tools[0].allowed_tools"),
    ({"headers": {"Host": "x"}}, "tools[0].headers"),
    ({"headers": {"X-A": "b\r\nC: d"}}, "tools[0].headers"),
    ({"authorization": "é"}, "tools[0].authorization"),
)


async def test_a_wrong_tool_is_refused_by_name(system: System) -> None:
    for fields, param in WRONG:
        with pytest.raises(openai.BadRequestError) as error:
            await system.create(tools=[{**MCP, **fields}])
        assert error.value.param == param
    assert not system.server.headers


async def test_secrets_of_a_request_are_not_in_its_response(system: System) -> None:
    system.says("No calls.")
    tool = {**MCP, "headers": {"X-Key": "hush"}, "authorization": "hush"}
    response = await system.create(tools=[tool])
    assert "hush" not in response.to_json()
    assert any(one.get("X-Key") == "hush" for one in system.server.headers)
    assert any(one.get("Authorization") == "Bearer hush" for one in system.server.headers)


async def test_a_response_that_is_not_stored_ends_with_its_client(system: System) -> None:
    system.server.delay_s = 0.2
    system.says(said("look_up", n=1))
    stream = await system.create(store=False, stream=True)
    async for event in stream:
        if event.type == "response.mcp_call.completed":
            break
    await stream.close()
    await asyncio.sleep(0.5)
    count = len(system.server.calls)
    await asyncio.sleep(0.5)
    assert len(system.server.calls) == count < 5


async def test_a_response_may_belong_to_a_conversation(system: System) -> None:
    conversation = (await system.client.conversations.create()).id
    system.says(said("add", n=1), "One.")
    await system.create(conversation=conversation)
    system.says("Still one.")
    second = await system.create(conversation=conversation, input="And now?")
    assert second.output_text == "Still one."
    assert system.script.prompts[-1].count('{"sum": 1}') == 1
    assert [one["name"] for one in system.server.calls] == ["add"]


async def test_results_of_one_response_are_bounded_together(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURN_BYTES_MAX", 1000)
    text = json.dumps({"content": [{"type": "text", "text": "x" * 300}]})
    system.server.raw = OK + b'\r\n{"jsonrpc": "2.0", "id": %d, "result": ' + text.encode() + b"}"
    system.says(said("look_up", n=1), said("look_up", n=2), said("look_up", n=3), "Over.")
    response = await system.create()
    assert [item.status for item in response.output if item.type == "mcp_call"] == ["completed", "failed", "failed"]


async def test_a_response_that_is_not_stored_runs_without_a_journal(system: System) -> None:
    system.says(said("add", n=1), "One.")
    response = await system.create(store=False)
    assert response.output_text == "One."
    with pytest.raises(openai.NotFoundError):
        await system.client.responses.retrieve(response.id)
