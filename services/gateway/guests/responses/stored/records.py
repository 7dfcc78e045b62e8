"""Where records of any kind are kept: on the bus, or in the memory of one gateway. Both have the same methods.

On the bus there is one message for each record, so that every gateway has them and none is lost when a gateway dies.
They are in the log of finished responses, of which each API key has its share (`access.log_part`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from antiphon.services.gateway.edge.access.kept_images import KeptImage, KeptImages
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import Logged, LogUnavailableError
from antiphon.shared.errors import ServiceError
from antiphon.shared.structures.kept import Kept

_OVERHEAD_BYTES = 1024
"""Size of a record in memory besides its data and its files; an upper bound."""


class LogRecords:
    """The records of one kind on the bus. `what` begins the sentence that says that the log does not answer."""

    def __init__(self, images: KeptImages, what: str) -> None:
        self._subject = images.subject
        self._images = images
        self._part = images.part
        self._what = what

    async def last(self, record_id: str) -> Logged | None:
        """Returns a record and its revision; None if there is none. Raises ServiceError('bus_unavailable')."""
        with self._told():
            found = await self._part.log.last(self._subject(record_id))
        return None if found is None or not found.payload else found

    async def write(
        self, key: str, record_id: str, data: bytes, files: Mapping[KeptImage, bytes], revision: int | None = None
    ) -> bool:
        """Writes a record of an API key and the files of its images. Returns False if it is too large for the key.

        `revision`: that of the record which it replaces; 0: there must be none; None: it replaces any. Raises
        LogUnavailableError; ServiceError('conversation_changed') if the record has another revision, or another code if
        the bus takes no message of this size.
        """
        subject = self._subject(record_id)
        await self._images.put(key, files)
        if not await self._part.admit(key, subject, data):
            return False
        if await self._part.append(key, subject, data, last=revision) is None:
            raise changed()
        return True

    async def files(self, key: str, record_id: str, names: Sequence[KeptImage]) -> dict[KeptImage, bytes]:
        """Returns the files of a record's images that are still kept. Raises ServiceError('bus_unavailable')."""
        with self._told():
            return await self._images.get(key, names)

    async def remove(self, record_id: str) -> None:
        """Removes a record. Raises ServiceError('bus_unavailable')."""
        with self._told():
            await self._part.remove(self._subject(record_id))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except LogUnavailableError as error:
            raise unavailable(self._what, error) from error


class _Held(NamedTuple):
    logged: Logged
    files: Mapping[KeptImage, bytes]
    expires_at: float


class MemoryRecords:
    """Records in memory: drops expired ones, then the least recently used one of the largest key.

    `now` returns monotonic seconds.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        max_bytes: int = limits.RESPONSES_BYTES_MAX,
        ttl_s: float = limits.RESPONSE_TTL_S,
    ) -> None:
        self._now = now
        self._ttl_s = ttl_s
        self._kept = Kept(max_bytes)
        self._records: dict[str, _Held] = {}
        """By id, in the order in which the records expire."""

    async def last(self, record_id: str) -> Logged | None:
        """See LogRecords."""
        self._expire()
        self._kept.touch(record_id)
        held = self._records.get(record_id)
        return None if held is None else held.logged

    async def write(
        self, key: str, record_id: str, data: bytes, files: Mapping[KeptImage, bytes], revision: int | None = None
    ) -> bool:
        """See LogRecords."""
        found = await self.last(record_id)
        former = 0 if found is None else found.sequence
        if revision not in (None, former):
            raise changed()
        await self.remove(record_id)
        self._records[record_id] = _Held(Logged(former + 1, data), files, self._now() + self._ttl_s)
        size = _OVERHEAD_BYTES + len(data) + sum(map(len, files.values()))
        for gone in self._kept.put(key, record_id, size):
            del self._records[gone]
        return record_id in self._records

    async def files(self, key: str, record_id: str, names: Sequence[KeptImage]) -> Mapping[KeptImage, bytes]:
        """See LogRecords."""
        held = self._records.get(record_id)
        return {} if held is None else held.files

    async def remove(self, record_id: str) -> None:
        """See LogRecords."""
        self._kept.remove(record_id)
        self._records.pop(record_id, None)

    def _expire(self) -> None:
        now = self._now()
        while self._records and self._records[first := next(iter(self._records))].expires_at <= now:
            self._kept.remove(first)
            del self._records[first]


Records = LogRecords | MemoryRecords


def changed() -> ServiceError:
    """Returns the error for a record that somebody else has changed."""
    return ServiceError("conversation_changed", "The conversation was changed at the same time. Try again.")


def unavailable(what: str, error: LogUnavailableError) -> ServiceError:
    """Returns the error for clients if the log does not answer."""
    return ServiceError("bus_unavailable", f"{what} cannot be looked up now: {error}.", retry_after_s=1.0)
