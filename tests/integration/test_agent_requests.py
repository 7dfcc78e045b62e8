"""Requests of coding agents, recorded from their makers' programs (`make client-test ARGS=--record-requests`).

Each is sent to the whole system, whose model follows a script: it must be accepted, and answered with the call of the
agent's own tool, or with text, in a stream that ends as the agent's API says.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.integration.edge import Reply, call
from tests.support.agent_script import CONTENT, END, SAYS_SUM, long_model, say
from tests.support.scripted import NAME, ScriptedWorker, scripted_system

FIXTURES = {one.stem: one.read_bytes() for one in sorted((Path(__file__).parent / "agent_requests").glob("*.json"))}
CONTEXT, NUM_BLOCKS, NOTES = 32768, 8192, "/project/notes.txt"


@dataclass(frozen=True)
class Answer:
    """What a client reads in a stream: its text, the calls of tools with their arguments, and how it ended."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    end: str


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    model = long_model(tmp_path, CONTEXT)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    worker = ScriptedWorker(tokenizer, say, END, NUM_BLOCKS, CONTEXT)
    async with scripted_system(model, tokenizer, say, worker=worker) as port:
        yield port


@pytest.mark.parametrize("agent", FIXTURES)
async def test_an_agents_requests_are_answered(agent: str, port: int) -> None:
    told = json.loads(FIXTURES[agent])
    answers = [await answered(port, request) for request in told["requests"]]
    assert [one.end for one in answers] == ["tool" if one.calls else "stop" for one in answers]
    [(name, arguments)] = [made for one in answers for made in one.calls]
    assert name in tools_of(told["requests"][0]["body"]) | tools_of(told["requests"][1]["body"])
    assert NOTES in json.dumps(arguments)
    texts = [one.text for one in answers if not one.calls]
    assert all(texts)
    assert texts.index(f"The file says: {CONTENT}") < texts.index(SAYS_SUM)


def tools_of(body: dict[str, Any]) -> set[str]:
    """The names of the tools in a request."""
    return {one.get("function", one).get("name") for one in body.get("tools", [])}


async def answered(port: int, request: dict[str, Any]) -> Answer:
    body = {**request["body"], "model": NAME}
    reply = await call(port, request["method"], request["path"], body, request["headers"])
    assert reply.status == 200, reply.body
    reader = {"/v1/messages": of_messages, "/v1/responses": of_responses, "/v1/chat/completions": of_chat}
    return reader[request["path"].partition("?")[0]](reply)


def named_events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream whose events have their type as a name, too."""
    found: list[dict[str, Any]] = []
    for block in reply.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def of_messages(reply: Reply) -> Answer:
    """Reads a stream of Anthropic's API."""
    events = named_events(reply)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks = {one["index"]: one["content_block"] for one in events if one["type"] == "content_block_start"}
    text, arguments = "", dict.fromkeys(blocks, "")
    for one in (event for event in events if event["type"] == "content_block_delta"):
        text += one["delta"].get("text", "")
        arguments[one["index"]] += one["delta"].get("partial_json", "")
    calls = [(one["name"], json.loads(arguments[i])) for i, one in blocks.items() if one["type"] == "tool_use"]
    [end] = [one["delta"]["stop_reason"] for one in events if one["type"] == "message_delta"]
    return Answer(text, calls, {"tool_use": "tool", "end_turn": "stop"}[end])


def of_responses(reply: Reply) -> Answer:
    """Reads a stream of the Responses API."""
    events = named_events(reply)
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    output = events[-1]["response"]["output"]
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    calls = [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]
    streamed = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert streamed == text
    return Answer(text, calls, "tool" if calls else "stop")


def of_chat(reply: Reply) -> Answer:
    """Reads a stream of chat completions."""
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert chunks[-1]["usage"]["completion_tokens"] > 0, "asked for with stream_options"
    choices = [one["choices"][0] for one in chunks if one["choices"]]
    text = "".join(one["delta"].get("content") or "" for one in choices)
    parts = [part["function"] for one in choices for part in one["delta"].get("tool_calls") or []]
    names = [part["name"] for part in parts if part.get("name")]
    arguments = "".join(part.get("arguments") or "" for part in parts)
    calls = [(name, json.loads(arguments)) for name in names]
    return Answer(text, calls, {"tool_calls": "tool", "stop": "stop"}[choices[-1]["finish_reason"]])
