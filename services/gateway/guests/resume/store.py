"""The store of records and journals of streams: two logs on the bus, which are independent of the gateways."""

from collections.abc import Callable

import msgspec

from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.guests.resume.body_images import WholeBody, whole_body
from antiphon.services.gateway.guests.resume.journal_reader import JournalReader
from antiphon.services.gateway.guests.resume.record import JournalEntry, StreamRecord, decoded_record, encoded
from antiphon.shared.bus.durable_log import LogConfig, LogUnavailableError
from antiphon.shared.deployment import stores
from antiphon.shared.errors import ServiceError


class RecordStore:
    """The records of requests of one kind, in a log with one message for each. Methods raise LogUnavailableError.

    `images`: the image files that were taken out of the bodies in records. `subject` returns that of a record.
    """

    def __init__(self, images: KeptImages, config: LogConfig, subject: Callable[[str], str]) -> None:
        self.images, self.subject, self._host = images, subject, images.logs.host
        self.part = images.logs.part(config, self._is_own)

    async def admit(self, record: StreamRecord) -> bool:
        """Returns whether there is room for a new record beside the running requests of its key."""
        return await self.part.admit(record.key_name, self.subject(record.request_id), encoded(record), in_use=True)

    async def find(self, request_id: str) -> tuple[StreamRecord, int] | None:
        """Returns a record and its revision; None if there is none."""
        found = await self.part.log.last(self.subject(request_id))
        return None if found is None or not found.payload else (readable(found.payload), found.sequence)

    async def replace(self, record: StreamRecord, revision: int | None) -> int | None:
        """Writes a record if it still has this revision. Returns the new revision; None if another gateway wrote it."""
        return await self.part.append(record.key_name, self.subject(record.request_id), encoded(record), last=revision)

    def use(self, request_id: str) -> None:
        """The record of a request that runs in this gateway is not dropped until `release`."""
        self.part.use(self.subject(request_id))

    def release(self, request_id: str) -> None:
        """See `use`."""
        self.part.release(self.subject(request_id))

    def _is_own(self, data: bytes) -> bool:
        try:
            record = readable(data)
        except LogUnavailableError:
            return False
        return (record.owner_id, record.owner_instance_id) == (self._host.id, self._host.instance_id)


class StreamStore(RecordStore):
    """The records of one gateway's streams, and its journal."""

    def __init__(self, images: KeptImages) -> None:
        logs, self._subjects = images.logs, images.logs.host.subjects
        super().__init__(images, stores.stream_records(self._subjects, logs.storage), self._subjects.stream_record)
        # Not divided by keys: it has only tokens that were computed, and each message has those of many streams.
        self._journals = logs.log(stores.stream_journals(self._subjects, logs.storage))
        self._reader = JournalReader(self._journals)

    async def open(self) -> None:
        """Returns when the logs exist."""
        await self.part.log.open()
        await self._journals.open()
        await self.images.part.log.open()

    async def create(self, record: StreamRecord) -> bool:
        """Sends a new record without waiting until it is stored. Raises ServiceError.

        Returns False if there is no room for it beside the running streams of its key.
        """
        if not await self.admit(record):
            return False
        await self._host.transport.publish(self.subject(record.request_id), encoded(record))
        return True

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


def readable(data: bytes) -> StreamRecord:
    """Returns a record of a log. Raises LogUnavailableError."""
    try:
        return decoded_record(data)
    except msgspec.DecodeError as error:
        raise LogUnavailableError(f"the record of a request cannot be read ({error})") from error


async def body_of(record: StreamRecord, images: KeptImages) -> WholeBody:
    """Returns the body of a request with its images, as far as they are still there. Raises LogUnavailableError."""
    names = [one.image for one in (*record.images, *record.fetched)]
    return whole_body(record.body, record.images, record.fetched, await images.get(record.key_name, names))


def unavailable(error: LogUnavailableError) -> ServiceError:
    """Returns the error for a client whose stream cannot be looked up."""
    return ServiceError("bus_unavailable", f"Streams cannot be resumed now: {error}.", retry_after_s=1.0)
