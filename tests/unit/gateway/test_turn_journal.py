"""A turn continues behind each of its events: what the journal tells, and which events come again."""

import json
import random
from typing import Any

import pytest

from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.responses.server_tools.items import conversation, item_id, step_of, steps
from antiphon.services.gateway.guests.turns.journal import progress_of
from antiphon.services.gateway.guests.turns.known import KnownEvents, told_by
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.conversation import Turn


def event(kind: str, number: int = 0, **fields: Any) -> bytes:
    data = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return sse.named_event(data["type"].encode(), json.dumps(data).encode())


def made(step: int, number: int, status: str = "completed", **fields: Any) -> dict[str, Any]:
    item = {"id": item_id("mcp_call", "abc", step, number), "type": "mcp_call", "server_label": "s", "name": "f"}
    return {**item, "arguments": "{}", "status": status, "output": "out", "error": None, **fields}


def deltas(text: str, chance: random.Random, index: int = 0) -> list[bytes]:
    """A text in deltas of any lengths."""
    found: list[bytes] = []
    while text:
        size = chance.randint(1, len(text))
        found.append(event("output_text.delta", output_index=index, delta=text[:size]))
        text = text[size:]
    return found


def step_events(chance: random.Random) -> list[bytes]:
    return [
        event("output_item.added", output_index=0, item={"type": "message"}),
        *deltas("Let me see what there is.", chance),
        event("output_item.done", output_index=0, item={"type": "message"}),
        event("output_item.added", output_index=1, item={"type": "message"}),
        *deltas("And more.", chance, 1),
        event("output_item.done", output_index=1, item={"type": "message"}),
    ]


def told(events: list[bytes]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for one in map(told_by, events):
        kind, index, text = one["type"], one["output_index"], one.get("delta", "")
        if found and text and found[-1][:2] == (kind, index):
            text = found.pop()[2] + text
        found.append((kind, index, text))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_part_that_is_run_again_adds_what_was_missing(seed: int) -> None:
    chance = random.Random(seed)
    first, again = step_events(chance), step_events(chance)
    for cut in range(len(first) + 1):
        known = KnownEvents(first[:cut], 10 + cut)
        rest: list[bytes] = []
        left = list(again)
        while left:
            size = chance.randint(1, len(left))
            rest += sse.split_events(known.rest(b"".join(left[:size])))
            left = left[size:]
        assert known.is_over
        assert told(first[:cut] + rest) == told(first)
        assert [told_by(one)["sequence_number"] for one in rest] == list(range(10 + cut, known.next_number))


def test_a_part_that_comes_out_differently_is_refused() -> None:
    chance = random.Random(1)
    known = step_events(chance)
    for other in (
        [known[0], event("output_text.delta", output_index=0, delta="Let us")],
        [event("output_item.done", output_index=0, item={})],
        [known[0], event("output_item.done", output_index=0, item={})],
    ):
        with pytest.raises(ServiceError, match="came out differently"):
            KnownEvents(known, len(known)).rest(b"".join(other))


def test_the_journal_tells_what_was_sent_and_what_has_ended() -> None:
    opening = [event("created"), event("queued"), event("in_progress")]
    open_call, done = made(1, 0, "in_progress", output=None), made(1, 0)
    announced = [
        event("output_item.added", output_index=0, item={**open_call, "arguments": ""}),
        event("mcp_call_arguments.delta", output_index=0, delta="{}"),
        event("mcp_call_arguments.done", output_index=0, arguments="{}"),
    ]
    sent = event("mcp_call.in_progress", output_index=0, usage={"output_tokens": 3})
    ended = [event("mcp_call.completed", output_index=0), event("output_item.done", output_index=0, item=done)]
    events = [*opening, *announced, sent, *ended]
    states = [progress_of(events[:count]) for count in range(len(events) + 1)]
    assert [one.num_events for one in states] == [0, 1, 2, 3, 3, 3, 3, 6, 6, 9]
    assert [one.sent for one in states] == [None] * 7 + [0, 0, None]
    assert [one.has_begun for one in states] == [False] * 3 + [True] * 7
    assert states[6].items == []
    assert states[7].items == [open_call]
    assert (states[9].items, states[9].usage) == ([done], {"output_tokens": 3})


def test_calls_of_one_step_are_one_turn_of_the_model() -> None:
    text = {"type": "message", "status": "completed", "content": [{"text": "Hm."}]}
    listed = {"type": "mcp_list_tools"}
    output = [listed, text, made(1, 1), made(1, 2), made(2, 3), text, made(3, 5, "incomplete")]
    assert [len(one) for one in steps(output)] == [3, 1, 2]
    assert step_of(output[4]) == 2
    turns = conversation([Turn(role="user", content="Go.")], output)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [len(turn.tool_calls or ()) for turn in turns] == [0, 2, 0, 0, 1, 0, 1]


def test_the_result_of_an_approved_call_takes_the_place_of_the_approval() -> None:
    answered = Turn(role="tool", tool_call_id="mcpr_x", content="")
    approved = made(0, 1, approval_request_id="mcpr_x")
    asked = Turn(role="user", content="And then?")
    turns = conversation([answered, asked], [approved])
    assert [(turn.role, turn.content) for turn in turns] == [("tool", "out"), ("user", "And then?")]
