"""The request bodies of Anthropic's API as structs, and the fields that are refused or have no effect."""

from typing import Any

import msgspec

from services.gateway.openai.bodies.unsupported_params import FieldRules, Unsupported

Content = str | list[dict[str, Any]]
"""A text, or a list of content blocks. `convert` checks the blocks."""


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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


class MessagesBody(CountTokensBody, kw_only=True):
    """Body of `/v1/messages`: a conversation to continue. None means the default; `max_tokens` has no default."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


MESSAGES_DECODER = msgspec.json.Decoder(MessagesBody)
COUNT_TOKENS_DECODER = msgspec.json.Decoder(CountTokensBody)
_NULL = Unsupported((None,))
_EMPTY = Unsupported((None, [], {}))
RULES = FieldRules(
    # The client's own bookkeeping, and the mark for prefix caching, which is not needed: prefixes are cached without
    # it.
    no_effect=frozenset({"metadata", "service_tier", "cache_control"}),
    unsupported={
        "thinking": Unsupported((None, {"type": "disabled"})),
        "output_config": _EMPTY,
        "output_format": _NULL,
        "mcp_servers": _EMPTY,
        "container": _NULL,
        "context_management": _EMPTY,
        "inference_geo": _NULL,
        "speed": Unsupported((None, "standard")),
    },
    elsewhere={
        "stop": "Send stop strings in 'stop_sequences'.",
        "max_completion_tokens": "Send it as 'max_tokens'.",
        "prompt": "Send the conversation in 'messages'.",
    },
)
