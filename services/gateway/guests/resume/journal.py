"""Writes the accepted tokens of a gateway's streams asynchronously, and renews the streams' records.

The token path does nothing for it: every `STREAM_JOURNAL_S` one task reads the new tokens of all streams where their
requests keep them anyway, and writes them in one message. If the store does not answer, they are written later.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from antiphon.services.gateway.guests.resume.record import Accepted, JournalEntry, Progress, StreamRecord
from antiphon.services.gateway.guests.resume.store import RecordStore, StreamStore
from antiphon.services.gateway.path.generation import ResumedOutput
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)


class JournaledStream:
    """One stream that runs in this gateway: which of its accepted tokens are not in the journal yet.

    `on_lost` is called if another gateway has taken the stream over.
    """

    def __init__(
        self,
        record: StreamRecord,
        replayed: tuple[Accepted, ...],
        on_lost: Callable[[], None],
        records: RecordStore | None = None,
    ) -> None:
        """`replayed`: the tokens of each sequence with which the run begins.

        `records`: the store of the record, if it is not that of the journal.
        """
        self.record = record
        self.records = records
        self.on_lost = on_lost
        self.num_prompt_tokens = record.num_prompt_tokens
        self.revision = 0
        """Revision of the record in the store; 0 if it is unknown."""
        self._replayed = replayed
        self._outputs: Sequence[SequenceState] = ()
        self._num_cached: tuple[int | None, ...] = (None,) * len(replayed)
        self._written = [len(one.token_ids) for one in replayed]
        self._ends_written = [False] * len(replayed)
        self._engines = [one.engine for one in replayed]
        """For each sequence, the engine that the journal or the record names."""

    def follow(
        self, outputs: Sequence[SequenceState], resumed: ResumedOutput | None, num_prompt_tokens: int = 0
    ) -> None:
        """Sets the output of the sequences, from which the tokens are read whenever they are needed.

        Called once, when there is output. So the token path does nothing for the journal. `resumed`: the output of the
        former run. This run has found the prompt in the cache, so the former run's number of cached tokens is kept.
        """
        self._outputs, self.num_prompt_tokens = outputs, num_prompt_tokens
        if resumed is not None:
            self._num_cached = resumed.num_cached_tokens

    @property
    def accepted(self) -> list[Accepted]:
        """Returns the accepted tokens of each sequence."""
        if not self._outputs:
            return list(self._replayed)
        return [self._progress(index, output).accepted() for index, output in enumerate(self._outputs)]

    @property
    def has_news(self) -> bool:
        """Whether there is output that is not in the journal."""
        return any(self._is_new(index, output) for index, output in enumerate(self._outputs))

    def news(self) -> tuple[Progress, ...]:
        """Returns the progress that is not written yet."""
        return tuple(
            [
                self._progress(index, output, self._written[index], self._engines[index])
                for index, output in enumerate(self._outputs)
                if self._is_new(index, output)
            ]
        )

    def written(self, progress: tuple[Progress, ...]) -> None:
        """Records that `progress` is in the journal."""
        for one in progress:
            self._written[one.index], self._ends_written[one.index] = one.end, one.ended
            self._engines[one.index] = one.engine or self._engines[one.index]

    def progress(self) -> tuple[Progress, ...]:
        """Returns everything so far, for the record."""
        if not self._outputs:
            return tuple([one.progress(index) for index, one in enumerate(self._replayed)])
        return tuple([self._progress(index, output) for index, output in enumerate(self._outputs)])

    def _is_new(self, index: int, output: SequenceState) -> bool:
        if len(output.token_ids) > self._written[index]:
            return True
        return _ended(output) and not self._ends_written[index]

    def _progress(
        self, index: int, output: SequenceState, first: int = 0, known_engine: tuple[str, str] | None = None
    ) -> Progress:
        """Returns the tokens of a sequence from position `first` on, and its state; the engine if it is not known."""
        known = self._num_cached[index]
        # A sequence that waits for an engine keeps the last one.
        engine = output.engine or self._engines[index]
        return Progress(
            index=index,
            first=first,
            tokens=pack_ids(output.token_ids[first:]),
            cumulative_logprob=output.cumulative_logprob,
            num_cached=output.num_cached_tokens if known is None else known,
            ended=_ended(output),
            last_from=output.last_from,
            last_from_logprob=output.last_from_logprob,
            engine=None if engine == known_engine else engine,
        )


def _ended(output: SequenceState) -> bool:
    """Whether a sequence has ended, not because it failed."""
    return output.finish_reason not in (None, "error")


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
        """The streams that run in this gateway, by request id."""
        self._ended: list[JournaledStream] = []
        """Streams whose run has ended, with output that is not written yet. Bounded, because a stream begins only
        while the store takes records, or did so a moment ago."""
        self._store = store
        self._has_streams = asyncio.Event()

    @property
    def opens_soon(self) -> bool:
        """Whether the store took records until a moment ago, so that the bus has probably only been restarted."""
        return time.monotonic() - self._closed_at < limits.STREAM_STORE_AWAY_S

    def add(self, stream: JournaledStream) -> None:
        """Adds a stream whose tokens are to be written while it runs."""
        self.running[stream.record.request_id] = stream
        self._has_streams.set()

    def remove(self, stream: JournaledStream) -> None:
        """Drops a stream whose run has ended, after its last tokens have been written."""
        if self.running.get(stream.record.request_id) is stream:
            del self.running[stream.record.request_id]
        self._ended.append(stream)

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
        if self.is_open:
            try:
                await self._flush()
            except (LogUnavailableError, ServiceError) as error:
                log.warning("the last tokens of streams are not recorded: %s", error)

    async def _write(self) -> None:
        while True:
            await self._has_streams.wait()
            await asyncio.sleep(limits.STREAM_JOURNAL_S)
            await self._flush()
            if not (self.running or self._ended):
                self._has_streams.clear()

    async def _flush(self) -> None:
        ended, self._ended = self._ended, []
        try:
            for part in _parts([*ended, *self.running.values()]):
                entries = tuple([_entry(one, news) for one, news in part])
                self.position = await self._store.note(entries)
                for one, news in part:
                    one.written(news)
        finally:
            self._ended += [one for one in ended if one.has_news]

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
            stream.revision = found[1] if found is not None and found[0].fence == record.fence else 0
            if found is not None and not stream.revision:
                stream.on_lost()
                return True
        renewed = _renewed(stream, self.position + 1)
        revision = await store.replace(renewed, stream.revision)
        if revision is None:
            # Another gateway has the stream, or the store has dropped the record: the next attempt looks it up.
            stream.revision = 0
            return False
        stream.record, stream.revision = renewed, revision
        return True


def _entry(stream: JournaledStream, news: tuple[Progress, ...]) -> JournalEntry:
    return JournalEntry(stream.record.request_id, stream.record.fence, news, stream.num_prompt_tokens)


def _renewed(stream: JournaledStream, journal_from: int) -> StreamRecord:
    return msgspec.structs.replace(
        stream.record,
        progress=stream.progress(),
        journal_from=journal_from,
        renewed_at=time.time(),
        num_prompt_tokens=stream.num_prompt_tokens,
    )


def _parts(streams: list[JournaledStream]) -> Iterator[list[tuple[JournaledStream, tuple[Progress, ...]]]]:
    """Yields the streams' new tokens in parts that fit into one message each."""
    part: list[tuple[JournaledStream, tuple[Progress, ...]]] = []
    size = 0
    for stream in streams:
        if not (news := stream.news()):
            continue
        size += sum(len(one.tokens) for one in news)
        part.append((stream, news))
        if size > limits.STREAM_JOURNAL_BYTES_MAX:
            yield part
            part, size = [], 0
    if part:
        yield part
