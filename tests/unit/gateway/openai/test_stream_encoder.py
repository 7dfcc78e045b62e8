import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.answers.chat_message import MessageEncoder
from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.answers.stream_encoder import ChunkEncoder, OpenAIEncoder
from antiphon.services.gateway.apis.openai.request_context import Kind, RequestContext
from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.reasoning_formats import REASONING_FORMATS
from antiphon.services.gateway.path.generation import SequenceUpdate
from tests.unit.gateway.request_contexts import ID, context, position, state, update


def play(one: RequestContext, *updates: SequenceUpdate) -> list[Any]:
    """The chunks of a stream, decoded."""
    encoder, accumulator = (
        ChunkEncoder(one),
        ChoiceAccumulator(len(one.echoes), one.request.n, keep_token_ids=one.return_token_ids),
    )
    data = encoder.opening()
    for item in updates:
        choice = accumulator.choices[item.index]
        choice.add(item)
        data += encoder.chunk(choice, item.text)
    if one.include_usage:
        data += encoder.summary(usage=accumulator.usage(3))
    return decode(data)


def decode(data: bytes, *, whole: bool = True) -> list[Any]:
    assert not data or data.endswith(b"\n\n")
    events = data.decode().split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    # Some clients cut off five characters and parse the rest.
    return [json.loads(event[5:]) if whole or event != "data: [DONE]" else event[6:] for event in events]


def deltas(chunks: list[Any]) -> list[Any]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.spec("S-API-086", "S-API-087", "S-API-089", "S-API-091")
def test_a_chat_begins_with_the_role_and_ends_with_an_empty_delta():
    chunks = play(context(), update("Good "), update("day"), update(finish_reason="stop"))
    assert deltas(chunks) == [{"role": "assistant"}, {"content": "Good "}, {"content": "day"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    for chunk in chunks:
        assert chunk["id"] == f"chatcmpl-{ID}"
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["created"], chunk["model"]) == (1_700_000_000, "toy")
        assert "usage" not in chunk


@pytest.mark.spec("S-API-001", "S-API-071", "S-API-089")
def test_a_completion_carries_text_and_its_end_together():
    chunks = play(context("completion"), update("Good "), update("day", finish_reason="length"))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Good ", "day"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(f"cmpl-{ID}", "text_completion")}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_token_ids_come_with_their_text_or_without_any_when_they_are_asked_for(kind: Kind):
    updates = [
        update("Good", token_ids=(5, 6)),
        update("", token_ids=(7,), logprobs=(position("", -1.0),)),
        update("", token_ids=()),
        update("", token_ids=(8,), finish_reason="length"),
    ]
    chunks = play(context(kind, return_token_ids=True, logprobs=0), *updates)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["token_ids"] for choice in choices if "token_ids" in choice] == [[5, 6], [7], [8]]
    assert choices[-1]["finish_reason"] == "length"
    assert all("token_ids" not in choice for chunk in play(context(kind), *updates) for choice in chunk["choices"])


@pytest.mark.spec("S-API-077", "S-API-078")
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_end_of_each_choice_tells_length_and_log_probability_unasked(kind: Kind):
    updates = [
        update("kö", 0, cumulative_logprob=-1.0),
        update("😀", 1, finish_reason="stop", cumulative_logprob=-2.5),
        update("ln", 0, finish_reason="length", cumulative_logprob=-3.0),
    ]
    choices = [choice for chunk in play(context(kind, n=2), *updates) for choice in chunk["choices"]]
    told = {one["index"]: (one["sentence_length"], one["cum_log_probs"]) for one in choices if one["finish_reason"]}
    assert told == {0: (4, -3.0), 1: (1, -2.5)}
    assert all(("sentence_length" in one) == (one["finish_reason"] is not None) for one in choices)
    [*_, last] = play(context("completion", echoes=("abc",)), update("d", finish_reason="stop"))
    assert last["choices"][0]["sentence_length"] == 4


def test_the_last_chunk_names_the_stop_string():
    chunks = play(context("completion"), update("x", finish_reason="stop", stop_reason="\n"))
    assert chunks[0]["choices"][0]["stop_reason"] == "\n"
    assert deltas(play(context(), update("x", finish_reason="stop", stop_reason=7)))[1:] == [{"content": "x"}, {}]


def test_each_event_of_a_parser_is_a_chunk_and_the_first_has_what_came_with_it():
    answer = AnswerFormat(choice=ToolChoice(mode="auto"), tool_format=TOOL_FORMATS["hermes"])
    one = replace(context(return_token_ids=True, logprobs=0), answer_format=answer)
    encoder, choice = ChunkEncoder(one), ChoiceAccumulator(1, 1, keep_token_ids=True).choices[0]
    choice.parser = answer.parser("")
    choice.add(update("", token_ids=(1, 2), logprobs=(position("<tool_call>", -1.0),)))
    assert encoder.chunk(choice, "") == b""
    choice.add(update("", token_ids=(3,)))
    choice.events = [CallStart(0, "f"), CallArguments(0, "{")]
    first, second = decode(encoder.chunk(choice, ""))
    assert first["choices"][0]["token_ids"] == [1, 2, 3]
    assert len(first["choices"][0]["logprobs"]["content"]) == 1
    assert first["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert "token_ids" not in second["choices"][0]
    assert second["choices"][0] == {
        "index": 0,
        "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        "logprobs": None,
        "finish_reason": None,
    }
    choice.add(update("", token_ids=(4,), finish_reason="length"))
    rest, end = decode(encoder.chunk(choice, ""))
    assert (rest["choices"][0]["delta"], rest["choices"][0]["token_ids"]) == ({}, [4])
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")


@given(st.data())
def test_whole_and_streamed_messages_are_equal_for_any_output(data: st.DataObject):
    pieces = ["<think>", "</think>", "\n", "Hm", "<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    answer = AnswerFormat(
        choice=ToolChoice(mode="auto", parallel=data.draw(st.booleans())),
        tool_format=TOOL_FORMATS["hermes"],
        reasoning_format=REASONING_FORMATS["qwen3"],
        show_reasoning=data.draw(st.booleans()),
    )
    one = replace(context(), answer_format=answer)
    encoder, messages = ChunkEncoder(one), MessageEncoder(answer, ID)
    streamed, whole = (ChoiceAccumulator(1, 1).choices[0] for _ in range(2))
    streamed.parser, whole.parser = answer.parser(""), answer.parser("")
    chunks: list[Any] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        item = update(
            text[start:end], finish_reason="stop" if end == len(text) and start == (cuts or [0])[-1] else None
        )
        if streamed.finish_reason is None:
            streamed.add(item)
            chunks += decode(encoder.chunk(streamed, streamed.separate(item)))
    item = update(text, finish_reason="stop")
    whole.add(item)
    assert whole.separate(item) == ""
    message = messages.message(0, whole.events)
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in deltas(chunks):
        for key in ("content", "reasoning"):
            found[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found["calls"].append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                found["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert found["content"] == (message["content"] or "")
    assert found["reasoning"] == message.get("reasoning", "") == message.get("reasoning_content", "")
    assert found["calls"] == message.get("tool_calls", [])
    assert chunks[-1]["choices"][0]["finish_reason"] == ("tool_calls" if found["calls"] else "stop")
    assert json.dumps(chunks).count('"content"') == sum("content" in delta for delta in deltas(chunks))


def test_an_update_without_text_is_not_sent():
    assert play(context("completion"), update(""), update("a")) == play(context("completion"), update("a"))


@pytest.mark.spec("S-API-035", "S-API-090")
def test_usage_comes_last_and_is_null_before():
    chunks = play(context(include_usage=True), update("a", num_cached_tokens=2), update("b", finish_reason="stop"))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.spec("S-API-087", "S-API-091")
def test_no_chunk_mentions_content_without_text_behind_it():
    encoder, accumulator = ChunkEncoder(context(include_usage=True)), ChoiceAccumulator(1, 1)
    accumulator.choices[0].add(update("", finish_reason="stop"))
    data = encoder.opening() + encoder.chunk(accumulator.choices[0], "") + encoder.summary(usage=accumulator.usage(1))
    assert b"content" not in data


def test_each_choice_has_a_role_an_index_and_an_end():
    updates = [
        update("a", 0),
        update("b", 1),
        update("c", 1, finish_reason="stop"),
        update("", 0, finish_reason="stop"),
    ]
    chunks = play(context(n=2), *updates)
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, text in ((0, "a"), (1, "bc")):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant"}
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert own[-1]["delta"] == {}


@pytest.mark.spec("S-API-027")
def test_an_echo_comes_before_the_text():
    one = context("completion", n=2, prompts=2, echoes=("p", "q"))
    chunks = play(one, *(update("a", index, finish_reason="stop") for index in range(4)))
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)]
    assert texts == ["pa", "pa", "qa", "qa"]


def test_logprobs_of_tokens_without_text_wait_for_the_next_text():
    one = context("completion", logprobs=1)
    first, second = position("a", -1.0, ("a", -1.0)), position("b", -2.0, ("c", -0.5))
    chunks = play(one, update("", logprobs=(first,)), update("ab", logprobs=(second,)), update(finish_reason="stop"))
    assert chunks[0]["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -1.0}, {"c": -0.5, "b": -2.0}],
        "text_offset": [0, 1],
    }
    assert chunks[1]["choices"][0]["logprobs"] is None


def test_offsets_go_on_from_chunk_to_chunk():
    one = context("completion", logprobs=0)
    updates = [update(text, logprobs=(position(text, -1.0),)) for text in ("abc", "d", "e")]
    chunks = play(one, *updates)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [3], [4]]


def test_logprobs_that_are_left_at_the_end_are_sent():
    chunks = play(context(logprobs=0), update("", logprobs=(position("é", -1.0),), finish_reason="length"))
    assert chunks[1]["choices"][0]["logprobs"] == {
        "content": [{"token": "é", "logprob": -1.0, "bytes": [0xC3, 0xA9], "top_logprobs": []}]
    }
    assert deltas(chunks)[-1] == {}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_tokens_in_log_probabilities_are_ids_when_they_are_asked_for(kind: Kind):
    [chunk] = play(context(kind, logprobs=1, tokens_as_ids=True), update("a", logprobs=(position("a", -1.0),)))[-1:]
    assert '"token_id:1"' in json.dumps(chunk["choices"][0]["logprobs"])


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_every_chunk_has_the_token_counts_so_far_when_they_are_asked_for(kind: Kind):
    encoder, accumulator = OpenAIEncoder(context(kind, n=2, continuous_usage=True)), ChoiceAccumulator(1, 2)
    first, data = state(accumulator), b""
    for number, item in enumerate((update("a"), update("b", 1), update("c", 1, finish_reason="stop"))):
        choice = accumulator.choices[item.index]
        choice.add(item)
        data += (b"" if number else encoder.opening(first)) + encoder.chunk(choice, item.text)
    *chunks, done = decode(data + encoder.closing(first), whole=False)
    assert done == "[DONE]"
    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counts[-1] == (3, 3)
    assert sorted(counts) == counts
    before_any_token = {(3, 0)} if kind == "chat" else set[tuple[int, int]]()
    assert set(counts) == {*before_any_token, (3, 1), (3, 2), (3, 3)}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_first_chunk_of_a_choice_has_the_ids_of_the_prompt_when_token_ids_are_asked_for(kind: Kind):
    encoder, accumulator = OpenAIEncoder(context(kind, n=2, return_token_ids=True)), ChoiceAccumulator(1, 2)
    first, second = decode(encoder.opening(state(accumulator)), whole=False)
    for index, chunk in enumerate((first, second)):
        holder = chunk["choices"][0] if kind == "completion" else chunk
        assert (chunk["choices"][0]["index"], holder["prompt_token_ids"]) == (index, [1, 2, 3])
    assert not OpenAIEncoder(context("completion")).opening(state(accumulator))


def test_a_stream_ends_with_its_times_when_they_are_asked_for():
    accumulator = ChoiceAccumulator(1, 1)
    for include_usage in (True, False):
        encoder = OpenAIEncoder(context(timings=True, include_usage=include_usage))
        summary, done = decode(encoder.closing(state(accumulator)), whole=False)
        assert (summary["choices"], done) == ([], "[DONE]")
        assert set(summary["timings"]) >= {"queue_s", "prefill_s", "decode_s"}
        assert ("usage" in summary) == include_usage


@given(st.lists(st.text(max_size=8), max_size=8), st.sampled_from(["completion", "chat"]), st.booleans())
def test_the_texts_of_the_chunks_are_the_text(pieces: list[str], kind: Any, include_usage: bool):
    one = context(kind, include_usage=include_usage)
    chunks = play(one, *(update(piece) for piece in pieces), update(finish_reason="stop"))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(c.get("text", "") or c.get("delta", {}).get("content", "") for c in choices) == "".join(pieces)
    assert choices[-1]["finish_reason"] == "stop"
