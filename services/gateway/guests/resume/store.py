"""The store of records and journals of streams: two logs on the bus, which are independent of the gateways."""

import logging

import msgspec

from services.gateway.edge.access.kept_pictures import KeptPictures
from services.gateway.guests.resume.body_pictures import WholeBody, whole_body
from services.gateway.guests.resume.journal_reader import JournalReader
from services.gateway.guests.resume.record import (
    JournalEntry,
    StreamRecord,
    decoded_record,
    encoded,
)
from shared.bus.durable_log import LogUnavailableError
from shared.deployment import stores
from shared.errors import ServiceError

log = logging.getLogger(__name__)


class StreamStore:
    """The store of one gateway. Its methods raise LogUnavailableError."""

    def __init__(self, pictures: KeptPictures) -> None:
        """`pictures`: the picture files that were taken out of the bodies in records."""
        self.pictures, logs = pictures, pictures.logs
        self._host, self._subjects = logs.host, logs.host.subjects
        self._records = logs.part(stores.stream_records(self._subjects, logs.storage), self._is_own)
        # Not divided by keys: it has only tokens that were computed, and each message has those of many streams.
        self._journals = logs.log(stores.stream_journals(self._subjects, logs.storage))
        self._reader = JournalReader(self._journals)

    async def open(self) -> None:
        """Returns when the logs exist."""
        await self._records.log.open()
        await self._journals.open()
        await self.pictures.part.log.open()

    async def create(self, record: StreamRecord) -> bool:
        """Sends a new record without waiting until it is stored. Raises ServiceError.

        Returns False if there is no room for it beside the running streams of its key.
        """
        subject, data = self._subjects.stream_record(record.request_id), encoded(record)
        if not await self._records.admit(record.key_name, subject, data, in_use=True):
            return False
        await self._host.transport.publish(subject, data)
        return True

    async def find(self, request_id: str) -> tuple[StreamRecord, int] | None:
        """Returns a record and its revision; None if there is none."""
        found = await self._records.log.last(self._subjects.stream_record(request_id))
        if found is None or not found.payload:
            return None
        try:
            return decoded_record(found.payload), found.sequence
        except msgspec.DecodeError as error:
            raise LogUnavailableError(f"the record of the stream {request_id} cannot be read ({error})") from error

    async def replace(self, record: StreamRecord, revision: int) -> int | None:
        """Writes a record if it still has this revision. Returns the new revision; None if another gateway wrote it."""
        subject = self._subjects.stream_record(record.request_id)
        return await self._records.append(record.key_name, subject, encoded(record), last=revision)

    def use(self, request_id: str) -> None:
        """The record of a stream that runs in this gateway is not dropped until `release`."""
        self._records.use(self._subjects.stream_record(request_id))

    def release(self, request_id: str) -> None:
        """See `use`."""
        self._records.release(self._subjects.stream_record(request_id))

    async def note(self, entries: tuple[JournalEntry, ...]) -> int:
        """Appends entries to this gateway's journal and returns their sequence number."""
        subject = self._subjects.stream_journal(self._host.id, self._host.instance_id)
        number = await self._journals.append(subject, encoded(entries))
        assert number is not None
        return number

    async def journal(self, record: StreamRecord) -> list[JournalEntry]:
        """Returns the entries of a record's owner for its stream, in order."""
        subject = self._subjects.stream_journal(record.owner_id, record.owner_instance_id)
        return await self._reader.entries(subject, max(1, record.journal_from), record.request_id)

    def _is_own(self, data: bytes) -> bool:
        try:
            record = decoded_record(data)
        except msgspec.DecodeError:
            return False
        return (record.owner_id, record.owner_instance_id) == (self._host.id, self._host.instance_id)


async def body_of(record: StreamRecord, pictures: KeptPictures) -> WholeBody:
    """Returns the body of a request with its pictures, as far as they are still there. Raises LogUnavailableError."""
    names = [one.picture for one in (*record.pictures, *record.fetched)]
    return whole_body(record.body, record.pictures, record.fetched, await pictures.get(record.key_name, names))


def unavailable(error: LogUnavailableError) -> ServiceError:
    """Returns the error for a client whose stream cannot be looked up."""
    return ServiceError("bus_unavailable", f"Streams cannot be resumed now: {error}.", retry_after_s=1.0)
