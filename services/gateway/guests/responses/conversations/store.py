"""Stores conversations as long as responses: for `limits.RESPONSE_TTL_S` after the last change.

`ConversationStore` is the interface. `log_store` keeps them on the bus, for all gateways; `MemoryConversationStore`
keeps them in the memory of one gateway.
"""

import time
from typing import NamedTuple, Protocol

from services.gateway.guests.responses.conversations.record import Conversation
from services.gateway.guests.responses.stored.store import MemoryRecords
from shared.errors import ServiceError


class Versioned(NamedTuple):
    """A conversation and the number of its revision."""

    conversation: Conversation
    revision: int


class ConversationStore(Protocol):
    """A store of conversations. Methods raise ServiceError('bus_unavailable')."""

    async def get(self, conversation_id: str, *, with_pictures: bool) -> Versioned | None:
        """Returns a conversation; None if it is not stored, or not any more.

        `with_pictures`: with the data URLs of its pictures. Raises ServiceError('not_found') if one is missing.
        """
        ...

    async def put(self, conversation: Conversation, revision: int) -> None:
        """Stores a conversation, which has its pictures, in place of a revision of it; 0: it is new.

        Raises ServiceError: 'conversation_changed' if there is another revision meanwhile, 'request_too_large' if there
        is no room for so large a conversation.
        """
        ...

    async def delete(self, conversation_id: str) -> None:
        """Removes a conversation."""
        ...


class MemoryConversationStore:
    """Implements `ConversationStore` in memory."""

    def __init__(self) -> None:
        self._records = MemoryRecords[Versioned](time.monotonic)

    async def get(self, conversation_id: str, *, with_pictures: bool) -> Versioned | None:
        """See ConversationStore."""
        return await self._records.get(conversation_id)

    async def put(self, conversation: Conversation, revision: int) -> None:
        """See ConversationStore."""
        found = await self._records.get(conversation.id)
        if (0 if found is None else found.revision) != revision:
            raise changed()
        kept = Versioned(conversation, revision + 1)
        self._records.add(conversation.key_name, conversation.id, kept, conversation.num_bytes)
        if await self._records.get(conversation.id) is None:
            raise too_large()

    async def delete(self, conversation_id: str) -> None:
        """See ConversationStore."""
        await self._records.delete(conversation_id)


def changed() -> ServiceError:
    """Returns the error for a conversation that somebody else has changed."""
    return ServiceError("conversation_changed", "The conversation was changed at the same time. Try again.")


def too_large() -> ServiceError:
    """Returns the error for a conversation for which there is no room."""
    return ServiceError("request_too_large", "The conversation is too large to be stored. Begin a new one.")
