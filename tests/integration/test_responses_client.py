"""The Responses API with the official OpenAI client against the HTTP edge. The backend is scripted: see `edge`."""

import asyncio
import json
from typing import Any

import openai
import pytest

from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import PositionLogprobs, TokenText
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import ScriptedBackend, call, endings, serving, text_batches
from tests.integration.test_openai_client import client

KEYS = """
[[keys]]
name = "one"
key = "sk-one"

[[keys]]
name = "two"
key = "sk-two"
"""
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def cached(request: GenerationRequest) -> list[Any]:
    return [
        [SequenceUpdate(index=0, text="Good ", token_ids=(1,), num_cached_tokens=1)],
        [SequenceUpdate(index=0, text="day", token_ids=(2,), finish_reason="stop")],
    ]


def sent(backend: ScriptedBackend) -> list[tuple[str, str]]:
    """The last conversation that the backend got."""
    return [(one.role, one.content) for one in backend.requests[-1].inputs.messages]


async def test_a_whole_response_parses():
    backend = ScriptedBackend(reply=cached)
    async with serving(backend) as port, client(port) as api:
        response = await api.responses.create(
            model="org/toy",
            input="Hello?",
            instructions="Be brief.",
            max_output_tokens=9,
            temperature=0.5,
            top_p=0.9,
            text={"format": {"type": "text"}},
            metadata={"a": "b"},
            extra_body={"seed": 5, "stop": ["x"], "top_a": 0.2, "min_tokens": 2},
        )
    assert (response.output_text, response.status, response.model) == ("Good day", "completed", "org/toy")
    assert response.id.startswith("resp_")
    assert (response.metadata, response.instructions, response.temperature) == ({"a": "b"}, "Be brief.", 0.5)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
    assert response.usage.input_tokens_details.cached_tokens == 1
    [request] = backend.requests
    assert sent(backend) == [("system", "Be brief."), ("user", "Hello?")]
    params = request.params
    assert (params.max_tokens, params.top_p, params.seed, request.output.stop) == (9, 0.9, 5, ("x",))
    assert (params.top_a, params.min_tokens) == (0.2, 2)


async def test_items_of_text_become_messages():
    backend = ScriptedBackend()
    async with serving(backend) as port, client(port) as api:
        items: Any = [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello?"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Yes?", "annotations": []}],
            },
            {"role": "user", "content": "Nothing."},
        ]
        response = await api.responses.create(model="org/toy", input=items, instructions="Be kind.")
        assert sent(backend) == [
            ("system", "Be kind.\n\nBe brief."),
            ("user", "Hello?"),
            ("assistant", "Yes?"),
            ("user", "Nothing."),
        ]
        first = await api.responses.input_items.list(response.id, limit=3)
        listed = [item async for item in first]
        assert [item.role for item in listed] == ["user", "assistant", "user", "developer"]  # type: ignore[union-attr]
        oldest = await api.responses.input_items.list(response.id, order="asc", limit=1)
        assert (oldest.data[0].role, oldest.has_more) == ("developer", True)  # type: ignore[union-attr]


async def test_a_stream_has_numbered_events_in_order():
    async with serving(ScriptedBackend(reply=cached)) as port, client(port) as api:
        events = [event async for event in await api.responses.create(model="org/toy", input="Hi", stream=True)]
        assert [event.type for event in events] == EVENTS
        assert [event.sequence_number for event in events] == list(range(len(EVENTS)))
        last = events[-1].response  # type: ignore[union-attr]
        assert (last.output_text, last.status, last.usage.output_tokens) == ("Good day", "completed", 2)
        assert (await api.responses.retrieve(last.id)).output_text == "Good day"
        async with api.responses.stream(model="org/toy", input="Hi") as stream:
            assert (await stream.get_final_response()).output_text == "Good day"


async def test_log_probabilities_come_with_the_text():
    def reply(request: GenerationRequest) -> list[Any]:
        tokens = [TokenText(1, text, text.encode(), -0.5) for text in ("Good", " day", "<end>")]
        first, second, end = (PositionLogprobs(token, (token,)) for token in tokens)
        return [
            [SequenceUpdate(index=0, text="Good", token_ids=(1,), logprobs=(first,))],
            [SequenceUpdate(index=0, text=" day", token_ids=(2,), logprobs=(second,))],
            [SequenceUpdate(index=0, text="", token_ids=(3,), logprobs=(end,), finish_reason="stop")],
        ]

    backend = ScriptedBackend(reply=reply)
    async with serving(backend) as port, client(port) as api:
        settings: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "input": "Hi"}
        whole = await api.responses.create(model="org/toy", **settings)
        part = whole.output[0].content[0]  # type: ignore[union-attr]
        assert [one.token for one in part.logprobs] == ["Good", " day", "<end>"]  # type: ignore[union-attr]
        assert (whole.top_logprobs, backend.requests[-1].params.logprobs) == (1, 1)
        events = [event async for event in await api.responses.create(model="org/toy", stream=True, **settings)]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [(one.delta, one.logprobs[0].token) for one in deltas] == [
            ("Good", "Good"),
            (" day", " day"),
            ("", "<end>"),
        ]
        assert events[-1].response.output[0].content == whole.output[0].content  # type: ignore[union-attr]


async def test_the_format_of_the_text_is_a_grammar():
    backend = ScriptedBackend()
    schema = {"type": "object"}
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "thing", "schema": schema, "strict": True, "description": "Any object."},
    ]
    async with serving(backend) as port, client(port) as api:
        for wanted in formats:
            response = await api.responses.create(model="org/toy", input="Hi", text={"format": wanted})
            assert response.text is not None
            assert response.text.format is not None
            assert response.text.format.model_dump(by_alias=True, exclude_unset=True) == wanted
    assert [(request.params.grammar, request.pending.grammar_param) for request in backend.requests] == [
        (None, ""),
        (Grammar("json_object"), "text.format"),
        (Grammar("json", json.dumps(schema)), "text.format.schema"),
    ]


async def test_a_cut_off_response_is_incomplete():
    def reply(request: GenerationRequest) -> list[Any]:
        return [*text_batches("Good ", "day", finish="length")]

    async with serving(ScriptedBackend(reply=reply)) as port, client(port) as api:
        response = await api.responses.create(model="org/toy", input="Hi")
        assert (response.status, response.output_text) == ("incomplete", "Good day")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        events = [event.type async for event in await api.responses.create(model="org/toy", input="Hi", stream=True)]
        assert events == [*EVENTS[:-1], "response.incomplete"]


async def test_a_response_is_continued_without_its_instructions():
    backend = ScriptedBackend()
    async with serving(backend) as port, client(port) as api:
        first = await api.responses.create(model="org/toy", input="One?", instructions="Be brief.")
        second = await api.responses.create(model="org/toy", input="Two?", previous_response_id=first.id)
        assert sent(backend) == [("user", "One?"), ("assistant", "Good day"), ("user", "Two?")]
        await api.responses.delete(first.id)
        await api.responses.create(model="org/toy", input="Three?", previous_response_id=second.id)
        assert len(sent(backend)) == 5
        with pytest.raises(openai.NotFoundError, match="not found"):
            await api.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as missing:
            await api.responses.create(model="org/toy", input="Four?", previous_response_id=first.id)
        assert (missing.value.param, missing.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_a_response_that_is_not_stored_cannot_be_retrieved():
    async with serving(ScriptedBackend()) as port, client(port) as api:
        response = await api.responses.create(model="org/toy", input="One?", store=False)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="'background' needs 'store'"):
            await api.responses.create(model="org/toy", input="One?", store=False, background=True)


async def test_a_background_response_runs_without_its_client():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, client(port) as api:
        queued = await api.responses.create(model="org/toy", input="Hi", background=True)
        assert (queued.status, queued.background) == ("queued", True)
        with pytest.raises(openai.BadRequestError, match="in progress"):
            await api.responses.create(model="org/toy", input="Hi", previous_response_id=queued.id)
        generation = await backend.generations.get()
        generation.put(*text_batches("Good ", "day")[:1])
        while not (running := await api.responses.retrieve(queued.id)).output_text:
            await asyncio.sleep(0.01)
        assert (running.status, running.output_text) == ("in_progress", "Good ")
        stream = await api.responses.retrieve(queued.id, stream=True)
        seen = [await anext(stream) for _ in range(3)]
        await stream.close()
        generation.put(text_batches("Good ", "day")[1], None)
        after = seen[-1].sequence_number
        rest = [event async for event in await api.responses.retrieve(queued.id, stream=True, starting_after=after)]
        assert [event.type for event in [*seen, *rest]] == [EVENTS[0], "response.queued", *EVENTS[1:]]
        assert [event.sequence_number for event in [*seen, *rest]] == list(range(11))
        ended = await api.responses.retrieve(queued.id)
        assert (ended.status, ended.output_text) == ("completed", "Good day")
        again = [event async for event in await api.responses.retrieve(queued.id, stream=True, starting_after=9)]
        assert [event.type for event in again] == ["response.completed"]
        assert (await api.responses.cancel(queued.id)).status == "completed"


async def test_a_background_response_survives_its_stream_and_can_be_cancelled():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, client(port) as api:
        stream = await api.responses.create(model="org/toy", input="Hi", background=True, stream=True)
        created = await anext(stream)
        await stream.close()
        response_id = created.response.id  # type: ignore[union-attr]
        generation = await backend.generations.get()
        generation.put(*text_batches("Good ", "day")[:1])
        while not (await api.responses.retrieve(response_id)).output_text:
            await asyncio.sleep(0.01)
        assert generation.cancelled == []
        cancelled = await api.responses.cancel(response_id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Good ")
        assert generation.cancelled == ["abort"]
        assert (await api.responses.cancel(response_id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="which is cancelled"):
            await api.responses.create(model="org/toy", input="Hi", previous_response_id=response_id)


async def test_a_failed_background_response_says_why():
    backend = ScriptedBackend(refusal=ServiceError("server_is_overloaded", "Too much."))
    async with serving(backend) as port, client(port) as api:
        queued = await api.responses.create(model="org/toy", input="Hi", background=True)
        while (failed := await api.responses.retrieve(queued.id)).status == "queued":
            await asyncio.sleep(0.01)
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == ("server_error", "Too much.")
        events = [event.type async for event in await api.responses.retrieve(queued.id, stream=True)]
        assert events == ["response.created", "response.queued", "response.failed"]


async def test_a_running_response_is_cancelled_when_it_is_deleted():
    backend = ScriptedBackend(manual=True)
    recorder = Recorder(8)
    async with serving(backend, recorder=recorder) as port, client(port) as api:
        queued = await api.responses.create(model="org/toy", input="Hi", background=True)
        generation = await backend.generations.get()
        await api.responses.delete(queued.id)
        assert generation.cancelled == ["abort"]
        assert await endings(recorder) == [("cancelled", "cancelled_by_api")]
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(queued.id)


async def test_a_foreground_response_is_neither_cancelled_nor_streamed_again():
    async with serving(ScriptedBackend()) as port, client(port) as api:
        response = await api.responses.create(model="org/toy", input="Hi")
        with pytest.raises(openai.BadRequestError, match="not created with 'background'"):
            await api.responses.cancel(response.id)
        with pytest.raises(openai.BadRequestError, match="not created with 'background'"):
            await api.responses.retrieve(response.id, stream=True)


async def test_a_failure_in_a_stream_is_its_last_event():
    def reply(request: GenerationRequest) -> list[Any]:
        return [
            [SequenceUpdate(index=0, text="Good ", token_ids=(1,))],
            ServiceError("engine_failure", "The engine died."),
        ]

    async with serving(ScriptedBackend(reply=reply)) as port, client(port) as api:
        events = [event async for event in await api.responses.create(model="org/toy", input="Hi", stream=True)]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.message == "The engine died."  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "a"}]}, "input[0].action.command"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]},
         "input[0].output[0].image_url"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": "", "x": 1}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object", "schema": 1}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "x": 1}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": "{}"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}}}, "text.format.schema"),
        ({"text": {"x": 1}}, "text"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"user": "u" * 513}, "user"),
        ({"safety_identifier": "u" * 513}, "safety_identifier"),
        ({"prompt_cache_key": "u" * 513}, "prompt_cache_key"),
        ({"text": {"format": {"type": "json_schema", "name": "n" * 65537, "schema": {}}}}, "text.format.name"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "?"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"type": "function", "name": "f", "x": 1}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
         "tool_choice.tools[0].type"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"x": 1}}, "reasoning"),
        ({"truncation": "always"}, "truncation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "conversation"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], param: str):
    async with serving(ScriptedBackend(), unknown_parameters="refuse", long_outputs="refuse") as port:
        reply = await call(port, "POST", "/v1/responses", {"input": "Hi", **change})
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?starting_after=1", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=maybe", "stream"),
        ("?include=x", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
        ("/input_items?before=x", "before"),
        ("/input_items?include[]=message.input_image.image_url&include[]=x", "include[1]"),
    ],
)
async def test_query_parameters_are_checked(query: str, param: str):
    async with serving(ScriptedBackend()) as port:
        made = await call(port, "POST", "/v1/responses", {"input": "Hi"})
        reply = await call(port, "GET", f"/v1/responses/{made.json['id']}{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_only_the_key_that_made_a_response_is_told_of_it():
    keys = ApiKeys("", keys_of_text(KEYS, is_json=False, source=""))
    backend = ScriptedBackend(manual=True)
    async with serving(backend, keys=keys) as port:

        async def ask(key: str, method: str, path: str, body: dict[str, Any] | None = None) -> int:
            return (await call(port, method, path, body, {"authorization": f"Bearer {key}"})).status

        async def statuses(key: str, name: str) -> list[int]:
            path = f"/v1/responses/{name}"
            more = {"input": "And?", "previous_response_id": name, "background": True}
            asked = [("GET", path), ("GET", f"{path}?stream=true"), ("GET", f"{path}/input_items")]
            found = [await ask(key, *one) for one in asked]
            assert await ask(key, "POST", "/v1/responses", more) == (400 if found[0] == 404 else 200)
            return [*found, await ask(key, "DELETE", path)]

        header = {"authorization": "Bearer sk-one"}
        body = {"input": "Hi", "background": True}
        name = (await call(port, "POST", "/v1/responses", body, header)).json["id"]
        assert await statuses("sk-two", name) == [404] * 4, "while it runs"
        (await backend.generations.get()).put(*text_batches("Good ", "day"), None)
        async with asyncio.timeout(60):
            while (await call(port, "GET", f"/v1/responses/{name}", None, header)).json["status"] != "completed":
                await asyncio.sleep(0.01)
        assert await statuses("sk-two", name) == [404] * 4, "and when it is stored"
        assert await ask("sk-one", "GET", f"/v1/responses/{name}") == 200
        assert await ask("sk-one", "DELETE", f"/v1/responses/{name}") == 200
