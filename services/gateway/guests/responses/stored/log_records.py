"""Records on the bus, one message for each, so that every gateway has them and none is lost when a gateway dies.

They are in the log of finished responses, of which each API key has its share (`access.log_part`).
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from services.gateway.edge.access.kept_pictures import KeptPicture, KeptPictures
from shared.bus.durable_log import Logged, LogUnavailableError
from shared.errors import ServiceError


class LogRecords:
    """The records of one kind. `what` begins the sentence that says that the log does not answer."""

    def __init__(self, pictures: KeptPictures, what: str) -> None:
        self._subject = pictures.subject
        self._pictures = pictures
        self._part = pictures.part
        self._what = what
        self._is_open = False

    async def last(self, record_id: str) -> Logged | None:
        """Returns a record and its revision; None if there is none. Raises ServiceError('bus_unavailable')."""
        with self._told():
            async with self._opened():
                found = await self._part.log.last(self._subject(record_id))
        return None if found is None or not found.payload else found

    async def write(
        self, key: str, record_id: str, data: bytes, files: Mapping[KeptPicture, bytes], revision: int | None = None
    ) -> bool:
        """Writes a record of an API key and the files of its pictures. Returns False if it is too large for the key.

        `revision`: that of the record which it replaces; 0: there must be none; None: it replaces any. Raises
        LogUnavailableError; ServiceError('conversation_changed') if the record has another revision, or another code if
        the bus takes no message of this size.
        """
        subject = self._subject(record_id)
        async with self._opened():
            await self._pictures.put(key, files)
            if not await self._part.admit(key, subject, data):
                return False
            if await self._part.append(key, subject, data, last=revision) is None:
                raise ServiceError("conversation_changed", "Somebody else has changed it at the same time. Try again.")
        return True

    async def files(self, key: str, names: Sequence[KeptPicture]) -> dict[KeptPicture, bytes]:
        """Returns the files of pictures that are still kept. Raises ServiceError('bus_unavailable')."""
        with self._told():
            return await self._pictures.get(key, names)

    async def remove(self, record_id: str) -> None:
        """Removes a record. Raises ServiceError('bus_unavailable')."""
        with self._told():
            async with self._opened():
                await self._part.remove(self._subject(record_id))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except LogUnavailableError as error:
            raise self.unavailable(error) from error

    def unavailable(self, error: LogUnavailableError) -> ServiceError:
        """Returns the error for clients if the log does not answer."""
        return ServiceError("bus_unavailable", f"{self._what} cannot be looked up now: {error}.", retry_after_s=1.0)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        try:
            if not self._is_open:
                await self._part.log.open()
                self._is_open = True
            yield
        except LogUnavailableError:
            self._is_open = False  # the bus may have been restarted and have lost the log
            raise
