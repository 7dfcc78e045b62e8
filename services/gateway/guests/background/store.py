"""The store of background requests on the bus: for each, a record with all that is needed to continue it, and events.

The log of events is authoritative. Each batch of events is appended only if the last batch in the log is the one that
its writer has seen last (compare-and-append). So a gateway that has lost a request can add nothing, and a request ends
once.
"""

from collections.abc import AsyncIterator

import msgspec

from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.guests.resume.record import StreamRecord
from antiphon.services.gateway.guests.resume.store import RecordStore, readable
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.deployment import stores
from antiphon.shared.errors import ServiceError


class EventBatch(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Consecutive events. `fence`: fencing token of the run that wrote them; `first`: number of the first event.

    `position`: position in the output after the last event, as in an event's id; "" before any output. `ended`: no
    batch follows. `final`: the result as JSON, if the last event does not have it.
    """

    fence: int
    first: int
    events: tuple[bytes, ...] = ()
    position: str = ""
    ended: bool = False
    final: bytes = b""

    @property
    def end(self) -> int:
        """Number of the event after the last one."""
        return self.first + len(self.events)


class History:
    """All events of a request so far. `last`: sequence number of the last batch in the log; 0: there is none."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.position = ""
        self.last = 0
        self.fence = 0
        """Fencing token of the run that has written the last batch."""
        self.ended = False
        self.final = b""

    def add(self, batch: EventBatch, sequence: int) -> None:
        """Adds a batch. Events that are already known are left out."""
        self.events += batch.events[max(0, len(self.events) - batch.first) :]
        self.position = batch.position
        self.last, self.fence, self.ended, self.final = sequence, batch.fence, batch.ended, batch.final


_DROPPED = EventBatch(fence=0, first=0, ended=True)
"""Stands for the events of an ended request that were dropped."""
_BATCHES = msgspec.msgpack.Decoder(EventBatch)
_encode = msgspec.msgpack.Encoder().encode


class BackgroundStore(RecordStore):
    """The records and the events of one gateway. Its methods raise LogUnavailableError."""

    def __init__(self, images: KeptImages) -> None:
        logs, self._subjects = images.logs, images.logs.host.subjects
        config = stores.background_records(self._subjects, logs.storage)
        super().__init__(images, config, self._subjects.background_record)
        self._events = logs.part(stores.background_events(self._subjects, logs.storage))

    async def create(self, record: StreamRecord) -> int | None:
        """Writes a new record and returns its revision.

        Returns None if there is no room for it beside the running requests of its key.
        """
        return await self.replace(record, None) if await self.admit(record) else None

    async def forget(self, request_id: str) -> None:
        """Removes the record of a request that has ended. Its events stay until their space is needed."""
        await self.part.remove(self.subject(request_id))
        self.release(request_id)

    async def unfinished(self) -> AsyncIterator[tuple[StreamRecord, int]]:
        """Yields the records of all requests that have not ended, with their revisions."""
        for found in await self.part.log.all_following(self.subject("*"), 1):
            if found.payload:
                yield readable(found.payload), found.sequence

    def use(self, request_id: str) -> None:
        """The record and the events of a request that runs in this gateway are not dropped until `release`."""
        super().use(request_id)
        self._events.use(self._subjects.background_events(request_id))

    def release(self, request_id: str) -> None:
        """See `use`."""
        super().release(request_id)
        self._events.release(self._subjects.background_events(request_id))

    async def append(self, record: StreamRecord, batch: EventBatch, last: int) -> int | None:
        """Appends a batch if `last` is the last one in the log. Returns its number; None if there is a later batch."""
        subject = self._subjects.background_events(record.request_id)
        return await self._events.append(record.key_name, subject, _encode(batch), last=last)

    async def last(self, request_id: str) -> tuple[EventBatch, int] | None:
        """Returns the last batch and its sequence number; None if there is none."""
        found = await self._events.log.last(self._subjects.background_events(request_id))
        return None if found is None else (_batch(found.payload), found.sequence)

    async def following(self, request_id: str, sequence: int) -> tuple[EventBatch, int] | None:
        """Returns the first batch with at least this sequence number, and its number; None if there is none yet."""
        found = await self._events.log.following(self._subjects.background_events(request_id), sequence)
        return None if found is None else (_batch(found.payload), found.sequence)

    async def history(self, request_id: str) -> History:
        """Returns all events so far. Raises ServiceError('not_found') if the log has dropped the first ones."""
        found = History()
        subject = self._subjects.background_events(request_id)
        for logged in await self._events.log.all_following(subject, found.last + 1):
            batch = _batch(logged.payload)
            if batch is _DROPPED or batch.first > len(found.events):
                message = "The bus has dropped events of the response, for want of space. Send the request again."
                raise ServiceError("not_found", message, param="response_id")
            found.add(batch, logged.sequence)
        return found


def _batch(data: bytes) -> EventBatch:
    try:
        return _BATCHES.decode(data) if data else _DROPPED
    except msgspec.DecodeError as error:
        raise LogUnavailableError(f"events of a background request cannot be read ({error})") from error
