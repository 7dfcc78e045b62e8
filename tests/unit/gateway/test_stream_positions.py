"""Positions of streams: their form, and that a stream goes on exactly behind any of its events, however it is made."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.apis.anthropic.encoder import MessageEncoder
from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder
from antiphon.services.gateway.apis.openai.answers.choices import Choice, ChoiceAccumulator
from antiphon.services.gateway.apis.openai.answers.stream_encoder import OpenAIEncoder
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.reasoning_formats import REASONING_FORMATS
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.response_object import ResponseObject
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.services.gateway.guests.resume.cut import SequenceCut
from antiphon.services.gateway.guests.resume.position import START, Part, Position, Shown, parse
from antiphon.services.gateway.guests.resume.positioned import PositionedEvents
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.errors import ServiceError
from tests.unit.gateway.request_contexts import ID, context, position, state

TEXT = '<think>so it is</think>Hello <tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call> bye <tool_'


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("0", START),
        ("", START),
        ("o2", Position(opening=2)),
        ("12.40", Position(shown=(Shown(12, 40),))),
        ("12.40e,9.31", Position(shown=(Shown(12, 40, True), Shown(9, 31)))),
        ("12.40,9.31-1.14.47e.2", Position(shown=(Shown(12, 40), Shown(9, 31)), part=Part(1, Shown(14, 47, True), 2))),
        ("c1", Position(closing=1)),
        ("o1@3", Position(opening=1, number=3)),
        ("12.40@17", Position(shown=(Shown(12, 40),), number=17)),
        ("12.40-0.14.47.2@9", Position(shown=(Shown(12, 40),), part=Part(0, Shown(14, 47), 2), number=9)),
    ],
)
def test_a_position_is_read(text: str, right: Position):
    assert parse(text, "from") == right


@pytest.mark.parametrize("text", ["x", "12", "12.4,", "012.4", "1.2-1.3.4.1", "-1.2", "1.2e9", "9" * 12 + ".1", "é.1"])
def test_another_position_is_refused(text: str):
    with pytest.raises(ServiceError, match="'from' has no position"):
        parse(text, "from")


class Stream:
    """A stream with ids, by default one of `OpenAIEncoder`."""

    def __init__(self, one: RequestContext, events: PositionedEvents, encoder: AnswerEncoder | None = None) -> None:
        self.accumulator = ChoiceAccumulator(1, one.request.n, keep_token_ids=one.return_token_ids)
        if one.answer_format is not None:
            for choice in self.accumulator.choices:
                choice.parser = one.answer_format.parser("")
        self.encoder, self.events = encoder or OpenAIEncoder(one), events
        self.state = state(self.accumulator)

    def take(self, update: SequenceUpdate) -> tuple[Choice, str]:
        choice = self.accumulator.add(update)
        return choice, choice.separate(update)

    def run(self, batches: list[list[SequenceUpdate]]) -> list[bytes]:
        data = self.events.opening(self.encoder, self.state)
        for batch in batches:
            data += self.events.output(self.encoder, batch, self.take)
        return sse.split_events(data + self.events.closing(self.encoder, self.state))


def told(events: list[bytes]) -> Any:
    """What events say, without their ids and how they are divided."""
    found: dict[int, Any] = {}
    last: list[Any] = []
    for event in events:
        data = event.split(b"data: ")[1]
        if data == b"[DONE]\n\n":
            last.append("done")
            continue
        chunk = json.loads(data)
        if usage := chunk.get("usage"):
            # Estimated from the text that arrives together with the end of the reasoning.
            del usage["completion_tokens_details"]
            last.append(usage)
        for choice in chunk["choices"]:
            one = found.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "arguments": "", "calls": []}
            )
            delta = choice["delta"]
            one["text"] += f"[{delta['role']}]" if "role" in delta else ""
            one["text"] += "".join(delta.get(name) or "" for name in ("reasoning_content", "content"))
            for call in delta.get("tool_calls", ()):
                one["calls"] += [call["id"]] if "id" in call else []
                one["arguments"] += call["function"].get("arguments", "")
            one["ids"] += choice.get("token_ids") or []
            one["logprobs"] += (choice["logprobs"] or {}).get("content", ())
            one["text"] += f"[{choice['finish_reason']}]" if choice["finish_reason"] else ""
    return found, last


def outputs(data: st.DataObject, n: int, *, logprobs: bool) -> list[SequenceUpdate]:
    """Updates of all sequences in some order: a token is some characters, or none, or all of what is left."""
    sequences: list[list[tuple[int, str]]] = []
    for index in range(n):
        ends = sorted(data.draw(st.lists(st.integers(0, len(TEXT)), max_size=12)))
        texts = [TEXT[start:end] for start, end in zip([0, *ends], [*ends, len(TEXT)], strict=True)]
        sequences.append([(100 * index + number, text) for number, text in enumerate(texts)])
    order = [index for index, tokens in enumerate(sequences) for _ in tokens]
    order = data.draw(st.permutations(order))
    updates: list[SequenceUpdate] = []
    for index in order:
        token_id, text = sequences[index].pop(0)
        finish = None if sequences[index] else "stop"
        told = (position(text, -1.0),) if logprobs else ()
        updates.append(
            SequenceUpdate(index=index, text=text, token_ids=(token_id,), logprobs=told, finish_reason=finish)
        )
    return updates


def batches(data: st.DataObject, updates: list[SequenceUpdate]) -> list[list[SequenceUpdate]]:
    """The updates, some of which arrive together."""
    found: list[list[SequenceUpdate]] = [[]]
    for update in updates:
        if found[-1] and data.draw(st.booleans()):
            found.append([])
        found[-1].append(update)
    return found


def computed_again(
    data: st.DataObject, updates: list[SequenceUpdate], accepted: tuple[tuple[int, ...], ...], *, logprobs: bool
) -> tuple[tuple[tuple[int, ...], ...], list[SequenceUpdate]]:
    """The tokens of each sequence that the engine got as output, and the updates of the run that goes on with them.

    It repeats the text of those tokens with the next one, not the tokens.
    """
    replayed = tuple(() if logprobs else of[: data.draw(st.integers(0, len(of) - 1))] for of in accepted)
    again: list[SequenceUpdate] = []
    texts = [""] * len(accepted)
    for update in updates:
        text = texts[update.index] + update.text
        if update.token_ids[0] in replayed[update.index]:
            texts[update.index] = text
            continue
        texts[update.index] = ""
        again.append(
            SequenceUpdate(
                index=update.index,
                text=text,
                token_ids=update.token_ids,
                logprobs=update.logprobs,
                finish_reason=update.finish_reason,
            )
        )
    return replayed, again


@given(st.data())
def test_a_stream_goes_on_exactly_behind_each_of_its_events(data: st.DataObject):
    n, logprobs, parsed = data.draw(st.integers(1, 3)), data.draw(st.booleans()), data.draw(st.booleans())
    form = AnswerFormat(
        choice=ToolChoice(mode="auto"),
        tool_format=TOOL_FORMATS["hermes"],
        reasoning_format=REASONING_FORMATS["deepseek_r1"],
    )
    one = context(
        n=n,
        logprobs=0 if logprobs else None,
        return_token_ids=True,
        include_usage=True,
        answer_format=form if parsed else None,
    )
    updates = outputs(data, n, logprobs=logprobs)
    first = Stream(one, PositionedEvents(ID, n)).run(batches(data, updates))
    ids = [event.split(b"\n")[0].decode() for event in first]
    assert len(set(ids)) == len(ids)
    number = data.draw(st.integers(0, len(first) - 1))
    where = parse(ids[number].removeprefix(f"id: {ID}:"), "from")
    accepted = tuple(tuple(u.token_ids[0] for u in updates if u.index == index) for index in range(n))
    replayed, again = computed_again(data, updates, accepted, logprobs=logprobs)
    rest = Stream(one, PositionedEvents(ID, n, where, replayed, accepted)).run(batches(data, again))
    assert told(first[: number + 1] + rest) == told(first)


def events_told(events: list[bytes]) -> tuple[list[Any], list[int]]:
    """What named events say, with neighbouring deltas joined; and their numbers, if they have any."""
    found: list[Any] = []
    numbers: list[int] = []
    for event in events:
        told = json.loads(event.split(b"data: ")[1])
        told.get("response", {}).pop("completed_at", None)  # each run has its own
        if "sequence_number" in told:
            numbers.append(told.pop("sequence_number"))
        delta = told.get("delta")
        text = next((name for name in ("text", "partial_json") if isinstance(delta, dict) and name in delta), None)
        place = {name: value for name, value in told.items() if name not in ("delta", "logprobs")}
        said = delta[text] if text and isinstance(delta, dict) else delta
        if not isinstance(said, str):
            found.append(told)
        elif found and isinstance(found[-1], tuple) and found[-1][0] == place:
            found[-1] = (place, found[-1][1] + said, found[-1][2] + told.get("logprobs", []))
        else:
            found.append((place, said, told.get("logprobs", [])))
    return found, numbers


@given(st.data())
def test_events_of_other_apis_go_on_behind_each_of_them_and_with_their_numbers(data: st.DataObject):
    numbered, parsed = data.draw(st.booleans()), data.draw(st.booleans())
    # Which log probabilities are those of a call depends on how the output arrives, in any run.
    logprobs = numbered and not parsed and data.draw(st.booleans())
    form = AnswerFormat(choice=ToolChoice(mode="auto"), tool_format=TOOL_FORMATS["hermes"])
    one = context(logprobs=0 if logprobs else None, answer_format=form if parsed else None)

    def encoder() -> AnswerEncoder:
        return ResponseEncoder(ResponseObject(ResponsesBody(), one), one) if numbered else MessageEncoder(one)

    updates = outputs(data, 1, logprobs=logprobs)
    first = Stream(one, PositionedEvents(ID, 1), encoder()).run(batches(data, updates))
    number = data.draw(st.integers(0, len(first) - 1))
    where = parse(first[number].split(b"\n")[0].decode().removeprefix(f"id: {ID}:"), "from")
    accepted = (tuple(update.token_ids[0] for update in updates),)
    replayed, again = computed_again(data, updates, accepted, logprobs=logprobs)
    rest = Stream(one, PositionedEvents(ID, 1, where, replayed, accepted), encoder()).run(batches(data, again))
    right, _ = events_told(first)
    found, numbers = events_told(first[: number + 1] + rest)
    assert found == right
    assert numbers == list(range(len(numbers)))
    assert len(numbers) in (0, number + 1 + len(rest))


def test_a_position_of_a_stream_whose_events_have_no_numbers_is_refused_by_one_whose_events_have_them():
    for where, encoder in (
        (Position(shown=(Shown(1, 1),)), ResponseEncoder(ResponseObject(ResponsesBody(), context()), context())),
        (Position(shown=(Shown(1, 1),), number=1), MessageEncoder(context())),
    ):
        stream = Stream(context(), PositionedEvents(ID, 1, where), encoder)
        with pytest.raises(ServiceError, match="numbers of events"):
            stream.run([])


def test_tokens_that_differ_from_those_of_the_former_run_end_the_stream():
    stream = Stream(context(), PositionedEvents(ID, 1, Position(shown=(Shown(2, 2),)), ((1,),), ((1, 2, 3),)))
    with pytest.raises(ServiceError, match="differs from what the stream has shown"):
        stream.run([[SequenceUpdate(index=0, text="abc", token_ids=(2, 4))]])


@pytest.mark.parametrize(("first_run", "told"), [(3, 3), (None, 9)])
def test_a_resumed_stream_keeps_the_number_of_cached_tokens_of_its_first_run(first_run: int | None, told: int):
    cut = SequenceCut(0, (), (1, 2), Position(shown=(Shown(1, 1),)), first_run)
    pieces = cut.push(SequenceUpdate(index=0, text="ab", token_ids=(1, 2), num_cached_tokens=9))
    assert [piece.update.num_cached_tokens for piece in pieces] == [told, told]


def test_a_position_behind_the_end_is_refused():
    stream = Stream(context(), PositionedEvents(ID, 1, Position(shown=(Shown(9, 9),))))
    with pytest.raises(ServiceError, match="behind the end"):
        stream.run([[SequenceUpdate(index=0, text="abc", token_ids=(1,), finish_reason="stop")]])


def test_a_position_of_another_number_of_choices_is_refused():
    with pytest.raises(ServiceError, match="of 2 choices"):
        PositionedEvents(ID, 1, Position(shown=(Shown(1, 1), Shown(1, 1))))
