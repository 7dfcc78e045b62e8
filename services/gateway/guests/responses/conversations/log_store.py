"""Stores conversations on the bus, next to finished responses: each API key has its share of the same log."""

import re

import msgspec

from services.gateway.edge.access.kept_pictures import KeptPictures
from services.gateway.guests.responses.conversations.record import ID_PREFIX, Conversation
from services.gateway.guests.responses.conversations.store import Versioned, too_large
from services.gateway.guests.responses.stored import stored_pictures
from services.gateway.guests.responses.stored.log_records import LogRecords
from shared.bus.durable_log import LogUnavailableError

_ID = re.compile(rf"{ID_PREFIX}[A-Za-z0-9]{{1,59}}")
_DECODER = msgspec.msgpack.Decoder(Conversation)


class LogConversationStore:
    """Implements `store.ConversationStore` on a durable log."""

    def __init__(self, pictures: KeptPictures) -> None:
        self._records = LogRecords(pictures, "Conversations")

    async def get(self, conversation_id: str, *, with_pictures: bool) -> Versioned | None:
        """See ConversationStore."""
        if not _ID.fullmatch(conversation_id):
            return None
        found = await self._records.last(conversation_id)
        if found is None:
            return None
        conversation = _DECODER.decode(found.payload)
        return Versioned(await self._whole(conversation) if with_pictures else conversation, found.sequence)

    async def put(self, conversation: Conversation, revision: int) -> None:
        """See ConversationStore."""
        items, files = stored_pictures.items_taken_out(conversation.items)
        data = msgspec.msgpack.encode(msgspec.structs.replace(conversation, items=items))
        try:
            if not await self._records.write(conversation.key_name, conversation.id, data, files, revision):
                raise too_large()
        except LogUnavailableError as error:
            raise self._records.unavailable(error) from error

    async def delete(self, conversation_id: str) -> None:
        """See ConversationStore."""
        await self._records.remove(conversation_id)

    async def _whole(self, conversation: Conversation) -> Conversation:
        names = stored_pictures.names_in_items(conversation.items)
        files = await self._records.files(conversation.key_name, names)
        whole = stored_pictures.items_put_back(conversation.items, files, f"conversation '{conversation.id}'")
        return msgspec.structs.replace(conversation, items=whole)
