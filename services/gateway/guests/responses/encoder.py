"""Encodes the answers of `POST /v1/responses`: one response, whole or as a stream of numbered events. Pure.

A response consists of output items. A stream is `response.created`, (in the background `response.queued`,)
`response.in_progress`, then the events of each item, and at the end the event of the response's last state with the
whole response. Every event has the next `sequence_number`, from 0.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.chat_message import answer_events, arguments_object
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.answers.logprobs import chat_logprobs
from antiphon.services.gateway.apis.openai.bodies.sealed import seal
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.responses.response_object import FINAL, ResponseObject, Status, usage
from antiphon.services.gateway.guests.responses.tools import INPUT, Kind, Tools, names_of
from antiphon.shared.errors import ServiceError

Logprobs = list[dict[str, Any]]
"""Log probabilities in OpenAI's format, one object for each token."""
TAKEN = "stream_taken"
"""Code of the error that ends a connection but not the response."""
CALLS: dict[Kind, tuple[str, str]] = {
    "function": ("fc_", "function_call"),
    "custom": ("ctc_", "custom_tool_call"),
    "local_shell": ("lsh_", "local_shell_call"),
}
"""Prefix of the id and type of the item of a call, by the kind of its tool."""
_encode = msgspec.json.Encoder().encode
_DELTA = b"response.output_text.delta"


class EventEncoder:
    """Encodes events and numbers them."""

    def __init__(self) -> None:
        self.next_number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """Returns one event."""
        data = {"type": kind, "sequence_number": self._number(), **fields}
        return sse.named_event(kind.encode(), _encode(data))

    def delta(self, head: bytes, text: str, logprobs: Logprobs) -> bytes:
        """Returns a text delta. `head`: the event's data up to the text."""
        told = _encode(text) + b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]")
        return sse.named_event(_DELTA, head + told + b',"sequence_number":%d}' % self._number())

    def _number(self) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        return number


class OutputItems:
    """The output items of one response and the events that describe them. At most one item is open, the last one.

    An item is a message, the model's reasoning, or a call of a tool.
    """

    def __init__(
        self, events: EventEncoder, request_id: str, tools: Tools, *, summarizes: bool = False, seals: bool = False
    ) -> None:
        """`summarizes`: whether reasoning has its text; `seals`: whether it has a form that a client can send back."""
        self._events = events
        self._request_id = request_id
        self._tools = tools
        self._summarizes, self._seals = summarizes, seals
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The open item, without its text or arguments; None if no item is open."""
        self._text: list[str] = []
        """Text of the open message or reasoning, or arguments of the open call."""
        self._logprobs: Logprobs = []
        """Log probabilities of the open message."""
        self._head = b""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items so far; the open one is `in_progress`."""
        return self._done if self._open is None else [*self._done, self._item("in_progress")]

    @property
    def has_open_message(self) -> bool:
        """Whether the open item is a message."""
        return self._kind == "message"

    @property
    def _kind(self) -> str:
        return "" if self._open is None else self._open["type"]

    def add_text(self, text: str, logprobs: Logprobs) -> bytes:
        """Returns the events that append to the open message. If no message is open, they begin one."""
        begun = b"" if self.has_open_message else self.close("completed") + self._begin_message()
        self._text.append(text)
        self._logprobs += logprobs
        return begun + self._events.delta(self._head, text, logprobs)

    def add_reasoning(self, text: str) -> bytes:
        """Returns the events that append to the reasoning. If none is open, they begin an item of it."""
        begun = b"" if self._kind == "reasoning" else self.close("completed") + self._begin_reasoning()
        self._text.append(text)
        return begun + (self._summary("text.delta", delta=text) if self._summarizes else b"")

    def begin_call(self, call_id: str, function: str) -> bytes:
        """Returns the events that begin a call, after the end of the open item."""
        ended, tool = self.close("completed"), self._tools.own(function)
        prefix, kind = CALLS[tool.kind]
        item = {"id": f"{prefix}{self._request_id}_out{len(self._done)}", "type": kind, "call_id": call_id}
        return ended + self._begin({**item, **(dict(names_of(tool)) if tool.kind != "local_shell" else {})})

    def add_arguments(self, text: str) -> bytes:
        """Returns the event that appends to the arguments of the open call.

        The input of other tools than functions is within the arguments, so its event comes at the end.
        """
        assert self._open is not None
        self._text.append(text)
        if self._kind != "function_call":
            return b""
        return self._events.event("response.function_call_arguments.delta", **self._place(self._open), delta=text)

    def put(self, item: dict[str, Any]) -> int:
        """Adds an item that is not the model's own text and has no events here. Returns its number in the output.

        No item may be open.
        """
        assert self._open is None
        self._done.append(item)
        return len(self._done) - 1

    def replace(self, number: int, item: dict[str, Any]) -> None:
        """Replaces an item that was added with `put`."""
        self._done[number] = item

    def close(self, status: str) -> bytes:
        """Returns the events that end the open item; b"" if none is open. `status`: `completed` or `incomplete`."""
        if self._open is None:
            return b""
        item, place, emit = self._item(status), self._place(self._open), self._events.event
        ended: list[bytes] = []
        match self._kind:
            case "message":
                part = item["content"][0]
                ended.append(emit("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]))
                ended.append(emit("response.content_part.done", **place, part=part))
            case "reasoning" if self._summarizes:
                ended.append(self._summary("text.done", text=item["summary"][0]["text"]))
                ended.append(self._summary("part.done", part=item["summary"][0]))
            case "function_call":
                ended.append(emit("response.function_call_arguments.done", **place, **_called(item)))
            case "custom_tool_call":
                ended.append(emit("response.custom_tool_call_input.delta", **place, delta=item["input"]))
                ended.append(emit("response.custom_tool_call_input.done", **place, input=item["input"]))
            case _:
                pass
        ended.append(emit("response.output_item.done", output_index=len(self._done), item=item))
        self._done.append(item)
        self._open, self._text, self._logprobs = None, [], []
        return b"".join(ended)

    def _begin(self, item: dict[str, Any]) -> bytes:
        self._open = item
        empty = {"message": {"content": []}, "reasoning": {"summary": []}}.get(self._kind, {})
        started = {**self._item("in_progress"), **empty}
        return self._events.event("response.output_item.added", output_index=len(self._done), item=started)

    def _begin_message(self) -> bytes:
        item = {"id": f"msg_{self._request_id}_out{len(self._done)}", "type": "message", "role": "assistant"}
        added, place = self._begin(item), self._place(item)
        self._head = _encode({"type": _DELTA.decode(), **place})[:-1] + b',"delta":'
        return added + self._events.event("response.content_part.added", **place, part=_part("", []))

    def _begin_reasoning(self) -> bytes:
        added = self._begin({"id": f"rs_{self._request_id}_out{len(self._done)}", "type": "reasoning"})
        return added + (self._summary("part.added", part=_summary_part("")) if self._summarizes else b"")

    def _summary(self, what: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._events.event(
            f"response.reasoning_summary_{what}", **self._place(self._open), summary_index=0, **fields
        )

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of an event that identify the open item."""
        place = {"item_id": item["id"], "output_index": len(self._done)}
        return {**place, "content_index": 0} if self.has_open_message else place

    def _item(self, status: str) -> dict[str, Any]:
        """Returns the open item with its content so far."""
        assert self._open is not None
        text = "".join(self._text)
        match self._kind:
            case "message":
                content: dict[str, Any] = {"content": [_part(text, self._logprobs)]}
            case "reasoning":
                content = {"summary": [_summary_part(text)] if self._summarizes else []}
                content |= {"encrypted_content": seal(text)} if self._seals and status != "in_progress" else {}
            case "function_call":
                content = {"arguments": text}
            case "custom_tool_call":
                content = {"input": _input(text)}
            case _:
                content = {"action": _action(text)}
        return {**self._open, "status": status, **content}


class ResponseEncoder:
    """Encodes one response. Implements `AnswerEncoder`. `response` is the object in its present state."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, described: ResponseObject, context: RequestContext) -> None:
        self._object = described
        self._context = context
        self._events = EventEncoder()
        self._output = OutputItems(
            self._events,
            context.request.request_id,
            described.tools,
            summarizes=described.summarizes,
            seals=described.seals_reasoning,
        )
        self._created = False
        self._status: Status = "queued"
        self.response = described.build("queued", [])

    @property
    def next_number(self) -> int:
        """See NumberedEncoder."""
        return self._events.next_number

    def number_from(self, number: int) -> None:
        """See NumberedEncoder."""
        self._events.next_number = number

    @property
    def is_final(self) -> bool:
        """Whether the response has ended."""
        return self._status in FINAL

    def snapshot(self) -> dict[str, Any]:
        """Returns the response object in its present state, with the output so far."""
        if self.is_final:
            return self.response
        return self._object.build(self._status, self._output.items)

    def queued(self) -> bytes:
        """Returns the first events of a background response that has not begun to run."""
        self._created = True
        return self._event("response.created") + self._event("response.queued")

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        choice = state.accumulator.choices[0]
        self.chunk(choice, "".join(choice.text))
        self.closing(state)
        return _encode(self.response)

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        self._set("in_progress")
        created = b"" if self._created else self._event("response.created")
        return created + self._event("response.in_progress")

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        parts = [self._event_of(event, choice) for event in answer_events(choice, text)]
        # Log probabilities are held until the text of their tokens arrives; the last tokens may have no text.
        has_text = choice.parser is None or self._output.has_open_message
        if choice.finish_reason is not None and choice.logprobs and has_text:
            parts.append(self._output.add_text("", _taken_logprobs(choice)))
        return b"".join(parts)

    def flush(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        cut_off = state.accumulator.choices[0].finish_reason == "length"
        status: Status = "incomplete" if cut_off else "completed"
        ended = self._output.close(status)
        self._set(status, usage=usage(state))
        return ended + self._event(f"response.{status}")

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder."""
        if error.code == TAKEN:
            # The response has not failed: another connection has its events.
            return self._events.event("error", code=error.code, message=error.message, param=None)
        ended = self._output.close("incomplete")
        self._set("failed", error=error)
        return ended + self._event("response.failed")

    def cancelled(self) -> None:
        """Makes the response cancelled. There is no event for this: the stream just ends."""
        self._output.close("incomplete")
        self._set("cancelled")

    def _event_of(self, event: Event, choice: Choice) -> bytes:
        match event:
            case Content(text):
                return self._output.add_text(text, _taken_logprobs(choice))
            case CallStart(call, name):
                choice.logprobs.clear()  # In this API, calls have no log probabilities.
                return self._output.begin_call(self._call_id(call, name), name)
            case CallArguments(_, text):
                choice.logprobs.clear()
                return self._output.add_arguments(text)
            case Reasoning(text):
                choice.logprobs.clear()
                return self._output.add_reasoning(text)

    def _call_id(self, call: int, name: str) -> str:
        answer = self._context.answer_format
        assert answer is not None
        return answer.call_id(self._context.request.request_id, 0, call, name)

    def _set(self, status: Status, **fields: Any) -> None:
        self._status = status
        self.response = self._object.build(status, self._output.items, **fields)

    def _event(self, kind: str) -> bytes:
        return self._events.event(kind, response=self.response)


def _taken_logprobs(choice: Choice) -> Logprobs:
    """Returns the log probabilities of a choice, and removes them from the choice."""
    found: Logprobs = chat_logprobs(choice.logprobs)["content"] if choice.logprobs else []
    choice.logprobs.clear()
    return found


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _input(arguments: str) -> str:
    """Returns the text for a custom tool from the arguments of its function."""
    given = arguments_object(arguments or "{}")
    text = given.get(INPUT, arguments if given else "")
    return text if isinstance(text, str) else _encode(text).decode()


def _action(arguments: str) -> dict[str, Any]:
    """Returns the command for the local shell from the arguments of its function."""
    given = arguments_object(arguments or "{}")
    command = given.get("command", [])
    words = command if isinstance(command, list) else [str(command)]
    action = {"type": "exec", "command": [str(word) for word in words], "env": {}}
    return {**action, "timeout_ms": given.get("timeout_ms"), "working_directory": given.get("workdir"), "user": None}


def _called(item: dict[str, Any]) -> dict[str, Any]:
    return {"name": item["name"], "arguments": item["arguments"]}


def _part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
