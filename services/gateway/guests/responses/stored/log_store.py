"""Stores finished responses on the bus, so that every gateway has them and none is lost when a gateway dies."""

import logging
import re

import msgspec

from services.gateway.edge.access.kept_pictures import KeptPictures
from services.gateway.guests.responses.stored import stored_pictures
from services.gateway.guests.responses.stored.log_records import LogRecords
from services.gateway.guests.responses.stored.store import StoredResponse
from shared.bus.durable_log import LogUnavailableError
from shared.errors import ServiceError

log = logging.getLogger(__name__)
_ID = re.compile(r"(?!conv_)[A-Za-z0-9_-]{1,64}")
"""Conversations are in the same log."""
_DECODER = msgspec.msgpack.Decoder(StoredResponse)


class LogResponseStore:
    """Implements `store.ResponseStore` on a durable log, of which each API key has its share (`access.log_part`).

    If a response cannot be stored, this is only logged, because its client has received it. Other methods raise
    ServiceError('bus_unavailable') if the log does not answer.
    """

    def __init__(self, pictures: KeptPictures) -> None:
        self._records = LogRecords(pictures, "Responses")

    async def put(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        try:
            await self.keep(record)
        except LogUnavailableError as error:
            log.warning("the response %s is not stored: %s", record.id, error)

    async def keep(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        try:
            stored, files = stored_pictures.taken_out(record)
            data = msgspec.msgpack.encode(stored)
            if not await self._records.write(record.key_name, record.id, data, files):
                log.warning("the response %s is not stored: it is too large", record.id)
        except ServiceError as error:
            log.warning("the response %s is not stored: %s", record.id, error)

    async def get(self, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        if not _ID.fullmatch(response_id):
            return None
        found = await self._records.last(response_id)
        return None if found is None else _DECODER.decode(found.payload)

    async def with_pictures(self, record: StoredResponse) -> StoredResponse:
        """See ResponseStore."""
        files = await self._records.files(record.key_name, stored_pictures.names_in(record))
        return stored_pictures.put_back(record, files)

    async def delete(self, response_id: str) -> bool:
        """See ResponseStore."""
        if await self.get(response_id) is None:
            return False
        await self._records.remove(response_id)
        return True
