"""The request bodies of the endpoints as structs: completions, chat, tokenize, detokenize.

The answers of tokenize and detokenize are here as well; they have vLLM's format. The common fields of several bodies,
are in `body`; `request_body` decodes them.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.body import GenerationFields
from antiphon.shared.request.conversation import Turn


class CompletionBody(GenerationFields, kw_only=True):
    """Body of `/v1/completions`: text or token ids to continue."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    suffix: str | None = None
    """Text after the output, which fills the gap between prompt and suffix. Needs a tokenizer with tokens for it."""
    logprobs: int | None = None
    """Number of candidates to report with each token, 0 to 5."""


class ChatBody(GenerationFields, kw_only=True):
    """Body of `/v1/chat/completions`: a conversation to continue."""

    messages: list[Turn] | None = None
    tools: list[Any] | None = None
    """Functions that the model may call, see `antiphon.shared.request.tools`."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, or `{"type": "function", "function": {"name": …}}`."""
    functions: list[Any] | None = None
    """The former form of `tools`."""
    function_call: str | dict[str, Any] | None = None
    """The former form of `tool_choice`: `none`, `auto`, or `{"name": …}`."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; otherwise it has only the first. Default: yes."""
    include_reasoning: bool | None = None
    """Whether the answer shows the model's reasoning. Default: yes."""
    reasoning_effort: str | None = None
    """How much the model is to reason. Only the chat template interprets it; see `antiphon.shared.request.tools`."""
    thinking_token_budget: int | None = None
    """Largest number of tokens of the model's reasoning, which is ended there; -1: no limit."""
    documents: list[Any] | None = None
    """Objects for templates that write documents into the prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of the assistant's answer. Default: yes."""
    continue_final_message: bool | None = None
    """Whether the prompt ends inside the last message, which the output continues. Default: no."""
    logprobs: bool | int | None = None
    """Whether to report log probabilities. A number means `true` with that many `top_logprobs`."""
    top_logprobs: int | None = None


class TokenizeBody(ChatBody, kw_only=True):
    """Body of `/tokenize`: a text or a conversation. Exactly one of `prompt` and `messages` must be given.

    It has the fields of a chat request, because clients send one here unchanged to count its tokens. Fields that do not
    influence the prompt have no effect.
    """

    prompt: str | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Answer of `/tokenize`: the token ids, and the text of each token if the request asks for it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`: token ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Answer of `/detokenize`: the text of the token ids."""

    prompt: str


TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeBody)
CHAT_DECODER = msgspec.json.Decoder(ChatBody)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionBody)
