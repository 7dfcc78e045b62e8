"""Encodes the answers of `/api/chat` and `/api/generate`: one object, or one object on each line of a stream. Pure.

The last line of a stream, or the one object, has the token counts and durations. All durations are in nanoseconds.
"""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from services.gateway.ollama.errors import error_body
from services.gateway.openai.answer_encoder import GenerationState
from services.gateway.openai.choices import Choice
from services.gateway.openai.request_context import RequestContext
from shared.errors import ServiceError

Form = Literal["chat", "generate"]
CONTENT_TYPE = b"application/x-ndjson"
_NANOSECONDS = 1_000_000_000
_BEFORE_TEXT = {"chat": b',"message":{"role":"assistant","content":', "generate": b',"response":'}
_AFTER_TEXT = {"chat": b'},"done":false}\n', "generate": b',"done":false}\n'}
_encode = msgspec.json.Encoder().encode


class LineEncoder:
    """Encodes one answer. Implements `AnswerEncoder`."""

    content_type = CONTENT_TYPE

    def __init__(self, context: RequestContext, form: Form) -> None:
        self._context = context
        self._form: Form = form
        self._fields = common_fields(context.card.name, context.arrival.created)
        self._head = _encode(self._fields)[:-1] + _BEFORE_TEXT[form]
        self._tail = _AFTER_TEXT[form]

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return self._last(state, "".join(state.accumulator.choices[0].text))

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        return self._head + _encode(text) + self._tail if text else b""

    def flush(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return self._last(state, "") + b"\n"

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder."""
        return error_body(error, self._context.request.request_id) + b"\n"

    def _last(self, state: GenerationState, text: str) -> bytes:
        reason = state.accumulator.choices[0].finish_reason
        return _encode({**self._fields, **said(self._form, text), "done": True, "done_reason": reason, **counts(state)})


def common_fields(model: str, created: int) -> dict[str, Any]:
    """Returns the fields of every object. `created`: Unix time in seconds at which the request arrived."""
    return {"model": model, "created_at": timestamp(created)}


def said(form: Form, text: str) -> dict[str, Any]:
    """Returns the field that holds the text."""
    return {"message": {"role": "assistant", "content": text}} if form == "chat" else {"response": text}


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
