"""The conversations of the current call's API key. No other key finds them."""

import time
from collections.abc import Callable, Sequence

from antiphon.services.gateway.edge.access.call import current_call, may_see, new_id
from antiphon.services.gateway.guests.responses.conversations.record import ID_PREFIX, NAME, Conversation, with_items
from antiphon.services.gateway.guests.responses.conversations.store import ConversationStore, Versioned
from antiphon.services.gateway.guests.responses.input_items import Item
from antiphon.services.gateway.guests.responses.stored.records import changed
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError


class Conversations:
    """Finds and changes conversations. Methods raise ServiceError, also those of ConversationStore."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store

    async def create(self, metadata: dict[str, str], items: Sequence[Item]) -> Conversation:
        """Stores a new conversation."""
        made = Conversation(
            id=ID_PREFIX + new_id(),
            created_at=int(time.time()),
            metadata=metadata,
            items=list(items),
            key_name=current_call().key.name,
        )
        await self._store.put(made, 0)
        return made

    async def get(self, conversation_id: str, *, with_images: bool = True) -> Conversation:
        """Returns a conversation. Raises ServiceError('not_found')."""
        return (await self._found(conversation_id, with_images=with_images)).conversation

    async def change(self, conversation_id: str, change: Callable[[Conversation], Conversation]) -> Conversation:
        """Stores and returns a conversation as `change` returns it, which may be called several times."""
        for _ in range(limits.CONVERSATION_TRIES):
            found = await self._found(conversation_id, with_images=True)
            after = change(found.conversation)
            try:
                await self._store.put(after, found.revision)
            except ServiceError as error:
                if error.code != "conversation_changed":
                    raise
                continue
            return after
        raise changed()

    async def append(self, conversation_id: str, items: Sequence[Item]) -> Conversation:
        """Appends items, without those that the conversation has."""
        return await self.change(conversation_id, lambda one: with_items(one, items))

    async def delete(self, conversation_id: str) -> None:
        """Removes a conversation and its items."""
        await self._found(conversation_id, with_images=False)
        await self._store.delete(conversation_id)

    async def _found(self, conversation_id: str, *, with_images: bool) -> Versioned:
        # Whose it is must be known before its images are looked for, which may be missing.
        found = await self._store.get(conversation_id, with_images=False)
        if found is None or not may_see(found.conversation.key_name):
            raise _unknown(conversation_id)
        if with_images:
            found = await self._store.get(conversation_id, with_images=True)
        if found is None:
            raise _unknown(conversation_id)
        return found


def _unknown(conversation_id: str) -> ServiceError:
    hours = limits.RESPONSE_TTL_S / 3600
    message = (
        f"Conversation with id '{conversation_id[:64]}' not found. A conversation is kept for {hours:g} hours after "
        "its last change, or until the space is needed."
    )
    return ServiceError("not_found", message, param=NAME)
