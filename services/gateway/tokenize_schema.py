"""The bodies of `POST /tokenize` and `POST /detokenize`, and their answers, in vLLM's shapes."""

import msgspec

from shared.request.conversation import Turn


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
