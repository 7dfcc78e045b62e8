"""What coding agents send to the Responses API, with the official client and a scripted model behind the system."""

import json
from typing import Any

from antiphon.services.gateway.apis.openai.bodies.sealed import unseal
from tests.integration.edge import call
from tests.integration.test_tools_responses import ASK, CALL, WEATHER, System, system  # noqa: F401
from tests.support.scripted import NAME

GROUP: Any = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}
CUSTOM: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}
HI = [{"role": "user", "content": "Hi"}]
SHELL: Any = {"type": "local_shell"}
AGENT: dict[str, Any] = {
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "prompt_cache_key": "x",
}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_reasoning_is_an_item_that_can_be_sent_back(system: System) -> None:  # noqa: F811
    system.script.says = f"<think>I need it.</think>{CALL}"
    whole = await system.create(**AGENT)
    events, streamed = await system.streamed(**AGENT)
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        assert response.output[0].summary[0].text == "I need it."
        assert unseal(response.output[0].encrypted_content) == "I need it."
    told = [event.type for event in events if "reasoning" in event.type]
    assert told[0] == "response.reasoning_summary_part.added"
    assert told[-2:] == ["response.reasoning_summary_text.done", "response.reasoning_summary_part.done"]
    reasoning, made = ({**item.to_dict(), "status": None} for item in whole.output)
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "Sunny."}
    system.script.says = "It is sunny."
    for sent in (reasoning, {**reasoning, "summary": []}, {**reasoning, "encrypted_content": None}):
        await system.create(input=[{"role": "user", "content": ASK}, sent, made, result])
        assert "<|assistant|><think>I need it.</think>" in system.script.prompts[-1]
    bare = await system.create(input="Hi")
    assert [item.type for item in bare.output] == ["message"]


async def test_tools_of_all_kinds_that_a_client_runs(system: System) -> None:  # noqa: F811
    tools = [GROUP, CUSTOM, SHELL]
    asked = [
        (called("mcp__sky__get_weather", city="Rome"), "function_call"),
        (called("apply_patch", input="*** Begin\n+a"), "custom_tool_call"),
        (called("local_shell", command=["cat", "a"], workdir="/w"), "local_shell_call"),
    ]
    for text, kind in asked:
        system.script.says = text
        whole = (await system.create(tools=tools)).output[0].to_dict()
        events, streamed = await system.streamed(tools=tools)
        made = streamed.output[0].to_dict()
        assert made["type"] == kind
        drop = ("id", "call_id", "parsed_arguments")
        assert {k: v for k, v in made.items() if k not in drop} == {k: v for k, v in whole.items() if k not in drop}
        if kind == "function_call":
            assert (made["name"], made["namespace"], json.loads(made["arguments"])) == (
                "get_weather",
                "mcp__sky",
                {"city": "Rome"},
            )
        elif kind == "custom_tool_call":
            assert (made["name"], made["input"]) == ("apply_patch", "*** Begin\n+a")
            assert "response.custom_tool_call_input.done" in [event.type for event in events]
        else:
            assert (made["action"]["command"], made["action"]["working_directory"]) == (["cat", "a"], "/w")
        output = {"type": f"{kind}_output", "call_id": made["call_id"], "output": "Done."}
        system.script.says = "Good."
        history: Any = [{"role": "user", "content": ASK}, made, output]
        assert (await system.create(tools=tools, input=history)).output_text == "Good."
        assert "Done." in system.script.prompts[-1]
        assert text.partition('"arguments"')[0] in system.script.prompts[-1]


async def test_what_an_agent_asks_for_and_does_not_get_is_told(system: System) -> None:  # noqa: F811
    system.script.says = "Good."
    tools = [WEATHER, {"type": "web_search"}, {"type": "tool_search"}, CUSTOM]
    items: Any = [
        {"type": "additional_tools", "role": "developer", "tools": [GROUP]},
        {"role": "user", "content": ASK},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    ]
    body = {"model": "", "client_metadata": {"a": "b"}, **AGENT, "tools": tools, "input": items}
    body["model"] = (await call(system.port, "GET", "/v1/models")).json["data"][0]["id"]
    answer = await call(system.port, "POST", "/v1/responses", body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-antiphon-ignored"].split(", ") == [
        "client_metadata",
        "include.web_search_call.action.sources",
        "tools[].web_search",
        "tools[].tool_search",
        "tools[].format",
        "input.web_search_call",
        "text.verbosity",
    ]
    assert "mcp__sky__get_weather" in system.script.prompts[-1]
    assert "web_search" not in system.script.prompts[-1]
    counted = await call(system.port, "POST", "/v1/responses/input_tokens", body)
    assert counted.json == {"object": "response.input_tokens", "input_tokens": answer.json["usage"]["input_tokens"]}


async def test_a_conversation_that_is_too_long_loses_its_beginning_if_the_request_allows_it(
    system: System,  # noqa: F811
) -> None:
    system.script.says = "Good."
    long: Any = [{"role": "user", "content": f"{number} " + "word " * 300} for number in range(40)]
    answer = await system.create(tools=[], input=long, truncation="auto", instructions="Be brief.")
    assert answer.output_text == "Good."
    prompt = system.script.prompts[-1]
    assert "Be brief." in prompt
    assert "39 word" in prompt
    assert "<|user|>0 word" not in prompt


async def test_a_conversation_is_made_shorter_and_goes_on(system: System) -> None:  # noqa: F811
    system.script.says = "The user asks about Rome."
    history: Any = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "Sunny."}]
    shorter = await call(system.port, "POST", "/v1/responses/compact", {"model": NAME, "input": history})
    assert (shorter.status, shorter.json["object"]) == (200, "response.compaction")
    assert "Sunny." in system.script.prompts[-1]
    said, compacted = shorter.json["output"]
    assert (said["role"], compacted["type"]) == ("user", "compaction")
    assert shorter.json["usage"]["output_tokens"] > 0
    system.script.says = "Good."
    answer = await system.create(tools=[], input=[said, compacted, {"role": "user", "content": "And?"}])
    assert answer.output_text == "Good."
    assert "until now:\nThe user asks about Rome." in system.script.prompts[-1]
    assert (await call(system.port, "POST", "/v1/responses/compact", {"input": history})).status == 400


async def test_keywords_of_a_schema_that_cannot_be_enforced_are_told_or_refused(system: System) -> None:  # noqa: F811
    system.script.says = "[]"
    model = (await call(system.port, "GET", "/v1/models")).json["data"][0]["id"]
    schema = {"type": "array", "maxItems": 0, "items": {"type": "string", "format": "path"}, "uniqueItems": True}
    told = {"/v1/responses": "text.format.schema", "/v1/chat/completions": "response_format.json_schema.schema"}
    told |= {"/api/chat": "format"}
    for path, name in told.items():
        for strict in (False, True):
            wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": strict}
            answer = await call(system.port, "POST", path, {
                "/v1/responses": {"model": model, "input": "Hi", "text": {"format": wanted}},
                "/v1/chat/completions": {"messages": HI, "response_format": {
                    "type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}},
                "/api/chat": {"model": model, "messages": HI, "stream": False, "format": schema},
            }[path])  # fmt: skip
            if strict and path != "/api/chat":
                assert (answer.status, answer.error["param"]) == (400, name), answer.body
                assert "uniqueItems" in answer.error["message"]
            else:
                assert answer.status == 200, answer.body
                assert answer.headers["x-antiphon-ignored"].split(", ") == [f"{name}.format", f"{name}.uniqueItems"]
    body = {"model": model, "max_tokens": 9, "messages": HI}
    asked = {"format": {"type": "json_schema", "schema": schema}}
    refused = await call(system.port, "POST", "/v1/messages", {**body, "output_config": asked})
    assert (refused.status, b"uniqueItems" in refused.body) == (400, True), refused.body
