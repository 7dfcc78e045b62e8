"""The official Anthropic client against the HTTP edge. The backend is scripted: see `edge`."""

import json
from typing import Any

import anthropic
import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared.errors import ServiceError
from tests.integration.edge import Batch, ScriptedBackend, call, serving, text_batches

HELLO: Any = {"model": "org/toy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello?"}]}


def client(port: int, **options: Any) -> anthropic.AsyncAnthropic:
    settings = {"api_key": "EMPTY", "max_retries": 0, **options}
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", **settings)


def cached(request: GenerationRequest) -> list[Any]:
    """An answer of two tokens; one of the three prompt tokens was in the prefix cache."""
    return [
        [SequenceUpdate(index=0, text="Good ", token_ids=(1,), num_cached_tokens=1)],
        [SequenceUpdate(index=0, text="day", token_ids=(2,), finish_reason="stop")],
    ]


async def test_a_whole_message_parses():
    backend = ScriptedBackend(reply=cached)
    async with serving(backend) as port, client(port) as api:
        message = await api.messages.create(
            model="org/toy",
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": "three"},
                {"role": "user", "content": "Hello?"},
                {"role": "user", "content": "Anybody?"},
            ],
            stop_sequences=["END"],
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
            metadata={"user_id": "me"},
        )
    assert [block.text for block in message.content if block.type == "text"] == ["Good day"]
    assert (message.type, message.role, message.model) == ("message", "assistant", "org/toy")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (2, 1, 2)
    [request] = backend.requests
    assert [(one.role, one.content) for one in request.inputs.messages] == [
        ("system", "Be brief."),
        ("user", "One\ntwo"),
        ("assistant", "three"),
        ("user", "Hello?\nAnybody?"),
    ]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 7)
    assert request.output.stop == ("END",)


async def test_a_stream_has_the_named_events_in_order():
    async with serving(ScriptedBackend(reply=cached)) as port, client(port) as api:
        async with api.messages.stream(**HELLO) as stream:
            assert [text async for text in stream.text_stream] == ["Good ", "day"]
            message = await stream.get_final_message()
        assert [block.text for block in message.content if block.type == "text"] == ["Good day"]
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 2)
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (2, 1)
        raw = await call(port, "POST", "/v1/messages", {**HELLO, "stream": True})
    events = [event.split("\n") for event in raw.body.decode().split("\n\n")[:-1]]
    assert [event[0].removeprefix("event: ") for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(json.loads(event[1].removeprefix("data: "))["type"] == event[0][7:] for event in events)
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"finish": "length"}, ("max_tokens", None)),
        ({"stop_reason": "END"}, ("stop_sequence", "END")),
        ({"stop_reason": 7}, ("end_turn", None)),
    ],
)
async def test_stop_reasons(end: dict[str, Any], expected: tuple[str, str | None]):
    def reply(request: GenerationRequest) -> list[Batch]:
        return text_batches("a", **end)

    async with serving(ScriptedBackend(reply=lambda request: [*reply(request)])) as port, client(port) as api:
        whole = await api.messages.create(**HELLO)
        async with api.messages.stream(**HELLO) as stream:
            streamed = await stream.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == expected
    assert (streamed.stop_reason, streamed.stop_sequence) == expected


async def test_an_answer_without_text_has_no_content_blocks():
    def reply(request: GenerationRequest) -> list[Any]:
        return [[SequenceUpdate(index=0, text="", token_ids=(1,), finish_reason="stop")]]

    async with serving(ScriptedBackend(reply=reply)) as port, client(port) as api:
        assert (await api.messages.create(**HELLO)).content == []
        async with api.messages.stream(**HELLO) as stream:
            assert (await stream.get_final_message()).content == []


async def test_tokens_are_counted():
    async with serving(ScriptedBackend()) as port, client(port) as api:
        count = await api.messages.count_tokens(model="org/toy", messages=HELLO["messages"], system="1234")
        assert count.input_tokens == 4 + len("Hello?")
        same = await call(port, "POST", "/v1/messages/count_tokens", {**HELLO, "temperature": 1, "stream": True})
        assert same.json == {"input_tokens": len("Hello?")}


async def test_errors_have_anthropic_s_form():
    backend = ScriptedBackend()
    async with serving(backend, api_keys="secret") as port:
        async with client(port) as api:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await api.messages.create(**HELLO)
            assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index,call-overload]
        # With a key as `x-api-key` or as a bearer token.
        async with client(port, api_key="secret") as api:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await api.messages.create(**{**HELLO, "model": "claude"})
            assert "'claude' does not exist" in str(missing.value)
            with pytest.raises(anthropic.BadRequestError):
                await api.messages.create(**HELLO, extra_body={"temperature": 3})
            backend.refusal = ServiceError("server_is_overloaded", "Too much.")
            with pytest.raises(anthropic.InternalServerError) as busy:
                await api.messages.create(**HELLO)
            assert busy.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index,call-overload]
        async with client(port, api_key=None, auth_token="secret") as api:
            backend.refusal = None
            await api.messages.create(**HELLO)
            reply = await call(port, "POST", "/v1/messages", b"{", {"x-api-key": "secret"})
    assert set(reply.json) == {"type", "error", "request_id"}
    assert reply.json["request_id"] == reply.headers["x-request-id"]


async def test_a_failure_in_a_stream_is_an_error_event():
    def reply(request: GenerationRequest) -> list[Any]:
        return [
            [SequenceUpdate(index=0, text="Good ", token_ids=(1,))],
            ServiceError("engine_failure", "The engine died."),
        ]

    async with serving(ScriptedBackend(reply=reply)) as port, client(port) as api:
        with pytest.raises(anthropic.APIStatusError, match="The engine died"):
            async with api.messages.stream(**HELLO) as stream:
                await stream.get_final_message()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_tokens": None}, "Missing required parameter: 'max_tokens'."),
        ({"messages": None}, "Missing required parameter: 'messages'."),
        ({"messages": []}, "'messages' must hold between 1 and 4095 messages."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role' must be 'user', 'assistant' or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "Missing required parameter: 'messages[0].content[0].source.type'.",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "'messages[0].content[0].type'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "'messages[0].content[0].text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]}, "unknown field 'x'"),
        (
            {"messages": [{"role": "user", "content": "", "name": "x"}]},
            "supplied: 'messages[0].name'.",
        ),
        ({"system": [{"type": "image"}]}, "Content of type 'image' is not supported yet."),
        ({"stop_sequences": ["x" * 1000]}, "'stop_sequences' must hold strings"),
        ({"tools": [{"name": "f"}]}, "Missing required parameter: 'tools[0].input_schema'."),
        ({"thinking": {"type": "on"}}, "'thinking.type' must be 'adaptive', 'enabled' or 'disabled'."),
        ({"thinking": {}}, "Missing required parameter: 'thinking.type'."),
        ({"output_config": {"format": {"type": "json_schema"}}}, "parameter: 'output_config.format.schema'."),
        ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format.type' must be 'json_schema'."),
        ({"prompt": "x"}, "Send the conversation in 'messages'."),
        ({"max_token": 7}, "Did you mean 'max_tokens'?"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], told: str):
    async with serving(ScriptedBackend(), unknown_parameters="refuse") as port:
        reply = await call(port, "POST", "/v1/messages", {**HELLO, **change})
    assert reply.status == 400
    assert told in reply.json["error"]["message"]
    assert reply.json["error"]["type"] == "invalid_request_error"
