"""Stores finished responses for `limits.RESPONSE_TTL_S`, so that clients can retrieve and continue them.

They are on the bus, for all gateways, or in the memory of one gateway: then they are lost when it ends, and other
gateways do not have them.
"""

import logging
import re
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from antiphon.services.gateway.guests.responses.input_items import Item
from antiphon.services.gateway.guests.responses.stored import stored_images
from antiphon.services.gateway.guests.responses.stored.records import Records
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.conversation import Turn
from antiphon.shared.security.api_keys import ANONYMOUS

log = logging.getLogger(__name__)
_ID = re.compile(r"(?!conv_|sess_)[A-Za-z0-9_-]{1,64}")
"""Conversations and sessions are in the same log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One finished response. `turns`: the whole conversation with the output, without instructions.

    `events`: the events of a background response, which can be streamed again; empty for other responses. `key_name`:
    name of the API key that created the response; no other key can see it.
    """

    response: dict[str, Any]
    input_items: list[Item]
    turns: list[Turn]
    events: list[bytes] = field(default_factory=list[bytes])
    key_name: str = ANONYMOUS.name

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.response["id"]


_DECODER = msgspec.json.Decoder(StoredResponse)
"""JSON, because the schemas in a response may have integers that msgpack has not."""


class ResponseStore:
    """A store of finished responses. Methods raise ServiceError('bus_unavailable') if the log does not answer.

    If a response cannot be stored, this is only logged, because its client has received it.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    async def put(self, record: StoredResponse) -> None:
        """Stores a response. A record that is too large for the store is dropped at once."""
        try:
            await self.keep(record)
        except LogUnavailableError as error:
            log.warning("the response %s is not stored: %s", record.id, error)

    async def keep(self, record: StoredResponse) -> None:
        """Stores a response that its client has not received.

        Raises LogUnavailableError; a record that is too large is dropped.
        """
        try:
            items, turns, files = stored_images.taken_out(record.input_items, record.turns)
            data = msgspec.json.encode(replace(record, input_items=items, turns=turns))
            if not await self._records.write(record.key_name, record.id, data, files):
                log.warning("the response %s is not stored: it is too large", record.id)
        except ServiceError as error:
            log.warning("the response %s is not stored: %s", record.id, error)

    async def get(self, response_id: str) -> StoredResponse | None:
        """Returns a response; None if it is not stored, or not any more. It has references for images."""
        if not _ID.fullmatch(response_id):
            return None
        found = await self._records.last(response_id)
        return None if found is None else _DECODER.decode(found.payload)

    async def with_images(self, record: StoredResponse) -> StoredResponse:
        """Returns a response, which `get` has returned, with the data URLs of its images.

        Raises ServiceError('not_found') if one of them is not stored any more.
        """
        kept = record.input_items, record.turns
        files = await self._records.files(record.key_name, record.id, stored_images.names_in(*kept))
        items, turns = stored_images.put_back(*kept, files, f"response '{record.id}'")
        return replace(record, input_items=items, turns=turns)

    async def delete(self, response_id: str) -> bool:
        """Removes a response. Returns whether it was stored."""
        if await self.get(response_id) is None:
            return False
        await self._records.remove(response_id)
        return True


def unknown_response(response_id: str) -> ServiceError:
    """Returns the error for a response that is not stored."""
    hours = limits.RESPONSE_TTL_S / 3600
    message = (
        f"Response with id '{response_id}' not found. A response is kept for {hours:g} hours or until the space is "
        "needed, and only if 'store' is not false."
    )
    return ServiceError("not_found", message, param="response_id")
