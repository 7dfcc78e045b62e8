"""Stores conversations as long as responses: for `limits.RESPONSE_TTL_S` after the last change.

They are kept where finished responses are (`stored.records`).
"""

import re
from typing import NamedTuple

import msgspec

from antiphon.services.gateway.guests.responses.conversations.record import ID_PREFIX, Conversation
from antiphon.services.gateway.guests.responses.stored import stored_images
from antiphon.services.gateway.guests.responses.stored.records import Records, unavailable
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError

_ID = re.compile(rf"{ID_PREFIX}[A-Za-z0-9]{{1,59}}")
_DECODER = msgspec.json.Decoder(Conversation)


class Versioned(NamedTuple):
    """A conversation and the number of its revision."""

    conversation: Conversation
    revision: int


class ConversationStore:
    """A store of conversations. Methods raise ServiceError('bus_unavailable')."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def get(self, conversation_id: str, *, with_images: bool) -> Versioned | None:
        """Returns a conversation; None if it is not stored, or not any more.

        `with_images`: with the data URLs of its images. Raises ServiceError('not_found') if one is missing.
        """
        if not _ID.fullmatch(conversation_id):
            return None
        found = await self._records.last(conversation_id)
        if found is None:
            return None
        conversation = _DECODER.decode(found.payload)
        return Versioned(await self._whole(conversation) if with_images else conversation, found.sequence)

    async def put(self, conversation: Conversation, revision: int) -> None:
        """Stores a conversation, which has its images, in place of a revision of it; 0: it is new.

        Raises ServiceError: 'conversation_changed' if there is another revision meanwhile, 'request_too_large' if there
        is no room for so large a conversation.
        """
        items, _, files = stored_images.taken_out(conversation.items)
        data = msgspec.json.encode(msgspec.structs.replace(conversation, items=items))
        try:
            if not await self._records.write(conversation.key_name, conversation.id, data, files, revision):
                message = "The conversation is too large to be stored. Begin a new one."
                raise ServiceError("request_too_large", message)
        except LogUnavailableError as error:
            raise unavailable("Conversations", error) from error

    async def delete(self, conversation_id: str) -> None:
        """Removes a conversation."""
        await self._records.remove(conversation_id)

    async def _whole(self, conversation: Conversation) -> Conversation:
        names = stored_images.names_in(conversation.items)
        files = await self._records.files(conversation.key_name, conversation.id, names)
        items, _ = stored_images.put_back(conversation.items, (), files, f"conversation '{conversation.id}'")
        return msgspec.structs.replace(conversation, items=items)
