"""Encodes the answers of `/v1/messages`: one message, whole or as a stream of named events. Pure.

A message consists of content blocks: reasoning, texts and calls of tools. A stream is `message_start`, `ping`, then for
each block `content_block_start`, `content_block_delta`…, `content_block_stop`, and at the end `message_delta` with the
stop reason and the token counts, and `message_stop`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from antiphon.services.gateway.apis.anthropic import cache_control
from antiphon.services.gateway.apis.anthropic.errors import error_body
from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.chat_message import answer_events, arguments_object
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.bodies.sealed import seal
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, Reasoning, joined
from antiphon.services.gateway.edge.http import sse
from antiphon.shared.errors import ServiceError

ID_PREFIX = "msg_"
_encode = msgspec.json.Encoder().encode
_THINKING = "thinking"
_PING = sse.named_event(b"ping", b'{"type":"ping"}')
_STOP = sse.named_event(b"message_stop", b'{"type":"message_stop"}')


class MessageEncoder:
    """Encodes one message. Implements `AnswerEncoder`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, context: RequestContext, *, shows_reasoning: bool = True) -> None:
        """`shows_reasoning`: whether blocks of reasoning have its text, or only its sealed form."""
        self._context = context
        self._shows_reasoning = shows_reasoning
        self._blocks = ContentBlocks(shows_reasoning=shows_reasoning)

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        choice = state.accumulator.choices[0]
        content = self._content(answer_events(choice, "".join(choice.text)))
        return _encode({**self._message(content, usage(state, self._context)), **stop_fields(choice)})

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        message = {
            **self._message([], {**usage(state, self._context), "output_tokens": 0}),
            "stop_reason": None,
            "stop_sequence": None,
        }
        return _event("message_start", {"message": message}) + _PING

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        return b"".join([self._blocks.event(event, self._call_id) for event in answer_events(choice, text)])

    def flush(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        delta = {"delta": stop_fields(state.accumulator.choices[0]), "usage": usage(state, self._context)}
        return self._blocks.close() + _event("message_delta", delta) + _STOP

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder."""
        return sse.named_event(b"error", error_body(error, self._context.request.request_id))

    def _content(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Returns the content blocks of a whole message."""
        found: list[dict[str, Any]] = []
        for event in joined(events):
            match event:
                case Content(text):
                    found.append({"type": "text", "text": text})
                case CallStart(call, name):
                    found.append({"type": "tool_use", "id": self._call_id(call, name), "name": name, "input": {}})
                case CallArguments(_, text):
                    found[-1]["input"] = arguments_object(text)
                case Reasoning(text):
                    shown = text if self._shows_reasoning else ""
                    found.append({"type": "thinking", "thinking": shown, "signature": seal(text)})
        return found

    def _call_id(self, call: int, name: str) -> str:
        answer = self._context.answer_format
        assert answer is not None
        # Some templates need ids of another form, which have no prefix.
        found = answer.call_id(self._context.request.request_id, 0, call, name)
        return f"toolu_{found.removeprefix('call_')}" if found.startswith("call_") else found

    def _message(self, content: list[dict[str, Any]], counts: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._context.id,
            "type": "message",
            "role": "assistant",
            "model": self._context.card.name,
            "content": content,
            "usage": counts,
        }


class ContentBlocks:
    """Encodes the events of a message's content blocks. At most one block is open; its index is the last one."""

    def __init__(self, *, shows_reasoning: bool = True) -> None:
        self._shows_reasoning = shows_reasoning
        self._reasoning: list[str] = []
        """The text of the open block of reasoning."""
        self._index = -1
        self._open = ""
        """Type of the open block; "" if no block is open."""
        self._text_head = b""

    def event(self, event: Event, call_id: Callable[[int, str], str]) -> bytes:
        """Returns the events of a stream for a part of the answer.

        `call_id` returns the id of a call by its number and the name of the function.
        """
        match event:
            case Content(text):
                return self._text(text)
            case CallStart(call, name):
                return self._begin({"type": "tool_use", "id": call_id(call, name), "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case Reasoning(text):
                return self._thought(text)

    def _thought(self, text: str) -> bytes:
        """Returns the events that append to the reasoning. If no block of reasoning is open, the first opens one."""
        start = b""
        if self._open != _THINKING:
            start = self._begin({"type": _THINKING, "thinking": "", "signature": ""})
        self._reasoning.append(text)
        return start + (self._delta({"type": "thinking_delta", "thinking": text}) if self._shows_reasoning else b"")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _text(self, text: str) -> bytes:
        """Returns the events that append text. If no text block is open, the first event opens one."""
        start = b""
        if self._open != "text":
            start = self._begin({"type": "text", "text": ""})
            self._text_head = (
                b'{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":' % self._index
            )
        return start + sse.named_event(b"content_block_delta", self._text_head + _encode(text) + b"}}")

    def close(self) -> bytes:
        """Returns the event that ends the open block; b"" if no block is open."""
        if not self._open:
            return b""
        signed = b""
        if self._open == _THINKING:
            signed = self._delta({"type": "signature_delta", "signature": seal("".join(self._reasoning))})
            self._reasoning = []
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._index})

    def _begin(self, block: dict[str, Any]) -> bytes:
        ended = self.close()
        self._index += 1
        self._open = block["type"]
        return ended + _event("content_block_start", {"index": self._index, "content_block": block})


def usage(state: GenerationState, context: RequestContext) -> dict[str, int]:
    """Returns Anthropic's token counts: tokens from a cache, or kept there from now on, are not `input_tokens`."""
    cached = state.accumulator.num_cached_tokens
    created = cache_control.num_created(context, state.num_prompt_tokens, cached)
    return {
        "input_tokens": state.num_prompt_tokens - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(choice.num_tokens for choice in state.accumulator.choices),
    }


def stop_fields(choice: Choice) -> dict[str, str | None]:
    """Returns the stop reason of the message, and the stop string if one ended it.

    A message that ends with calls of tools must be continued with their results.
    """
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    if choice.parser is not None and choice.parser.has_whole_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return sse.named_event(name.encode(), _encode({"type": name, **fields}))
