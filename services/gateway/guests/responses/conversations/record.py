"""One conversation as it is stored. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.guests.responses import input_items
from antiphon.services.gateway.guests.responses.input_items import Item
from antiphon.shared import limits
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.conversation import Turn

ID_PREFIX = "conv_"
NAME = "conversation"
"""The field of a response that names its conversation."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. `created_at`: Unix seconds. `key_name`: name of the API key that it belongs to."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: list[Item]
    key_name: str

    def described(self) -> dict[str, Any]:
        """Returns the object that describes it, which is without its items."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}


def with_items(conversation: Conversation, added: Sequence[Item]) -> Conversation:
    """Returns the conversation with further items at its end, without those that it has. Raises ServiceError."""
    known = {item["id"] for item in conversation.items}
    items = [*conversation.items, *(item for item in added if item["id"] not in known)]
    check_room(len(items))
    return msgspec.structs.replace(conversation, items=items)


def check_room(num_items: int) -> None:
    """Raises ServiceError if a conversation cannot have so many items."""
    if num_items > limits.MESSAGES_MAX:
        refuse(NAME, f"would have more than {limits.MESSAGES_MAX} items: begin a new one")


def turns_before(conversation: Conversation, request_id: str) -> list[Turn]:
    """Returns the turns for a response whose request has this id. Raises ServiceError.

    If the request runs again on another gateway, what its first run has appended, and what came later, is left out. The
    model's reasoning is too, as in the conversation that a response continues, and calls that were cut off.
    """
    items: list[Item] = []
    for item in conversation.items:
        if f"_{request_id}_" in item["id"]:
            break
        # A call that the server has made may have no result; the model has completed it.
        is_cut_off = (
            item["type"].endswith("_call") and item["type"] != "mcp_call" and item.get("status") == "incomplete"
        )
        if item["type"] != "reasoning" and not is_cut_off:
            items.append(item)
    return input_items.read(items, request_id, NAME).turns if items else []
