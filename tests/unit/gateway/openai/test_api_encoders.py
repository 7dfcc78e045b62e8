"""The encoders of the other APIs: a stream says the same as the whole answer, however the output is cut."""

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.apis.anthropic.encoder import MessageEncoder
from antiphon.services.gateway.apis.ollama.encoder import LineEncoder
from antiphon.services.gateway.apis.openai.answers.answer_encoder import SnapshotEncoder
from antiphon.services.gateway.apis.openai.answers.chat_message import arguments_object
from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.output_parser import OutputParser
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.responses import response_object
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.event_log import EventLog
from antiphon.services.gateway.guests.responses.response_object import ResponseObject
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.shared.errors import ServiceError
from tests.unit.gateway.request_contexts import context, state, update

Make = Callable[[], SnapshotEncoder]
TEXTS = st.lists(st.text(max_size=8), max_size=6)
REASONS = st.sampled_from(["stop", "length"])


def responses() -> ResponseEncoder:
    return ResponseEncoder(ResponseObject(ResponsesBody(), context()), context())


MAKERS: dict[str, Make] = {
    "anthropic": lambda: MessageEncoder(context()),
    "ollama": lambda: LineEncoder(context(), "chat"),
    "responses": responses,
}


def whole(encoder: SnapshotEncoder, texts: list[str], reason: str) -> Any:
    accumulator = ChoiceAccumulator(1, 1)
    choice = accumulator.choices[0]
    for text in texts:
        choice.add(update(text))
        choice.text.append(text)
    choice.add(update(finish_reason=reason, token_ids=()))
    return json.loads(encoder.whole(state(accumulator)))


def streamed(encoder: SnapshotEncoder, texts: list[str], reason: str) -> bytes:
    accumulator = ChoiceAccumulator(1, 1)
    choice = accumulator.choices[0]
    parts = [encoder.opening(state(accumulator))]
    for number, text in enumerate([*texts, ""]):
        ends: dict[str, Any] = {"finish_reason": reason, "token_ids": ()} if number == len(texts) else {}
        choice.add(update(text, **ends))
        parts += [encoder.chunk(choice, text), encoder.flush(state(accumulator))]
    return b"".join([*parts, encoder.closing(state(accumulator))])


def events(data: bytes) -> list[Any]:
    """The events of a stream, each checked for its name."""
    found: list[Any] = []
    for one in sse.split_events(data):
        name, line = one.decode().removesuffix("\n\n").split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_second() -> Iterator[None]:
    """A response says in whole seconds when it was completed; those that are compared say the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_object, "time", SimpleNamespace(time=lambda: 1_700_000_000.0))
        yield


@given(texts=TEXTS, reason=REASONS)
def test_anthropic_s_stream_adds_up_to_the_whole_message(texts: list[str], reason: str):
    message = whole(MAKERS["anthropic"](), texts, reason)
    start, ping, *blocks, delta, stop = events(streamed(MAKERS["anthropic"](), texts, reason))
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    said = "".join(one["delta"]["text"] for one in blocks if one["type"] == "content_block_delta")
    assert said == "".join(block["text"] for block in message["content"]) == "".join(texts)
    assert [block["type"] for block in blocks if "delta" not in block] == (
        ["content_block_start", "content_block_stop"] if said else []
    )
    assert {**delta["delta"], "usage": delta["usage"]} == {name: message[name] for name in (*delta["delta"], "usage")}


@given(texts=TEXTS, reason=REASONS)
def test_ollama_s_lines_add_up_to_the_whole_answer(texts: list[str], reason: str):
    answer = whole(MAKERS["ollama"](), texts, reason)
    lines = [json.loads(line) for line in streamed(MAKERS["ollama"](), texts, reason).splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == answer["message"]["content"] == "".join(texts)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert {**lines[-1], "message": None} == {**answer, "message": None}
    assert (answer["total_duration"], answer["eval_duration"]) == (8_000_000_000, 5_000_000_000)


@given(texts=TEXTS, reason=REASONS)
def test_the_events_of_a_response_add_up_to_the_whole_response(texts: list[str], reason: str):
    response = whole(MAKERS["responses"](), texts, reason)
    found = events(streamed(MAKERS["responses"](), texts, reason))
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert found[-1]["response"] == response
    assert response["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    said = "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta")
    assert said == "".join(item["content"][0]["text"] for item in response["output"]) == "".join(texts)
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert done == response["output"]


def test_a_response_that_fails_closes_its_item_and_numbers_its_events():
    encoder, accumulator = responses(), ChoiceAccumulator(1, 1)
    choice = accumulator.choices[0]
    choice.add(update("Good "))
    data = encoder.opening(state(accumulator)) + encoder.chunk(choice, "Good ")
    found = events(data + encoder.failure(ServiceError("engine_failure", "The engine died.")))
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    *_, done, failed = found
    assert (done["type"], failed["type"]) == ("response.output_item.done", "response.failed")
    assert failed["response"]["output"] == [done["item"]]
    assert (done["item"]["status"], done["item"]["content"][0]["text"]) == ("incomplete", "Good ")


EVENTS = st.lists(
    st.one_of(
        st.builds(Content, st.text(min_size=1, max_size=4)),
        st.lists(st.sampled_from(['{"a"', ": 1", "}", "é"]), max_size=4),
    ),
    max_size=5,
)
"""Texts, and calls as the pieces of their arguments."""
ANSWER = AnswerFormat(choice=ToolChoice(mode="auto"), tool_format=TOOL_FORMATS["hermes"])


def spread(parts: list[Any]) -> list[Event]:
    """The events of an output with these parts."""
    found: list[Event] = []
    calls = 0
    for part in parts:
        if isinstance(part, Content):
            found.append(part)
            continue
        found += [CallStart(calls, f"f{calls}"), *(CallArguments(calls, text) for text in part)]
        calls += 1
    return found


def of_events(encoder: SnapshotEncoder, events: list[Event], size: int = 0) -> Any:
    """The answer of an encoder: whole, or its stream, which gets `size` events at a time."""
    accumulator = ChoiceAccumulator(1, 1)
    choice = accumulator.choices[0]
    choice.parser = OutputParser()
    if not size:
        choice.events = [*events]
        choice.add(update(finish_reason="stop"))
        return json.loads(encoder.whole(state(accumulator)))
    parts = [encoder.opening(state(accumulator))]
    for first in range(0, len(events), size):
        choice.events = events[first : first + size]
        parts.append(encoder.chunk(choice, ""))
    choice.add(update(finish_reason="stop"))
    return b"".join([*parts, encoder.chunk(choice, ""), encoder.closing(state(accumulator))])


@given(parts=EVENTS, size=st.integers(1, 4))
def test_streams_with_calls_add_up_to_the_whole_answer(parts: list[Any], size: int):
    given, asked = spread(parts), context(answer_format=ANSWER)
    text = "".join(part.text for part in parts if isinstance(part, Content))
    arguments = ["".join(part) for part in parts if not isinstance(part, Content)]
    names = [f"f{number}" for number in range(len(arguments))]
    objects = [arguments_object(one or "{}") for one in arguments]

    blocks = of_events(MessageEncoder(asked), given)["content"]
    pieces: dict[int, str] = {}
    starts: list[Any] = []
    for event in events(of_events(MessageEncoder(asked), given, size)):
        if event["type"] == "content_block_start":
            starts.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            piece = event["delta"].get("text") or event["delta"].get("partial_json")
            pieces[event["index"]] = pieces.get(event["index"], "") + piece
    assert [(one["type"], one.get("id")) for one in starts] == [(one["type"], one.get("id")) for one in blocks]
    assert "".join(one["text"] for one in blocks if one["type"] == "text") == text
    assert [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"] == [
        *zip(names, objects, strict=True)
    ]
    assert [pieces.get(index, "") for index, one in enumerate(starts) if one["type"] == "tool_use"] == arguments

    message = of_events(LineEncoder(asked, "chat"), given)["message"]
    lines = [json.loads(line)["message"] for line in of_events(LineEncoder(asked, "chat"), given, size).splitlines()]
    assert "".join(line["content"] for line in lines) == message["content"] == text
    called = [call for line in lines for call in line.get("tool_calls", ())]
    assert called == message.get("tool_calls", [])
    assert [call["function"]["arguments"] for call in called] == objects

    response = of_events(ResponseEncoder(ResponseObject(ResponsesBody(), asked), asked), given)
    stream = events(of_events(ResponseEncoder(ResponseObject(ResponsesBody(), asked), asked), given, size))
    assert stream[-1]["response"] == response
    assert [one["item"] for one in stream if one["type"] == "response.output_item.done"] == response["output"]
    assert [one["arguments"] for one in response["output"] if one["type"] == "function_call"] == arguments
    done = [one for one in stream if one["type"] == "response.function_call_arguments.done"]
    assert [(one["name"], one["arguments"]) for one in done] == [*zip(names, arguments, strict=True)]


@given(batches=st.lists(st.integers(0, 3), max_size=8), first=st.integers(0, 12))
def test_a_log_gives_every_reader_the_events_from_where_it_asks(batches: list[int], first: int):
    written = [[b"data: %d.%d\n\n" % (number, one) for one in range(size)] for number, size in enumerate(batches)]

    async def play() -> list[bytes]:
        log = EventLog()
        reader = asyncio.create_task(collect(log))
        for number, batch in enumerate(written):
            await (log.end if number == len(written) - 1 else log.write)(b"".join(batch))
            await asyncio.sleep(0)
        if not written:
            await log.end(b"")
        late = await collect(log)
        assert await reader == late
        return sse.split_events(late)

    async def collect(log: EventLog) -> bytes:
        return b"".join([data async for data in log.read(first)])

    assert asyncio.run(play()) == [one for batch in written for one in batch][first:]


@pytest.mark.parametrize("name", MAKERS)
def test_encoders_put_no_line_breaks_into_a_stream_s_data(name: str):
    data = streamed(MAKERS[name](), ["a\n\nb\r\n", "\u2028data: x"], "stop").decode()
    if name == "ollama":
        assert len(data.split("\n")) == 4
    else:
        assert all(len(one.split("\n")) == 2 for one in data.split("\n\n")[:-1])
