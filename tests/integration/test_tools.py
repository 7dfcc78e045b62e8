"""Calls of tools and reasoning through the whole system, with the official OpenAI client and a scripted model."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.integration.edge import call
from tests.integration.tool_script import CALL, ROME, SPECIAL, TEMPLATE, Script
from tests.support.scripted import END, NAME, scripted_system, write_scripted_model

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASK: Any = [{"role": "user", "content": "Weather in Rome?"}]


@dataclass
class System:
    port: int
    script: Script
    client: openai.AsyncOpenAI

    async def whole(self, **fields: Any) -> Any:
        return await self.client.chat.completions.create(**self._asked(fields))

    async def chunks(self, **fields: Any) -> list[Any]:
        options = {"include_usage": True}
        return [chunk async for chunk in await self.whole(stream=True, stream_options=options, **fields)]

    async def deltas(self, **fields: Any) -> list[dict[str, Any]]:
        """The deltas of a stream, without the role and the end."""
        chunks = [chunk for chunk in await self.chunks(**fields) if chunk.choices]
        assert chunks[0].choices[0].delta.to_dict() == {"role": "assistant"}
        assert chunks[-1].choices[0].delta.to_dict() == {}
        return [chunk.choices[0].delta.to_dict() for chunk in chunks[1:-1]]

    def _asked(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": NAME, "messages": ASK, "temperature": 0, **fields}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return write_scripted_model(directory, TEMPLATE, SPECIAL)


@pytest.fixture
async def system(directory: Path, tokenizer: Tokenizer) -> AsyncIterator[System]:
    script = Script()
    async with (
        scripted_system(directory, tokenizer, script) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0) as client,
    ):
        yield System(port, script, client)


async def test_a_tool_is_called_and_its_result_is_sent_back(system: System) -> None:
    system.script.says = CALL
    answer = await system.whole(tools=[WEATHER])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [made] = choice.message.tool_calls
    assert (made.type, made.function.name, made.function.arguments) == ("function", "get_weather", ROME)
    assert made.id.startswith("call_")
    assert "reasoning" not in choice.message.to_dict()
    assert json.dumps(WEATHER) in system.script.prompts[0]

    system.script.says = "It is sunny."
    result = {"role": "tool", "tool_call_id": made.id, "content": "sunny"}
    answer = await system.whole(messages=[*ASK, choice.message.to_dict(), result], tools=[WEATHER])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is sunny.", "stop")
    assert answer.choices[0].message.tool_calls is None
    written = f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(json.loads(ROME), ensure_ascii=False)}}}'
    assert f"<|assistant|>{written}</tool_call><|tool|>sunny({made.id})<|assistant|>" in system.script.prompts[-1]


async def test_a_stream_gives_the_same_calls_in_pieces(system: System) -> None:
    system.script.says = f"Let me see. <other>\n{CALL}\n{CALL}"
    whole = (await system.whole(tools=[WEATHER])).choices[0].message
    deltas = await system.deltas(tools=[WEATHER])
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert "".join(delta.get("content", "") for delta in deltas) == whole.content == "Let me see."
    heads = [one for one in calls if "id" in one]
    assert [one["index"] for one in heads] == [0, 1]
    for head, made in zip(heads, whole.tool_calls, strict=True):
        assert head["function"] == {"name": "get_weather", "arguments": ""}
        assert head["type"] == "function"
        rest = [one for one in calls if one["index"] == head["index"] and one is not head]
        assert all(one.keys() == {"index", "function"} and one["function"].keys() == {"arguments"} for one in rest)
        assert "".join(one["function"]["arguments"] for one in rest) == made.function.arguments == ROME


async def test_the_clients_own_assembly_of_a_stream_understands_it(system: System) -> None:
    system.script.says = CALL
    async with system.client.chat.completions.stream(model=NAME, messages=ASK, tools=[WEATHER]) as stream:
        [choice] = (await stream.get_final_completion()).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == ROME


async def test_each_choice_has_its_own_calls_and_every_call_an_id_of_its_own(system: System) -> None:
    system.script.says = CALL
    several: Any = {"tools": [WEATHER], "n": 2, "temperature": 1}
    choices = (await system.whole(**several)).choices
    ids = [choice.message.tool_calls[0].id for choice in choices]
    chunks = [choice for chunk in await system.chunks(**several) for choice in chunk.choices]
    ids += [call.id for choice in chunks for call in choice.delta.tool_calls or () if call.id]
    assert len({*ids}) == 4
    for index in range(2):
        calls = [call for one in chunks if one.index == index for call in one.delta.tool_calls or ()]
        assert "".join(call.function.arguments for call in calls) == ROME


async def test_length_wins_over_calls_and_only_the_first_call_is_kept_on_request(system: System) -> None:
    system.script.says = CALL + CALL
    for ask in (system.whole, system.chunks):
        answer: Any = await ask(tools=[WEATHER], max_tokens=50)
        ends = [
            one.finish_reason for part in (answer if isinstance(answer, list) else [answer]) for one in part.choices
        ]
        assert ends[-1] == "length"
    [choice] = (await system.whole(tools=[WEATHER], max_tokens=50)).choices
    assert ROME.startswith(choice.message.tool_calls[0].function.arguments)
    [choice] = (await system.whole(tools=[WEATHER], parallel_tool_calls=False)).choices
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


async def test_without_tools_the_text_stays_as_it_is(system: System) -> None:
    system.script.says = "<tool_call>5 <other>"
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        [choice] = (await system.whole(**fields)).choices
        assert (choice.message.content, choice.finish_reason) == ("5 ", "stop")
        assert "Tools:" not in system.script.prompts[-1]
    [choice] = (await system.whole(tools=[WEATHER])).choices
    assert (choice.message.content, choice.finish_reason) == ("<tool_call>5 ", "stop")


async def test_the_former_functions_are_answered_in_the_former_way(system: System) -> None:
    system.script.says = CALL + CALL
    [choice] = (await system.whole(functions=[WEATHER["function"]], function_call="auto")).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.to_dict() == {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "get_weather", "arguments": ROME},
    }
    first, *rest = [one["function_call"] for one in await system.deltas(functions=[WEATHER["function"]])]
    assert first == {"name": "get_weather", "arguments": ""}
    assert "".join(one["arguments"] for one in rest) == ROME
    messages = [*ASK, choice.message.to_dict(), {"role": "function", "name": "get_weather", "content": "sunny"}]
    await system.whole(messages=messages, functions=[WEATHER["function"]])
    assert "</tool_call><|tool|>sunny<|assistant|>" in system.script.prompts[-1]


@pytest.mark.spec("S-API-075d", "S-OFF-052")
@pytest.mark.parametrize("begun", [False, True])
async def test_reasoning_has_both_names_and_its_tokens_are_counted(system: System, begun: bool) -> None:
    system.script.says = "Hm. Rome…\n</think>\n\nSunny." if begun else "<think>\nHm. Rome…\n</think>\n\nSunny."
    asked: Any = {"extra_body": {"chat_template_kwargs": {"thinking": begun}}}
    answer = await system.whole(**asked)
    expected = {"role": "assistant", "content": "Sunny.", "reasoning": "Hm. Rome…", "reasoning_content": "Hm. Rome…"}
    assert answer.choices[0].message.to_dict() == expected
    assert answer.choices[0].to_dict()["sentence_length"] == len("Sunny.")
    [*_, last] = chunks = await system.chunks(**asked)
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm. Rome…"
    assert "".join(delta.get("content", "") for delta in deltas) == "Sunny."
    for delta in deltas:
        assert delta.get("reasoning") == delta.get("reasoning_content")
        assert len(delta.keys() & {"content", "reasoning"}) < 2
    counted = len(system.script.says.partition("</think>")[0].encode()) + len("</think>")
    for usage in (answer.usage, last.usage):
        assert counted <= usage.completion_tokens_details.reasoning_tokens <= counted + 3
        assert usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    hidden = await system.whole(extra_body={**asked["extra_body"], "include_reasoning": False})
    assert hidden.choices[0].message.to_dict() == {"role": "assistant", "content": "Sunny."}
    assert hidden.usage.completion_tokens_details == answer.usage.completion_tokens_details


async def test_the_effort_reaches_a_template_that_uses_it(system: System, tmp_path: Path) -> None:
    system.script.says = "Sunny."
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        await system.whole(reasoning_effort=effort)
        assert system.script.prompts[-1].endswith(f"<|assistant|>({effort})")
    body = {"messages": ASK, "reasoning_effort": "low"}
    counts = [(await call(system.port, "POST", "/tokenize", one)).json["count"] for one in (body, {"messages": ASK})]
    assert counts[0] == counts[1] + len("(low)")
    (tmp_path / "other").mkdir()
    tokenizer = write_scripted_model(tmp_path / "other", "{{ messages[0].content }}")
    script = Script("hi")
    async with scripted_system(tmp_path / "other", tokenizer, script) as port:
        reply = await call(port, "POST", "/v1/chat/completions", body)
    assert (reply.status, script.prompts) == (200, ["Weather in Rome?"])


async def test_reasoning_and_calls_come_together_and_can_be_sent_back(system: System) -> None:
    system.script.says = f"<think>I need it.</think>{CALL}"
    message = (await system.whole(tools=[WEATHER])).choices[0].message.to_dict()
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("I need it.", None, 1)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    await system.whole(messages=[*ASK, message, result])
    assert "<|assistant|><think>I need it.</think><tool_call>" in system.script.prompts[-1]


async def test_token_ids_and_log_probabilities_of_parsed_output_are_complete(
    system: System, tokenizer: Tokenizer
) -> None:
    system.script.says = f"<think>a</think>b{CALL}"
    ids = [*tokenizer.encode(system.script.says, add_special_tokens=False).ids, tokenizer.token_to_id(END)]
    asked: Any = {"tools": [WEATHER], "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = (await system.whole(**asked)).choices[0].to_dict()
    chunks = [choice.to_dict() for chunk in await system.chunks(**asked) for choice in chunk.choices]
    assert whole["token_ids"] == [one for choice in chunks for one in choice.get("token_ids", [])] == ids
    streamed = [one for choice in chunks if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert whole["logprobs"]["content"] == streamed
    assert len(streamed) == len(ids)


async def test_the_final_message_is_continued_within_its_reasoning(system: System) -> None:
    system.script.says = " more</think>Sunny."
    messages = [*ASK, {"role": "assistant", "content": "<think>Hm,"}]
    answer = await system.whole(messages=messages, extra_body={"continue_final_message": True})
    assert system.script.prompts[-1].endswith("<|assistant|><think>Hm,")
    message = answer.choices[0].message
    assert (message.content, message.to_dict()["reasoning"]) == ("Sunny.", " more")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [WEATHER], "tool_choice": NAMED, "guided_regex": "a"}, "tool_choice", "guided_regex"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not in"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "Missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}
          }, "tool_choice.allowed_tools.tools[0]", "must be an object"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "?"}}]}, "tools[1].function.name", "letters"),
        ({"tools": [WEATHER], "functions": [WEATHER["function"]]}, "functions", "together"),
        ({"functions": [WEATHER["function"]], "function_call": {"name": "x"}}, "function_call", "not in"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "cannot be set"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal, low, medium, high, xhigh"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort",
         "together"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "together"),
    ],
)  # fmt: skip
async def test_a_wrong_request_is_refused_where_it_is_wrong(
    system: System, fields: dict[str, Any], param: str, said: str
) -> None:
    reply = await call(system.port, "POST", "/v1/chat/completions", {"messages": ASK, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert said in reply.error["message"]
    assert not system.script.prompts


async def test_forced_calls_are_read_from_the_output_that_their_schema_gives(system: System) -> None:
    system.script.says = f'<tool_call>{{"name": "get_weather", "arguments": {ROME}}}</tool_call>'
    [choice] = (await system.whole(tools=[WEATHER], tool_choice="required")).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [call.function.arguments for call in choice.message.tool_calls] == [ROME]
    [choice] = (await system.whole(tools=[WEATHER], tool_choice=NAMED)).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert [call.function.arguments for call in choice.message.tool_calls] == [ROME]
    deltas = await system.deltas(tools=[WEATHER], tool_choice=NAMED)
    assert deltas[0]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ""}
    assert "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas) == ROME


async def test_only_allowed_tools_can_be_called(system: System) -> None:
    now: Any = {"type": "function", "function": {"name": "now"}}
    allowed: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    system.script.says = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    fields: Any = {"tools": [WEATHER, now], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    [choice] = (await system.whole(**fields)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert "get_weather" not in system.script.prompts[-1]
    allowed["mode"] = "required"
    [choice] = (await system.whole(**fields)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


async def test_tokenize_counts_tools_like_the_request_itself(system: System) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": "auto", "max_tokens": 1, "include_reasoning": False}
    told = await call(system.port, "POST", "/tokenize", body)
    answer = await call(system.port, "POST", "/v1/chat/completions", body)
    assert told.json["count"] == answer.json["usage"]["prompt_tokens"]
    bare = await call(system.port, "POST", "/tokenize", {**body, "tool_choice": "none"})
    assert bare.json["count"] < told.json["count"]


@pytest.mark.parametrize("flags", [
    {"tool_call_parser": "none", "reasoning_parser": "none"}, {"tool_call_parser": "mistral"},
    {"enable_auto_tool_choice": False},
])  # fmt: skip
async def test_the_servers_settings_choose_the_formats(directory: Path, tokenizer: Tokenizer, flags: Any) -> None:
    script = Script("<think>a</think>[TOOL_CALLS]get_weather{}")
    async with scripted_system(directory, tokenizer, script, **flags) as port:
        reply = await call(port, "POST", "/v1/chat/completions", {"messages": ASK, "tools": [WEATHER]})
    if "enable_auto_tool_choice" in flags:
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
        return
    message = reply.json["choices"][0]["message"]
    if flags["tool_call_parser"] == "none":
        assert message == {"role": "assistant", "content": script.says}
        return
    assert (message["reasoning"], message["content"]) == ("a", None)
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    assert len(message["tool_calls"][0]["id"]) == 9


async def test_a_model_whose_template_shows_no_calls_refuses_tools(tmp_path: Path) -> None:
    tokenizer = write_scripted_model(tmp_path, "{{ messages[0].content }}")
    async with scripted_system(tmp_path, tokenizer, Script("hi")) as port:
        reply = await call(port, "POST", "/v1/chat/completions", {"messages": ASK, "tools": [WEATHER]})
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--tool-call-parser" in reply.error["message"]
        plain = await call(port, "POST", "/v1/chat/completions", {"messages": ASK})
        assert plain.json["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
