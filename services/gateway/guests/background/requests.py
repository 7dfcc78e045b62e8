"""Background requests, which survive their gateway: another gateway continues them after their last stored event.

`StreamRecord` names the owner and has the fencing token. To take over a request, a gateway writes itself as owner into
the record. Then it appends an empty batch to the log of events, which fences the former owner: it can append nothing
after this batch. Last, it runs the stored request from the last event on, as for a client that resumes a stream.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.serving import Detached
from antiphon.services.gateway.guests.background.event_writer import EventWriter
from antiphon.services.gateway.guests.background.store import BackgroundStore, EventBatch, History
from antiphon.services.gateway.guests.resume.body_images import without_images
from antiphon.services.gateway.guests.resume.claim import Claim, claimed_record, is_recordable, new_record, uncounted
from antiphon.services.gateway.guests.resume.journal import Journal, JournaledStream
from antiphon.services.gateway.guests.resume.position import START, Position, parse
from antiphon.services.gateway.guests.resume.positioned import PositionedEvents
from antiphon.services.gateway.guests.resume.record import Accepted, StreamRecord, accepted_of
from antiphon.services.gateway.guests.resume.running import RunningStream
from antiphon.services.gateway.guests.resume.store import StreamStore, body_of, unavailable
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import StreamTaken

log = logging.getLogger(__name__)
_OPENING = 2
"""Events before the run: that the response is created, and that it is queued or in progress."""
Living = Callable[[], set[tuple[str, str]]]
"""Returns the ids and instance ids of the running gateways that are not shutting down, this one included."""


class BackgroundRun:
    """One request that runs in this gateway: its journaled stream, and the writer of its events."""

    def __init__(self, stream: RunningStream, writer: EventWriter, record: StreamRecord) -> None:
        self.stream = stream
        self.writer = writer
        self.record = record

    async def run(self, runner: Detached) -> None:
        """Runs the request to its end. Raises ServiceError: 'stream_taken' if another gateway has it now."""
        writing = asyncio.create_task(self.writer.run(self.stream.take_away))
        try:
            await self.stream.detached(runner, self.writer)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


class BackgroundStreams:
    """The background requests of one gateway. `tokens`: the store of journals, which `journal` writes."""

    def __init__(
        self, host: Host, store: BackgroundStore, tokens: StreamStore, journal: Journal, living: Living
    ) -> None:
        self.store = store
        self.running: dict[str, BackgroundRun] = {}
        self._host = host
        self._tokens = tokens
        self._journal = journal
        self._living = living
        self._beginning: set[str] = set()
        self._is_leaving = False

    async def begin(self, request: Request, context: RequestContext) -> BackgroundRun | None:
        """Records a new request. Returns None if it is not recorded: then only this gateway can run and show it.

        Raises ServiceError('bus_unavailable') if the record cannot be written.
        """
        if not self._journal.is_open:
            return None
        cut = without_images(request.state.body, context.request.inputs.images)
        if not is_recordable(context, cut.body):
            return None
        record = new_record(request, context, self._host, self._journal.position + 1, outlives_client=True)
        record = msgspec.structs.replace(record, body=cut.body, images=cut.images, fetched=cut.fetched)
        self._beginning.add(record.request_id)
        try:
            await self.store.images.put(record.key_name, cut.files)
            revision = await self.store.create(record)
        except LogUnavailableError as error:
            raise unavailable(error) from error
        finally:
            self._beginning.discard(record.request_id)
        if revision is None:
            return None
        writer = EventWriter(self.store, record, History())
        count = context.num_sequences
        events = PositionedEvents(record.request_id, count, Position(number=_OPENING))
        return self._add(record, revision, tuple([Accepted() for _ in range(count)]), events, writer)

    async def take_over(self, record: StreamRecord, revision: int) -> tuple[Claim, EventWriter] | None:
        """Makes this gateway the owner of a request. Returns None if another gateway is faster.

        Raises LogUnavailableError, or ServiceError: 'stream_taken' if another gateway takes it at the same time,
        'internal_error' if the bus has lost events, 'stream_expired' if gateways end whenever they run the request.
        """
        accepted = accepted_of(record, await self._tokens.journal(record))
        position, owner_died = self._journal.position + 1, not self._is_own(record)
        num_events = len((await self.store.history(record.request_id)).events) - _OPENING
        claimed = claimed_record(record, self._host, accepted, position, owner_died=owner_died, num_events=num_events)
        new_revision = await self.store.replace(claimed, revision)
        if new_revision is None:
            return None
        writer = EventWriter(self.store, claimed, await self.store.history(record.request_id))
        await writer.claim()
        whole = await body_of(record, self.store.images)
        if writer.history.ended:
            return Claim(claimed, new_revision, accepted, START, whole), writer
        if not whole.is_whole:
            raise ServiceError("internal_error", "The bus has dropped an image of the response, for want of space.")
        num_events = len(writer.history.events)
        position = parse(writer.history.position, "position")
        if position.number is None:
            position = Position(number=num_events)
        if position.number != num_events or num_events < _OPENING:
            raise ServiceError("internal_error", "The events of the response are not all there, so it cannot go on.")
        return Claim(claimed, new_revision, accepted, position, whole), writer

    def resumed(self, claim: Claim, writer: EventWriter, context: RequestContext) -> BackgroundRun:
        """Returns the run that continues a request which this gateway has taken over."""
        events, replayed, resumed = claim.run(context)
        found = self._add(claim.record, claim.revision, replayed, events, writer)
        found.stream.resumed = resumed
        return found

    async def stop(self, record: StreamRecord, ending: Callable[[History], tuple[tuple[bytes, ...], bytes]]) -> History:
        """Ends a request, on whichever gateway it runs, and returns all its events. Writes nothing if it has ended.

        `ending` returns the last events and `EventBatch.final`. Raises LogUnavailableError.
        """
        fence = record.fence + 1
        while not (history := await self.store.history(record.request_id)).ended:
            events, final = ending(history)
            batch = EventBatch(
                fence=fence,
                first=len(history.events),
                events=events,
                position=history.position,
                ended=True,
                final=final,
            )
            if (sequence := await self.store.append(record, batch, history.last)) is not None:
                history.add(batch, sequence)
                break
        await self._take_away(record, fence)
        return history

    def is_orphan(self, record: StreamRecord) -> bool:
        """Whether no gateway runs a request: its owner is gone, or is this gateway, which does not run it."""
        if self._is_leaving or record.request_id in self.running or record.request_id in self._beginning:
            return False
        living = self.living()
        return bool(living) and (self._is_own(record) or (record.owner_id, record.owner_instance_id) not in living)

    def living(self) -> set[tuple[str, str]]:
        """Returns the running gateways; none if this gateway's own heartbeats do not arrive, so it cannot know."""
        found = self._living()
        return found if self._own() in found else set()

    def on_taken(self, message: StreamTaken) -> None:
        """Ends the run of a request that has ended elsewhere."""
        found = self.running.get(message.request_id)
        if found is not None and found.writer.fence < message.fence:
            found.stream.take_away()

    async def leave(self) -> None:
        """Ends all runs in this gateway, because it shuts down; other gateways continue them.

        Their records then tell that the gateway has not died of them.
        """
        self._is_leaving = True
        left = [one.stream.journaled for one in self.running.values() if one.stream.journaled is not None]
        for found in list(self.running.values()):
            found.stream.take_away("draining")
        try:
            await asyncio.gather(*(self.store.replace(uncounted(one.record), one.revision) for one in left))
        except LogUnavailableError as error:
            log.warning("other gateways will count the background responses that this one leaves: %s", error)

    async def _take_away(self, record: StreamRecord, fence: int) -> None:
        if (here := self.running.get(record.request_id)) is not None:
            here.stream.take_away("cancelled_by_api")
            await here.stream.over()
        elif not self._is_own(record):
            subject = self._host.subjects.gateway_peers(record.owner_id, record.owner_instance_id)
            # If the message is lost, the owner notices when it writes its next event.
            with contextlib.suppress(ServiceError):
                await self._host.transport.publish(subject, encode(StreamTaken(record.request_id, fence)))

    def _is_own(self, record: StreamRecord) -> bool:
        return (record.owner_id, record.owner_instance_id) == self._own()

    def _own(self) -> tuple[str, str]:
        return self._host.id, self._host.instance_id

    def _add(
        self,
        record: StreamRecord,
        revision: int,
        replayed: tuple[Accepted, ...],
        events: PositionedEvents,
        writer: EventWriter,
    ) -> BackgroundRun:
        stream = RunningStream(events, 0.0, self._ended)
        stream.journaled = JournaledStream(record, replayed, stream.take_away, self.store)
        stream.journaled.revision = revision
        self.store.use(record.request_id)
        found = self.running[record.request_id] = BackgroundRun(stream, writer, record)
        self._journal.add(stream.journaled)
        return found

    def _ended(self, stream: RunningStream) -> None:
        assert stream.journaled is not None
        request_id = stream.journaled.record.request_id
        found = self.running.get(request_id)
        if found is not None and found.stream is stream:
            del self.running[request_id]
            if not found.writer.history.ended:  # else `forget` does it, when the response is stored
                self.store.release(request_id)
        self._journal.remove(stream.journaled)
