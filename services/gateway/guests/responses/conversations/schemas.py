"""The bodies of requests to `/v1/conversations` as structs."""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules


class ConversationBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/conversations`, and of the request that changes a conversation, which takes no items."""

    items: list[dict[str, Any]] | None = None
    """The first items, which `input_items` checks."""
    metadata: dict[str, str] | None = None


class ChangeBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/conversations/{conversation_id}`."""

    metadata: dict[str, str] | None = None
    """Takes the place of the former metadata; null: there is none."""


class ItemsBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/conversations/{conversation_id}/items`."""

    items: list[dict[str, Any]] | None = None
    """Items to append, which `input_items` checks."""


CONVERSATION_DECODER = msgspec.json.Decoder(ConversationBody)
CHANGE_DECODER = msgspec.json.Decoder(ChangeBody)
ITEMS_DECODER = msgspec.json.Decoder(ItemsBody)
RULES = FieldRules(elsewhere={"input": "Send it as 'items'."})
