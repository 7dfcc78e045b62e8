"""Encodes the answers of `/api/chat` and `/api/generate`: one object, or one object on each line of a stream. Pure.

The last line of a stream, or the one object, has the token counts and durations. All durations are in nanoseconds.
"""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from antiphon.services.gateway.apis.ollama.errors import error_body
from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.chat_message import answer_events, arguments_object
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.answers.logprobs import chat_logprobs
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import PositionLogprobs

Form = Literal["chat", "generate"]
CONTENT_TYPE = b"application/x-ndjson"
_NANOSECONDS = 1_000_000_000
_BEFORE_TEXT = {"chat": b',"message":{"role":"assistant","content":', "generate": b',"response":'}
_AFTER_TEXT = {"chat": b'},"done":false}\n', "generate": b',"done":false}\n'}
_encode = msgspec.json.Encoder().encode


class LineEncoder:
    """Encodes one answer. Implements `AnswerEncoder`.

    A call is sent in a line of its own, when its arguments are complete.
    """

    content_type = CONTENT_TYPE

    def __init__(self, context: RequestContext, form: Form) -> None:
        self._context = context
        self._form: Form = form
        self._fields = common_fields(context.card.name, context.arrival.created)
        self._head = _encode(self._fields)[:-1] + _BEFORE_TEXT[form]
        self._tail = _AFTER_TEXT[form]
        self._call: tuple[CallStart, list[str]] | None = None
        """The call in progress, and the pieces of its arguments."""
        self._logprobs: list[PositionLogprobs] = []
        """The log probabilities of tokens that no line has had yet."""

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        choice = state.accumulator.choices[0]
        said: dict[str, Any] = {"content": ""}
        calls: list[dict[str, Any]] = []
        for event in answer_events(choice, "".join(choice.text)):
            calls += self._ended_call(event)
            match event:
                case Content(text):
                    said["content"] += text
                case Reasoning(text):
                    said["thinking"] = said.get("thinking", "") + text
                case CallStart() | CallArguments():
                    self._add_to_call(event)
        calls += self._ended_call(None)
        self._logprobs += choice.logprobs
        return self._last(state, {**said, "tool_calls": calls} if calls else said)

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        if choice.logprobs:
            self._logprobs += choice.logprobs
            choice.logprobs.clear()
        return b"".join(map(self._lines, answer_events(choice, text)))

    def flush(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        last_call = b"".join(self._line({"content": "", "tool_calls": [call]}) for call in self._ended_call(None))
        return last_call + self._last(state, {"content": ""}) + b"\n"

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder."""
        return error_body(error, self._context.request.request_id) + b"\n"

    def _lines(self, event: Event) -> bytes:
        """Returns the lines of a stream for a part of the answer, preceded by the line of a call that has ended."""
        ended = b"".join(self._line({"content": "", "tool_calls": [call]}) for call in self._ended_call(event))
        match event:
            case Content(text):
                if self._logprobs:
                    return ended + self._line({"content": text})
                return ended + self._head + _encode(text) + self._tail
            case Reasoning(text):
                return ended + self._line({"content": "", "thinking": text})
            case CallStart() | CallArguments():
                self._add_to_call(event)
                return ended

    def _add_to_call(self, event: CallStart | CallArguments) -> None:
        if isinstance(event, CallStart):
            self._call = (event, [])
        else:
            assert self._call is not None
            self._call[1].append(event.text)

    def _ended_call(self, event: Event | None) -> list[dict[str, Any]]:
        """Returns the call in progress if `event` does not continue it, so that it has ended; else an empty list."""
        if self._call is None or isinstance(event, CallArguments):
            return []
        (start, pieces), self._call = self._call, None
        answer = self._context.answer_format
        assert answer is not None
        call_id = answer.call_id(self._context.request.request_id, 0, start.call, start.name)
        function = {"index": start.call, "name": start.name, "arguments": arguments_object("".join(pieces) or "{}")}
        return [{"id": call_id, "function": function}]

    def _line(self, said: dict[str, Any]) -> bytes:
        fields = {**self._fields, **message(self._form, said), "done": False, **self._taken_logprobs()}
        return _encode(fields) + b"\n"

    def _taken_logprobs(self) -> dict[str, Any]:
        """Returns the field with the log probabilities that no line has had yet; {} if there are none."""
        positions, self._logprobs = self._logprobs, []
        return {"logprobs": chat_logprobs(positions)["content"]} if positions else {}

    def _last(self, state: GenerationState, said: dict[str, Any]) -> bytes:
        reason = state.accumulator.choices[0].finish_reason
        done = {"done": True, "done_reason": reason, **counts(state)}
        return _encode({**self._fields, **message(self._form, said), **done, **self._taken_logprobs()})


def common_fields(model: str, created: int) -> dict[str, Any]:
    """Returns the fields of every object. `created`: Unix time in seconds at which the request arrived."""
    return {"model": model, "created_at": timestamp(created)}


def message(form: Form, said: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that hold a part of the answer. `said`: `content`, and `thinking` and `tool_calls` if any."""
    if form == "chat":
        return {"message": {"role": "assistant", **said}}
    return {"response": said["content"], **({"thinking": said["thinking"]} if "thinking" in said else {})}


def counts(state: GenerationState) -> dict[str, int]:
    """Returns token counts and durations. The time before the first token includes the wait in the queue."""
    first_s = state.time_to_first_token_s
    return {
        "total_duration": _nanoseconds(state.elapsed_s),
        "load_duration": 0,
        "prompt_eval_count": state.num_prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first_s),
        "eval_count": state.accumulator.choices[0].num_tokens,
        "eval_duration": _nanoseconds(state.elapsed_s - first_s),
    }


def timestamp(seconds: int) -> str:
    """Returns a Unix time as Ollama writes it (RFC 3339, UTC)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
