"""The body of `POST /v1/responses` as a struct, and the fields that are refused or have no effect."""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules, Requirement
from antiphon.services.gateway.apis.openai.body import SamplerFields

LOGPROBS = "message.output_text.logprobs"
REASONING = "reasoning.encrypted_content"
"""Items of reasoning have a sealed form, which a client can send back."""
IMAGE_URLS = "message.input_image.image_url"
"""Without effect: input items always have the URLs of their images."""
INCLUDE_NAMES = ("include", "include[]")
"""Names of the query parameter, a list. OpenAI's clients write it with brackets."""


class ResponsesBody(SamplerFields, kw_only=True):
    """Body of `POST /v1/responses`. None means the default."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    """A text, or a list of items. `input_items` checks the items."""
    instructions: str | None = None
    """A system message for this response only; a response that continues this one does not inherit it."""
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    """The conversation to which the response belongs: its id, or an object with `id`. Its items come before the input,
    and the input and the output are appended to it. `convert.conversation_of` reads it."""
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    """Format of the output text. `text_format` checks it."""
    include: list[str] | None = None
    """Additional content of the output: LOGPROBS, REASONING. Others have no effect."""
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools that the model may call. `tools` reads them."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, `{"type": "function", "name": …}`, or `{"type": "allowed_tools", …}`."""
    reasoning: dict[str, Any] | None = None
    """Effort, whether the output has items of reasoning, and how many tokens of it at most: `{"effort": …,
    "summary": …, "max_tokens": …}`. `convert` checks it."""
    truncation: str | None = None
    """`auto`: what does not fit into the context is left out, the oldest first. `disabled`: it is refused."""
    parallel_tool_calls: bool | None = None
    """Whether a response may have several calls; otherwise it has only the first. Default: yes."""
    max_tool_calls: int | None = None
    """How many calls of tools the server makes at most for a response. Without effect if it makes none."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Parameters that OpenAI's API does not have, as at /v1/chat/completions.
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    prompt_cache_retention: str | None = None


RESPONSES_DECODER = msgspec.json.Decoder(ResponsesBody)
RULES = FieldRules(
    hints=frozenset(
        {
            # the client's own bookkeeping
            "client_metadata",
            "prompt_cache_options",
            # which parts of a conversation another server would leave out
            "context_management",
            "moderation",
            "stream_options",
        }
    ),
    requirements={
        "prompt": Requirement((None,), "Send the text in 'input'."),
    },
    elsewhere={
        "messages": "Send the conversation in 'input'.",
        "response_format": "Send it as 'text.format'.",
        "n": "A response has one output.",
    },
    mapped={"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
)
