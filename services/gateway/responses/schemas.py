"""The body of `POST /v1/responses` as a struct, and the fields that are refused or have no effect."""

from typing import Any

import msgspec

from services.gateway.openai.bodies.unsupported_params import FieldRules, Unsupported

LOGPROBS = "message.output_text.logprobs"
PICTURE_URLS = "message.input_image.image_url"
"""Without effect: input items always have the URLs of their pictures."""


class ResponsesBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses`. None means the default."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    """A text, or a list of items. `input_items` checks the items."""
    instructions: str | None = None
    """A system message for this response only; a response that continues this one does not inherit it."""
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    """Format of the output text. `text_format` checks it."""
    include: list[str] | None = None
    """Additional content of the output: LOGPROBS. PICTURE_URLS is accepted too; others are not supported."""
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call. `tools` checks them."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, `{"type": "function", "name": …}`, or `{"type": "allowed_tools", …}`."""
    reasoning: dict[str, Any] | None = None
    """Reasoning effort: `{"effort": …}`. `convert` checks it."""
    parallel_tool_calls: bool | None = None
    """Whether a response may have several calls; otherwise it has only the first. Default: yes."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Parameters that OpenAI's API does not have, as at /v1/chat/completions.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None


RESPONSES_DECODER = msgspec.json.Decoder(ResponsesBody)
_NULL = Unsupported((None,))
_EMPTY = Unsupported((None, [], {}))
RULES = FieldRules(
    no_effect=frozenset({"prompt_cache_options", "prompt_cache_retention"}),
    unsupported={
        "max_tool_calls": _NULL,
        "truncation": Unsupported((None, "disabled"), "An input that is too long is refused, never cut."),
        "conversation": Unsupported((None,), "Continue a response with 'previous_response_id'."),
        "prompt": Unsupported((None,), "Send the text in 'input'."),
        "context_management": _EMPTY,
        "moderation": _NULL,
        "stream_options": Unsupported((None, {}, {"include_obfuscation": False}, {"include_obfuscation": True})),
    },
    elsewhere={
        "messages": "Send the conversation in 'input'.",
        "max_tokens": "Send it as 'max_output_tokens'.",
        "max_completion_tokens": "Send it as 'max_output_tokens'.",
        "response_format": "Send it as 'text.format'.",
        "n": "A response has one output.",
    },
)
