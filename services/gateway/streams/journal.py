"""Writes the accepted tokens of a gateway's streams asynchronously, and renews the streams' records.

On the token path a stream only appends to lists in memory. One task writes the new tokens of all streams, every
`STREAM_JOURNAL_S` in one message. If the store does not answer, the tokens stay in those lists, which the requests need
anyway.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from services.gateway.generation import SequenceUpdate
from services.gateway.streams.record import Accepted, JournalEntry, Progress, StreamRecord
from services.gateway.streams.store import StreamStore
from shared import limits
from shared.bus.durable_log import LogUnavailableError
from shared.errors import ServiceError

log = logging.getLogger(__name__)


class RecordStore(Protocol):
    """The store of stream records. Its methods raise LogUnavailableError."""

    async def find(self, request_id: str) -> tuple[StreamRecord, int] | None:
        """Returns a record and its revision; None if there is none."""
        ...

    async def replace(self, record: StreamRecord, revision: int) -> int | None:
        """Writes a record if it still has this revision. Returns the new revision; None if another gateway wrote it."""
        ...


class JournaledStream:
    """The accepted tokens of one stream that runs in this gateway.

    `on_lost` is called if another gateway has taken the stream over.

    `replayed`: tokens of each sequence with which the run has begun.
    """

    def __init__(
        self,
        record: StreamRecord,
        replayed: tuple[Accepted, ...],
        journal: "Journal",
        on_lost: Callable[[], None],
        records: "RecordStore | None" = None,
    ) -> None:
        """`records`: the store of the record, if it is not that of the journal."""
        self.record = record
        self.records = records
        self.accepted = list(replayed)
        self.on_lost = on_lost
        self.revision = 0
        """Revision of the record in the store; 0 if it is unknown."""
        self._journal = journal
        self._written = [len(one.token_ids) for one in self.accepted]
        self._engines = [one.engine for one in self.accepted]
        """For each sequence, the engine that the journal or the record names."""
        self._is_new = [False] * len(self.accepted)

    def saw(self, update: SequenceUpdate) -> None:
        """Records new output. Called on the token path, so it does as little as possible."""
        index = update.index
        self.accepted[index].add_update(update)
        if not self._is_new[index]:
            self._is_new[index] = True
            self._journal.changed(self)

    def news(self) -> tuple[Progress, ...]:
        """Returns the progress that is not written yet."""
        return tuple([self._news(index) for index, new in enumerate(self._is_new) if new])

    def written(self, progress: tuple[Progress, ...]) -> None:
        """Records that `progress` is in the journal."""
        for one in progress:
            self._written[one.index] = one.end
            self._engines[one.index] = one.engine or self._engines[one.index]
            now = self.accepted[one.index]
            self._is_new[one.index] = len(now.token_ids) > one.end or now.ended != one.ended
        if any(self._is_new):
            self._journal.changed(self)  # for tokens that arrived while the journal was being written

    def _news(self, index: int) -> Progress:
        found = self.accepted[index].progress(index, self._written[index])
        return msgspec.structs.replace(found, engine=None) if found.engine == self._engines[index] else found

    def progress(self) -> tuple[Progress, ...]:
        """Returns everything so far, for the record."""
        return tuple([one.progress(index) for index, one in enumerate(self.accepted)])


class Journal:
    """The journal of one gateway. Nothing is written unless `run` is running."""

    def __init__(self, store: StreamStore) -> None:
        self.position = 0
        """Sequence number of the last message of this gateway that is known to be in the journal."""
        self.is_open = False
        """Whether the store takes records."""
        self._closed_at = -math.inf
        """When the store stopped taking records, monotonic seconds; -inf if it has not taken any."""
        self.running: dict[str, JournaledStream] = {}
        self._store = store
        self._changed: dict[str, JournaledStream] = {}
        self._wake = asyncio.Event()

    @property
    def opens_soon(self) -> bool:
        """Whether the store took records until a moment ago, so that the bus has probably only been restarted."""
        return time.monotonic() - self._closed_at < limits.STREAM_STORE_AWAY_S

    def changed(self, stream: JournaledStream) -> None:
        """Schedules the write of a stream's new tokens."""
        if not self._changed:
            self._wake.set()
        self._changed[stream.record.request_id] = stream

    async def run(self) -> None:
        """Writes and renews until it is cancelled. An unavailable store is opened again."""
        warned = False
        while True:
            try:
                await self._store.open()
                self.position = 0  # the bus may have lost the journal, whose numbers then begin again
                self.is_open, warned = True, False
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write())
                    tasks.create_task(self._renew())
            except* (LogUnavailableError, ServiceError) as group:
                if not warned:
                    log.warning("streams are not recorded and cannot be resumed: %s", group.exceptions[0])
                if self.is_open:
                    self._closed_at = time.monotonic()
                self.is_open, warned = False, True
            await asyncio.sleep(limits.STREAM_STORE_TIMEOUT_S)

    async def close(self) -> None:
        """Writes the remaining tokens, if the store answers."""
        if self.is_open and self._changed:
            try:
                await self._flush()
            except (LogUnavailableError, ServiceError) as error:
                log.warning("the last tokens of streams are not recorded: %s", error)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(limits.STREAM_JOURNAL_S)
            await self._flush()

    async def _flush(self) -> None:
        self._wake.clear()
        changed, self._changed = self._changed, {}
        try:
            for part in _parts(changed):
                entries = tuple(JournalEntry(one.record.request_id, one.record.token, news) for one, news in part)
                self.position = await self._store.note(entries)
                for one, news in part:
                    one.written(news)
                    changed.pop(one.record.request_id, None)
        finally:
            for one in changed.values():  # streams of a part that was not written
                self._changed.setdefault(one.record.request_id, one)
            if self._changed:
                self._wake.set()

    async def _renew(self) -> None:
        # The bus may have lost the records, and streams may have begun while it was away.
        for stream in list(self.running.values()):
            if stream.record.request_id in self.running and not await self._renew_one(stream):
                await self._renew_one(stream)
        while True:
            await asyncio.sleep(limits.STREAM_RENEW_S / 10)
            due = time.time() - limits.STREAM_RENEW_S
            for stream in [one for one in self.running.values() if one.record.renewed_at < due]:
                await self._renew_one(stream)

    async def _renew_one(self, stream: JournaledStream) -> bool:
        """Renews a record. If another gateway has written it, this gateway has lost the stream.

        A record that the store has lost is written anew, by the second attempt. Returns False if a second attempt is
        needed.
        """
        record, store = stream.record, stream.records or self._store
        if not stream.revision:
            found = await store.find(record.request_id)
            stream.revision = found[1] if found is not None and found[0].token == record.token else 0
            if found is not None and not stream.revision:
                stream.on_lost()
                return True
        renewed = _renewed(record, stream.progress(), self.position + 1)
        revision = await store.replace(renewed, stream.revision)
        if revision is None:
            # Another gateway has the stream, or the store has dropped the record: the next attempt looks it up.
            stream.revision = 0
            return False
        stream.record, stream.revision = renewed, revision
        return True


def _renewed(record: StreamRecord, progress: tuple[Progress, ...], journal_from: int) -> StreamRecord:
    return msgspec.structs.replace(record, progress=progress, journal_from=journal_from, renewed_at=time.time())


def _parts(
    changed: dict[str, JournaledStream],
) -> Iterator[list[tuple[JournaledStream, tuple[Progress, ...]]]]:
    """Yields the streams' new tokens in parts that fit into one message each."""
    part: list[tuple[JournaledStream, tuple[Progress, ...]]] = []
    size = 0
    for stream in list(changed.values()):
        news = stream.news()
        size += sum(len(one.tokens) for one in news)
        part.append((stream, news))
        if size > limits.STREAM_JOURNAL_BYTES_MAX:
            yield part
            part, size = [], 0
    if part:
        yield part
