"""The bodies of the endpoints as structs: completions, chat, tokenize, detokenize.

The answers of the last two, in vLLM's shapes, are here as well. What the bodies have in common, and how bytes become
structs, is in `body`.
"""

import msgspec

from services.gateway.openai.body import SamplingFields
from shared.request.conversation import Turn


class CompletionBody(SamplingFields, kw_only=True):
    """Text or token ids to continue."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: int | None = None
    """Candidates to report with each token, 0 to 5."""


class ChatBody(SamplingFields, kw_only=True):
    """A conversation to continue."""

    messages: list[Turn] | None = None
    logprobs: bool | int | None = None
    """Whether to report log probabilities; a number is short for `true` with that many `top_logprobs`."""
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a conversation: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The token ids, and each token's own text when it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text of the token ids."""

    prompt: str


TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeBody)
CHAT_DECODER = msgspec.json.Decoder(ChatBody)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionBody)
