"""The store of records and journals of streams: two logs on the bus, which are independent of the gateways."""

import logging

import msgspec

from services.gateway.pictures.kept import KeptPictures
from services.gateway.streams.body_pictures import WholeBody, whole_body
from services.gateway.streams.journal_reader import JournalReader
from services.gateway.streams.record import (
    JournalEntry,
    StreamRecord,
    decoded_record,
    encoded,
)
from shared import limits
from shared.actors.host import Host
from shared.bus.durable_log import LogConfig, LogUnavailableError, Storage
from shared.errors import ServiceError
from shared.subjects import bucket_name

log = logging.getLogger(__name__)


class StreamStore:
    """The store of one gateway. Its methods raise LogUnavailableError."""

    def __init__(self, host: Host, storage: Storage) -> None:
        subjects, space = host.subjects, host.subjects.namespace
        max_bytes = limits.STREAM_STORE_BYTES[storage]
        self.pictures = KeptPictures(host, storage)
        """The picture files that were taken out of the bodies in records."""
        self._host, self._subjects = host, subjects
        self._records = host.transport.durable_log(
            LogConfig(
                name=bucket_name(space, "streams"),
                subject=subjects.stream_record("*"),
                storage=storage,
                max_age_s=limits.STREAM_FORGOTTEN_S,
                max_bytes=max_bytes,
                per_subject=1,
            ),
            timeout_s=limits.STREAM_STORE_TIMEOUT_S,
        )
        self._journals = host.transport.durable_log(
            LogConfig(
                name=bucket_name(space, "stream-tokens"),
                subject=subjects.stream_journal("*", "*"),
                storage=storage,
                max_age_s=limits.STREAM_RESUME_S + limits.STREAM_RENEW_S,
                max_bytes=max_bytes,
            ),
            timeout_s=limits.STREAM_STORE_TIMEOUT_S,
        )
        self._reader = JournalReader(self._journals)

    async def open(self) -> None:
        """Creates the logs if they do not exist."""
        await self._records.open()
        await self._journals.open()

    async def create(self, record: StreamRecord) -> None:
        """Sends a new record without waiting until it is stored. Raises ServiceError."""
        await self._host.transport.publish(self._subjects.stream_record(record.request_id), encoded(record))

    async def find(self, request_id: str) -> tuple[StreamRecord, int] | None:
        """Returns a record and its revision; None if there is none."""
        found = await self._records.last(self._subjects.stream_record(request_id))
        if found is None:
            return None
        try:
            return decoded_record(found.payload), found.sequence
        except msgspec.DecodeError as error:
            raise LogUnavailableError(f"the record of the stream {request_id} cannot be read ({error})") from error

    async def replace(self, record: StreamRecord, revision: int) -> int | None:
        """Writes a record if it still has this revision. Returns the new revision; None if another gateway wrote it."""
        return await self._records.append(
            self._subjects.stream_record(record.request_id), encoded(record), last=revision
        )

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


async def body_of(record: StreamRecord, pictures: KeptPictures) -> WholeBody:
    """Returns the body of a request with its pictures, as far as they are still there. Raises LogUnavailableError."""
    names = [one.picture for one in (*record.pictures, *record.fetched)]
    return whole_body(record.body, record.pictures, record.fetched, await pictures.get(names))


def unavailable(error: LogUnavailableError) -> ServiceError:
    """Returns the error for a client whose stream cannot be looked up."""
    return ServiceError("bus_unavailable", f"Streams cannot be resumed now: {error}.", retry_after_s=1.0)
