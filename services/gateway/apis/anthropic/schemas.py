"""The request bodies of Anthropic's API as structs, and the fields that are refused or have no effect."""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules, Requirement

Content = str | list[dict[str, Any]]
"""A text, or a list of content blocks. `convert` checks the blocks."""


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: Content


class CountTokensBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/messages/count_tokens`: a conversation. The system prompt is not one of its messages."""

    model: str | None = None
    messages: list[InputMessage] | None = None
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call. `tools` checks them."""
    tool_choice: dict[str, Any] | None = None
    """`{"type": "auto" | "any" | "tool" | "none"}` with `name` and `disable_parallel_tool_use`."""

    thinking: dict[str, Any] | None = None
    """`{"type": "adaptive" | "enabled" | "disabled"}`. `thinking` reads it."""


class MessagesBody(CountTokensBody, kw_only=True):
    """Body of `/v1/messages`: a conversation to continue. None means the default; `max_tokens` has no default."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    """Effort and format of the answer. `convert` reads it."""
    output_format: dict[str, Any] | None = None
    """An older place of the format."""
    cache_control: dict[str, Any] | None = None
    """How long the prompt's KV is kept: `{"type": "ephemeral", "ttl": "5m" | "1h"}`, also in blocks and tools.
    `cache_control` reads it."""


MESSAGES_DECODER = msgspec.json.Decoder(MessagesBody)
COUNT_TOKENS_DECODER = msgspec.json.Decoder(CountTokensBody)
THREAD = "thread"
RULES = FieldRules(
    hints=frozenset(
        {
            # the client's own bookkeeping
            "betas",
            "metadata",
            "service_tier",
            # where and how fast another server would run the request
            "container",
            "inference_geo",
            "speed",
            # which parts of the conversation another server would leave out before the model sees it
            "context_management",
            # servers whose tools another server would call: the model is not told of them
            "mcp_servers",
        }
    ),
    # Without its earlier messages, which another server would have kept, a conversation would be answered wrongly.
    requirements={THREAD: Requirement((None,), "Send the whole conversation in 'messages'.")},
    elsewhere={"prompt": "Send the conversation in 'messages'."},
    mapped={"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
    messages=FieldRules(),
    message=InputMessage,
)
