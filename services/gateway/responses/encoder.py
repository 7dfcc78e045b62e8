"""Encodes the answers of `POST /v1/responses`: one response, whole or as a stream of numbered events. Pure.

A response consists of output items. A stream is `response.created`, (in the background `response.queued`,)
`response.in_progress`, then the events of each item, and at the end the event of the response's last state with the
whole response. Every event has the next `sequence_number`, from 0.
"""

from typing import Any

import msgspec

from services.gateway.http import sse
from services.gateway.openai.answer_encoder import GenerationState
from services.gateway.openai.choices import Choice
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.responses.response_object import FINAL, ResponseObject, Status, usage
from shared.errors import ServiceError

Logprobs = list[dict[str, Any]]
"""Log probabilities in OpenAI's format, one object for each token."""
_encode = msgspec.json.Encoder().encode
_DELTA = b"response.output_text.delta"


class EventEncoder:
    """Encodes events and numbers them."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """Returns one event."""
        data = {"type": kind, "sequence_number": self._number(), **fields}
        return sse.named_event(kind.encode(), _encode(data))

    def delta(self, head: bytes, text: str, logprobs: Logprobs) -> bytes:
        """Returns a text delta. `head`: the event's data up to the text."""
        told = _encode(text) + b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]")
        return sse.named_event(_DELTA, head + told + b',"sequence_number":%d}' % self._number())

    def _number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number


class OutputItems:
    """The output items of one response and the events that describe them. At most one item is open, the last one."""

    def __init__(self, events: EventEncoder, request_id: str) -> None:
        self._events = events
        self._request_id = request_id
        self._done: list[dict[str, Any]] = []
        self._text: list[str] | None = None
        """Text of the open message; None if no item is open."""
        self._logprobs: Logprobs = []
        """Of the open message."""
        self._head = b""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items so far; the open one is `in_progress`."""
        if self._text is None:
            return self._done
        return [*self._done, self._message("in_progress", "".join(self._text), self._logprobs)]

    @property
    def text(self) -> str:
        """The text of all messages."""
        return "".join(part["text"] for item in self.items for part in item["content"])

    def add_text(self, text: str, logprobs: Logprobs) -> bytes:
        """Returns the events that append to a message, which begins if none is open."""
        begun = b""
        if self._text is None:
            begun = self._begin_message()
            self._text = []
        self._text.append(text)
        self._logprobs += logprobs
        return begun + self._events.delta(self._head, text, logprobs)

    def close(self, status: str) -> bytes:
        """Returns the events that end the open item; b"" if none is open. `status`: `completed` or `incomplete`."""
        if self._text is None:
            return b""
        text, self._text = "".join(self._text), None
        logprobs, self._logprobs = self._logprobs, []
        item = self._message(status, text, logprobs)
        place = {"item_id": item["id"], "output_index": len(self._done), "content_index": 0}
        emit = self._events.event
        ended = [
            emit("response.output_text.done", **place, text=text, logprobs=logprobs),
            emit("response.content_part.done", **place, part=item["content"][0]),
            emit("response.output_item.done", output_index=len(self._done), item=item),
        ]
        self._done.append(item)
        return b"".join(ended)

    def _begin_message(self) -> bytes:
        index = len(self._done)
        item = {**self._message("in_progress", "", []), "content": []}
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._head = _encode({"type": _DELTA.decode(), **place})[:-1] + b',"delta":'
        return self._events.event("response.output_item.added", output_index=index, item=item) + self._events.event(
            "response.content_part.added", **place, part=_part("", [])
        )

    def _message(self, status: str, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}_out{len(self._done)}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text, logprobs)],
        }


class ResponseEncoder:
    """Encodes one response. Implements `AnswerEncoder`. `response` is the object in its present state."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, described: ResponseObject, request_id: str) -> None:
        self._object = described
        self._events = EventEncoder()
        self._output = OutputItems(self._events, request_id)
        self._created = False
        self._status: Status = "queued"
        self.response = described.build("queued", [])
        self.num_bytes = 0
        """Size of the last encoded event that has the whole response."""

    @property
    def output_text(self) -> str:
        """The text of the output so far."""
        return self._output.text

    @property
    def is_final(self) -> bool:
        """Whether the response has ended."""
        return self._status in FINAL

    def snapshot(self) -> dict[str, Any]:
        """Returns the object now: with the output so far while the response is in progress."""
        if self.is_final:
            return self.response
        return self._object.build(self._status, self._output.items)

    def queued(self) -> bytes:
        """Returns the first events of a response that runs in the background and has not begun."""
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
        # Log probabilities wait for the text of their tokens; the last tokens may have none.
        ended = choice.finish_reason is not None
        if not text and not (ended and choice.logprobs):
            return b""
        logprobs: Logprobs = chat_logprobs(choice.logprobs)["content"] if choice.logprobs else []
        choice.logprobs.clear()
        return self._output.add_text(text, logprobs)

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
        ended = self._output.close("incomplete")
        self._set("failed", error=error)
        return ended + self._event("response.failed")

    def cancelled(self) -> None:
        """Makes the response cancelled. There is no event for it: the stream just ends."""
        self._output.close("incomplete")
        self._set("cancelled")

    def _set(self, status: Status, **fields: Any) -> None:
        self._status = status
        self.response = self._object.build(status, self._output.items, **fields)

    def _event(self, kind: str) -> bytes:
        data = self._events.event(kind, response=self.response)
        self.num_bytes = len(data)
        return data


def _part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
