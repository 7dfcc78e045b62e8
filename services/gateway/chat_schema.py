"""The body of `POST /v1/chat/completions`."""

import msgspec

from services.gateway.openai_api import SamplingFields
from shared.request.conversation import Turn


class ChatBody(SamplingFields, kw_only=True):
    """A conversation to continue."""

    messages: list[Turn] | None = None
    logprobs: bool | int | None = None
    """Whether to report log probabilities; a number is short for `true` with that many `top_logprobs`."""
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None


DECODER = msgspec.json.Decoder(ChatBody)
