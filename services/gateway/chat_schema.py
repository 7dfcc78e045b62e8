"""The body of `POST /v1/chat/completions`."""

from typing import Any

import msgspec

from services.gateway.openai_api import SamplingFields


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only the type `text` is served."""

    type: str
    text: str | None = None


class Turn(msgspec.Struct, kw_only=True):
    """One message. `content` may also be the token ids of an already tokenised text."""

    role: str
    content: str | list[int | ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatBody(SamplingFields, kw_only=True):
    """A conversation to continue."""

    messages: list[Turn] | None = None
    logprobs: bool | int | None = None
    """Whether to report log probabilities; a number is short for `true` with that many `top_logprobs`."""
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None


DECODER = msgspec.json.Decoder(ChatBody)
