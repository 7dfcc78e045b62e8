"""Writes the events of one background request to the bus, and reads them from there.

Clients see only events that are in the log. So every client sees the same events, whichever gateway continues the
request.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.background.store import BackgroundStore, EventBatch, History
from antiphon.services.gateway.guests.resume.record import StreamRecord
from antiphon.services.gateway.guests.resume.running import taken
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
_ID = b"id: "


class EventWriter:
    """Implements `serving.Sink`. `history`: the events in the log; the writer adds to it.

    `record`: the record of the request; it has the fencing token of the run. Every method that writes waits while the
    bus does not answer, and raises ServiceError('stream_taken') when the log has a batch of another run.
    """

    def __init__(self, store: BackgroundStore, record: StreamRecord, history: History) -> None:
        self.request_id = record.request_id
        self.history = history
        self.fence = record.fence
        self.changed = asyncio.Event()
        """Set when events have been written, and then replaced by a new object."""
        self._store, self._record = store, record
        self._num_written = len(history.events)
        self._positions: list[str] = []
        """The position after each event that this run has added."""
        self._ending = history.ended
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()

    async def write(self, data: bytes) -> None:
        """Queues events, which are written soon."""
        self._add(data)
        self._wake.set()

    async def end(self, data: bytes) -> None:
        """Writes the last events. Returns when they are in the log."""
        self._add(data)
        self._ending = True
        await self.flush()

    async def claim(self) -> None:
        """Appends an empty batch, after which no former run can write. Then reads the events of former runs."""
        while True:
            marker = EventBatch(fence=self.fence, first=len(self.history.events), position=self.history.position)
            if self.history.ended or await self._appended(marker):
                self._num_written, self._ending = len(self.history.events), self.history.ended
                return
            self.history = await self._store.history(self.request_id)
            if self.history.fence > self.fence and not self.history.ended:
                raise taken()  # another gateway has taken the request over after this one

    async def run(self, on_lost: Callable[[], None]) -> None:
        """Writes new events until it is cancelled. Calls `on_lost` when another gateway has taken the request over."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(limits.STREAM_FLUSH_S)
            self._wake.clear()
            try:
                await self.flush()
            except ServiceError:
                on_lost()
                return

    async def flush(self) -> None:
        """Writes the queued events."""
        async with self._lock:
            warned = False
            while (batch := self._next()) is not None:
                try:
                    await self._write(batch)
                except LogUnavailableError as error:
                    if not warned:
                        log.warning("the events of the request %s wait for the bus: %s", self.request_id, error)
                    warned = True
                    await asyncio.sleep(limits.STREAM_STORE_TIMEOUT_S)

    def shown(self) -> list[bytes]:
        """Returns the events that are in the log."""
        return self.history.events[: self._num_written]

    def _add(self, data: bytes) -> None:
        for event in sse.split_events(data):
            if event.startswith(_ID):
                where, _, event = event.partition(b"\n")
                self.history.position = where.decode().rpartition(":")[2]
            self.history.events.append(event)
            self._positions.append(self.history.position)

    def _next(self) -> EventBatch | None:
        """Returns as many queued events as fit into one message; None if there are none."""
        events = self.history.events
        end, size = self._num_written, 0
        while end < len(events) and (size == 0 or size + len(events[end]) <= limits.BACKGROUND_BATCH_BYTES_MAX):
            size += len(events[end])
            end += 1
        ended = self._ending and end == len(events)
        if end == self._num_written and not (ended and not self.history.ended):
            return None
        added = self._positions[: len(self._positions) - (len(events) - end)] if end < len(events) else self._positions
        position = added[-1] if added else self.history.position
        return EventBatch(
            fence=self.fence,
            first=self._num_written,
            events=tuple(events[self._num_written : end]),
            position=position,
            ended=ended,
        )

    async def _write(self, batch: EventBatch) -> None:
        if await self._appended(batch):
            self._written(batch)
            return
        found = await self._store.last(self.request_id)
        if found is None:
            # A bus without persistent storage was restarted.
            self._num_written, self.history.last, self.history.ended = 0, 0, False
            return
        last, sequence = found
        if last.fence != self.fence or last.first != batch.first:
            raise taken()
        # The bus had written the batch, but its answer was lost.
        self.history.last = sequence
        self._written(last)

    async def _appended(self, batch: EventBatch) -> bool:
        sequence = await self._store.append(self._record, batch, self.history.last)
        if sequence is not None:
            self.history.last = sequence
        return sequence is not None

    def _written(self, batch: EventBatch) -> None:
        self._num_written, self.history.ended = batch.end, batch.ended
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class EventReader:
    """Reads the events of one request as they arrive. `writer`: set if the request runs in this gateway."""

    def __init__(self, store: BackgroundStore, request_id: str, writer: EventWriter | None = None) -> None:
        self._store = store
        self._request_id = request_id
        self._writer = writer

    async def read(self, first: int) -> AsyncGenerator[bytes]:
        """Yields the events from number `first` on, several at a time, and waits for further ones until the end."""
        sequence = 1
        while True:
            changed = None if self._writer is None else self._writer.changed
            try:
                found = await self._store.following(self._request_id, sequence)
                if found is None:
                    last = await self._store.last(self._request_id)
                    if last is None and await self._store.find(self._request_id) is None:
                        return  # The bus has lost the request, and no gateway runs it.
                    # After a restart of the bus, sequence numbers begin anew.
                    sequence = 1 if last is not None and last[1] < sequence - 1 else sequence
            except LogUnavailableError as error:
                log.warning("a reader of the request %s waits for the bus: %s", self._request_id, error)
                await asyncio.sleep(limits.STREAM_STORE_TIMEOUT_S)
                continue
            if found is None:
                await _soon(changed)
                continue
            batch, sequence = found[0], found[1] + 1
            if events := batch.events[max(0, first - batch.first) :]:
                first = batch.end
                yield b"".join(events)
            if batch.ended:
                return


async def _soon(changed: asyncio.Event | None) -> None:
    """Returns after a while, or when this gateway has written."""
    if changed is None:
        await asyncio.sleep(limits.STREAM_FLUSH_S)
        return
    try:
        async with asyncio.timeout(10 * limits.STREAM_FLUSH_S):
            await changed.wait()
    except TimeoutError:
        return
