"""What coding agents send to Anthropic's API besides a conversation, with the official client and a scripted model."""

from typing import Any

from antiphon.services.gateway.apis.openai.bodies.sealed import seal, unseal
from tests.integration.test_tools_anthropic import ASK, WEATHER, System, calls, system  # noqa: F401
from tests.integration.tool_script import CALL

THINKS = f"<think>I need it.</think>Wait.\n{CALL}"
AGENT: dict[str, Any] = {
    "betas": ["x"],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "me"},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "max_tokens": 600,
}
IGNORED = "betas, context_management, metadata"


async def test_thinking_is_in_signed_blocks_which_can_be_sent_back(system: System) -> None:  # noqa: F811
    system.script.says = THINKS
    for ask in (system.whole, system.streamed):
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            message = await ask(thinking=thinking)
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            thought = message.content[0]
            assert thought.type == "thinking"
            assert (thought.thinking, unseal(thought.signature)) == ("I need it.", "I need it.")
            assert message.stop_reason == "tool_use"
    [made] = calls(message)
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "Sunny."}
    history: Any = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    system.script.says = "It is sunny."
    await system.whole(messages=history, thinking={"type": "adaptive"})
    assert "<|assistant|><think>I need it.</think>Wait." in system.script.prompts[-1]


async def test_thinking_that_is_not_displayed_is_only_in_the_signature(system: System) -> None:  # noqa: F811
    system.script.says = THINKS
    for ask in (system.whole, system.streamed):
        message = await ask(thinking={"type": "adaptive", "display": "omitted"})
        thought = message.content[0]
        assert thought.type == "thinking"
        assert (thought.thinking, unseal(thought.signature)) == ("", "I need it.")
    history: Any = [*ASK, {"role": "assistant", "content": message.content[:2]}, *ASK]
    await system.whole(messages=history)
    assert "<think>I need it.</think>Wait." in system.script.prompts[-1]


async def test_a_new_way_of_displaying_thinking_is_told_and_shows_it_all(system: System) -> None:  # noqa: F811
    system.script.says = THINKS
    answer = await system.raw(thinking={"type": "adaptive", "display": "updates"})
    assert (answer.status, answer.headers["x-antiphon-ignored"]) == (200, "thinking.display"), answer.body
    assert (answer.json["content"][0]["type"], answer.json["content"][0]["thinking"]) == ("thinking", "I need it.")
    refused = await system.raw(thinking={"type": "adaptive", "display": 5})
    assert (refused.status, "'thinking.display'" in refused.json["error"]["message"]) == (400, True)


async def test_a_signature_of_another_system_is_no_reasoning() -> None:
    sealed = seal("Hm. ü")
    assert unseal(sealed) == "Hm. ü"
    for other in ("", "EqQB", "ü", sealed[:-4], f"{sealed[:-8]}AAAAAAAA", sealed.replace(sealed[0], "Q", 1)):
        assert unseal(other) is None


async def test_what_an_agent_asks_for_and_does_not_get_is_told(system: System) -> None:  # noqa: F811
    system.script.says = CALL
    hosted: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    tools = [{**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}, hosted]
    messages: Any = [*ASK, {"role": "system", "content": "Be quick."}, {"role": "user", "content": "Now."}]
    for path in ("/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"):
        answer = await system.raw(path, **AGENT, tools=tools, messages=messages)
        assert answer.status == 200, answer.body
        told = answer.headers["x-antiphon-ignored"].split(", ")
        assert set(told) >= {"tools[].web_search_20250305", "tools[].cache_control"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    whole = await system.raw(**AGENT)
    assert whole.headers["x-antiphon-ignored"] == IGNORED
    assert "Weather in Rome?\nBe quick.\nNow." in system.script.prompts[-2]
    refused = await system.raw(tools=[hosted], tool_choice={"type": "tool", "name": "web_search"})
    assert (refused.status, refused.json["error"]["message"][:13]) == (400, "'tool_choice'")


async def test_a_deferred_tool_is_known_when_a_result_refers_to_it(system: System) -> None:  # noqa: F811
    deferred = {**WEATHER, "defer_loading": True}
    system.script.says = "No."
    answer = await system.raw(tools=[deferred])
    assert answer.headers["x-antiphon-ignored"] == "tools[].defer_loading"
    assert "Tools:" not in system.script.prompts[-1]
    call = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {}}
    found = {"type": "tool_reference", "tool_name": "get_weather"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    history = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await system.whole(tools=[deferred], messages=history)
    assert "Tools:" in system.script.prompts[-1]
    assert "The tool get_weather can be called now." in system.script.prompts[-1]


async def test_a_format_a_prefill_and_documents(system: System) -> None:  # noqa: F811
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "schema": schema}
    asked: list[dict[str, Any]] = [{"output_config": {"effort": "max", "format": wanted}}, {"output_format": wanted}]
    system.script.says = '{"a": 1}'
    for fields in asked:
        answer = await system.raw(tools=[], **fields)
        assert answer.json["content"][0]["text"].replace(" ", "").startswith('{"a":1')
    system.script.says = " day."
    await system.whole(tools=[], messages=[*ASK, {"role": "assistant", "content": "Good"}])
    assert system.script.prompts[-1].endswith("<|assistant|>Good")
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "x"},
    }
    await system.whole(tools=[], messages=[{"role": "user", "content": [document, {"type": "text", "text": "?"}]}])
    assert "Notes\nx\n?" in system.script.prompts[-1]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    refused = await system.raw(messages=[{"role": "user", "content": [pdf]}])
    assert (refused.status, "A document that is a file" in refused.json["error"]["message"]) == (400, True)
