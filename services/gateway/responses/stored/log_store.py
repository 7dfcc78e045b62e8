"""Stores finished responses on the bus, so that every gateway has them and none is lost when a gateway dies."""

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from services.gateway.pictures.kept import KeptPicture, KeptPictures, responses_log
from services.gateway.responses.stored import stored_pictures
from services.gateway.responses.stored.store import StoredResponse
from shared.actors.host import Host
from shared.bus.durable_log import LogUnavailableError, Storage
from shared.errors import ServiceError

log = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DELETED = b""
_DECODER = msgspec.msgpack.Decoder(StoredResponse)


class LogResponseStore:
    """Implements `store.ResponseStore` on a durable log, which is limited by age and size.

    If a response cannot be stored, this is only logged, because its client has received it. Other methods raise
    ServiceError('bus_unavailable') if the log does not answer.
    """

    def __init__(self, host: Host, storage: Storage) -> None:
        self._subject = host.subjects.response
        self._log = responses_log(host, storage)
        self._pictures = KeptPictures(host, storage)
        self._is_open = False

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
            await self._append(record.id, msgspec.msgpack.encode(stored), files)
        except ServiceError as error:
            log.warning("the response %s is not stored: %s", record.id, error)

    async def get(self, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        if not _ID.fullmatch(response_id):
            return None
        try:
            await self._open()
            found = await self._log.last(self._subject(response_id))
        except LogUnavailableError as error:
            self._is_open = False
            raise _unavailable(error) from error
        return None if found is None or found.payload == _DELETED else _DECODER.decode(found.payload)

    async def with_pictures(self, record: StoredResponse) -> StoredResponse:
        """See ResponseStore."""
        try:
            files = await self._pictures.get(stored_pictures.names_in(record))
        except LogUnavailableError as error:
            raise _unavailable(error) from error
        return stored_pictures.put_back(record, files)

    async def delete(self, response_id: str) -> bool:
        """See ResponseStore."""
        if await self.get(response_id) is None:
            return False
        try:
            await self._append(response_id, _DELETED)
        except LogUnavailableError as error:
            raise _unavailable(error) from error
        return True

    async def _append(
        self, response_id: str, data: bytes, files: Mapping[KeptPicture, bytes] = MappingProxyType({})
    ) -> None:
        try:
            await self._open()
            await self._pictures.put(files)
            await self._log.append(self._subject(response_id), data)
        except LogUnavailableError:
            self._is_open = False  # the bus may have been restarted and have lost the log
            raise

    async def _open(self) -> None:
        if not self._is_open:
            await self._log.open()
            self._is_open = True


def _unavailable(error: LogUnavailableError) -> ServiceError:
    return ServiceError("bus_unavailable", f"Responses cannot be looked up now: {error}.", retry_after_s=1.0)
