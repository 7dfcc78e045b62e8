"""The recorded streams of a gateway: records new streams, and continues streams whose clients reconnect.

A stream is resumed by running its stored request again, through the same endpoint, with the values of the first run
(request id, time, seed) and its accepted tokens as output. Events that the client already has are omitted. There is one
run at a time: the gateway that resumes a stream increments the fencing token in its record, which ends the former run
on any gateway.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.serving import LAST_EVENT_ID, RESUMABLE, StreamBook
from antiphon.services.gateway.edge.access.call import current_call, is_id, may_see
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.edge.http.routing.direct_route import Endpoint
from antiphon.services.gateway.edge.http.server.web_socket import FROM_SOCKET
from antiphon.services.gateway.guests.offers import RecordedOutput, RecordedRequests
from antiphon.services.gateway.guests.resume.body_images import CutBody, WholeBody, without_images
from antiphon.services.gateway.guests.resume.claim import (
    Claim,
    claimed_record,
    is_recordable,
    new_record,
    stored_request,
)
from antiphon.services.gateway.guests.resume.cut import beyond_the_end
from antiphon.services.gateway.guests.resume.journal import Journal, JournaledStream
from antiphon.services.gateway.guests.resume.position import START, Position, parse
from antiphon.services.gateway.guests.resume.positioned import PositionedEvents
from antiphon.services.gateway.guests.resume.record import Accepted, StreamRecord, accepted_of, output_of
from antiphon.services.gateway.guests.resume.running import RunningStream, taken
from antiphon.services.gateway.guests.resume.store import RecordStore, StreamStore, body_of, unavailable
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import StreamTaken

log = logging.getLogger(__name__)
_CLAIMS_MAX = 5
_STORED_AFTER_S = (0.01, 0.03, 0.1, 0.2)
"""Pauses before a record that is not found is looked up again, seconds."""


class Streams(Guest, StreamBook, RecordedRequests):
    """The recorded streams. They are a guest of the gateway, and what the APIs record streams with.

    `grace_s`: how long a stream continues without its client, if the client asked for a resumable stream.
    `records_all`: all streams are recorded, also if the client did not ask for it. `heard` returns the ids and instance
    ids of the gateways whose heartbeats arrive, this one included.
    """

    def __init__(
        self,
        host: Host,
        store: StreamStore,
        grace_s: float,
        *,
        records_all: bool = False,
        heard: Callable[[], set[tuple[str, str]]] = set,
    ) -> None:
        super().__init__()
        self.journal = Journal(store)
        self.store = store
        self.stores: list[tuple[RecordStore, float]] = [(store, limits.STREAM_RESUME_S)]
        """Stores of records whose tokens are in the journal, and how long after a record was written its request can be
        continued, seconds."""
        self.receivers: list[Callable[[StreamTaken], None]] = [self.on_taken]
        """Who is told that another gateway has taken over a stream."""
        self._heard = heard
        self._host = host
        self._grace_s = grace_s
        self.records_all = records_all
        self._endpoints: dict[str, Endpoint] = {}
        self._running: dict[str, RunningStream] = {}

    def resumable(self, path: str, endpoint: Endpoint) -> Endpoint:
        """See StreamBook."""
        self._endpoints[path] = endpoint
        return super().resumable(path, endpoint)

    def can_resume(self, path: str) -> bool:
        """See StreamBook."""
        return path in self._endpoints

    async def resumed(self, request: Request, path: str) -> Response:
        """See StreamBook."""
        request_id, _, position = request.headers[LAST_EVENT_ID].partition(":")
        body = await request_body.read(request.scope["headers"], request.receive)
        return await self.resume(request_id, parse(position, "Last-Event-ID"), path, body)

    async def retrieve(self, request: Request, stream_id: str) -> Response:
        """The endpoint `GET /v1/streams/{id}`: resumes after the position `from`, by default from the beginning."""
        for name in request.query_params:
            if name != "from":
                raise ServiceError("unsupported_parameter", f"Unknown parameter '{name}'.", param=name)
        return await self.resume(stream_id.partition(":")[0], parse(request.query_params.get("from", "0"), "from"))

    async def end(self, stream_id: str) -> Response:
        """The endpoint `DELETE /v1/streams/{id}`: ends a stream, also without its client and at another gateway.

        It cannot be resumed any more.
        """
        try:
            claim = await self._claim(stream_id, START, cause="cancelled_by_api")
            await self.store.replace(msgspec.structs.replace(claim.record, renewed_at=0.0), claim.revision)
        except LogUnavailableError as error:
            raise unavailable(error) from error
        return json_response({"id": stream_id, "object": "stream.deleted", "deleted": True})

    async def recorded(self, request_id: str) -> RecordedOutput | None:
        """See RecordedRequests."""
        for store, seconds in self.stores:
            found = await store.find(request_id)
            if found is not None:
                record = found[0]
                return output_of(record, await self.store.journal(record), record.renewed_at + seconds)
        return None

    async def begin(self, request: Request, context: RequestContext) -> RunningStream | None:
        """Records a new or resumed stream. Returns None if it is not recorded."""
        claim: Claim | None = request.scope["state"].get("claim")
        if claim is not None:
            return self._resumed(claim, context)
        asked = request.headers.get(RESUMABLE, "0") not in ("0", "false")
        # Nobody can resume a stream on a WebSocket, whose state ends with it.
        if "records" not in request.scope["state"] or FROM_SOCKET in request.scope["state"]:
            return None
        if not (asked or self.records_all):
            return None
        if not self.journal.is_open and not (asked and self.journal.opens_soon):
            return None
        # Images are kept only for clients that ask for a resumable stream: they take space in the log of responses.
        images = context.request.inputs.images if asked else ()
        cut = without_images(request.state.body, images) if images else None
        if not is_recordable(context, request.state.body if cut is None else cut.body):
            return None
        record = new_record(
            request,
            context,
            self._host,
            self.journal.position + 1,
            outlives_client=asked,
            kept_headers=self.kept_headers,
        )
        if cut is not None:
            if cut.files and not await self._keep_images(cut):
                return None
            record = msgspec.structs.replace(record, body=cut.body, images=cut.images)
        # If the journal is not open, it writes the record when it is open again.
        if self.journal.is_open and not await self.store.create(record):
            return None
        nothing = tuple(Accepted() for _ in range(context.num_sequences))
        events = PositionedEvents(record.request_id, context.num_sequences)
        return self._add(record, nothing, events)

    def ended(self, stream: RunningStream) -> None:
        """Drops a stream whose run has ended. Its record stays in the store."""
        journaled = stream.journaled
        assert journaled is not None
        request_id = journaled.record.request_id
        if self._running.get(request_id) is stream:
            del self._running[request_id]
        self.store.release(request_id)
        self.journal.remove(journaled)
        # Breaks a reference cycle, which would need the garbage collector.
        journaled.on_lost = _nothing

    def on_taken(self, message: StreamTaken) -> None:
        """Ends the run of a stream that another gateway has taken over."""
        stream = self._running.get(message.request_id)
        if stream is not None and stream.journaled is not None and stream.journaled.record.fence < message.fence:
            stream.take_away()

    @handles(StreamTaken)
    def on_stream_taken(self, envelope: Envelope[StreamTaken]) -> None:
        """Ends the run of what another gateway has resumed."""
        message = envelope.message
        for receive in self.receivers:
            receive(message)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """See Lifetime."""
        return [self.journal.run()]

    async def leave(self) -> None:
        """See Lifetime. Ends the streams that continue without their clients."""
        self._grace_s = 0.0
        for stream in list(self._running.values()):
            stream.leave()

    def hand_over(self) -> None:
        """See Lifetime. Ends the streams whose clients resume them."""
        for stream in list(self._running.values()):
            if stream.journaled is not None and stream.journaled.record.outlives_client:
                stream.hand_over()

    async def finish(self) -> None:
        """See Lifetime."""
        await self.journal.close()

    async def _keep_images(self, cut: CutBody) -> bool:
        """Writes the image files that were taken out of a body. Returns whether the bus has them."""
        try:
            await self.store.images.put(current_call().key.name, cut.files)
        except LogUnavailableError as error:
            log.warning("a stream with images is not recorded: %s", error)
            return False
        return True

    # --- resuming ---

    async def resume(self, request_id: str, position: Position, path: str = "", body: bytes = b"") -> Response:
        """Returns the rest of a stream. With `path` it must be a stream of that path, with the same body.

        Raises ServiceError: 'not_found', 'stream_expired', 'invalid_value' for a position that the stream cannot have.
        """
        try:
            claim = await self._claim(request_id, position, path, body)
        except LogUnavailableError as error:
            raise unavailable(error) from error
        record = claim.record
        call = current_call()
        call.client_request_id, call.timeout = record.client_request_id or call.client_request_id, record.timeout
        return await self._endpoints[record.path](stored_request(claim))

    async def _find(self, request_id: str) -> tuple[StreamRecord, int] | None:
        """Returns a record and its revision; None if there is none.

        A client may ask before the store has the record, because the first event does not wait until the record is
        stored.
        """
        for pause_s in _STORED_AFTER_S:
            found = await self.store.find(request_id)
            if found is not None:
                return found
            await asyncio.sleep(pause_s)
        return await self.store.find(request_id)

    async def _claim(
        self, request_id: str, position: Position, path: str = "", body: bytes = b"", cause: str = "stream_taken"
    ) -> Claim:
        for _ in range(_CLAIMS_MAX):
            found = await self._find(request_id) if is_id(request_id) else None
            if found is None or not may_see(found[0].key_name) or (path and found[0].path != path):
                raise _unknown(request_id)
            record, revision = found
            whole = await body_of(record, self.store.images)
            if not whole.is_whole:
                raise _expired(request_id, "its images are not kept any more")
            if path and body != whole.body:
                told = "The stream was begun with another body. Send the same one, or no 'Last-Event-ID'."
                raise ServiceError("invalid_value", told, param="Last-Event-ID")
            if time.time() - record.renewed_at > limits.STREAM_RESUME_S:
                raise _expired(request_id, f"it can be resumed for {limits.STREAM_RESUME_S:g} seconds")
            claim = await self._take(record, revision, position, whole, cause)
            if claim is not None:
                return claim
        raise taken()

    async def _take(
        self, record: StreamRecord, revision: int, position: Position, whole: WholeBody, cause: str
    ) -> Claim | None:
        """Makes this gateway the owner; a run here ends for `cause`.

        Returns None if another gateway has become the owner meanwhile.

        Raises ServiceError, see `claimed_record`.
        """
        here = self._running.get(record.request_id)
        if here is not None and here.journaled is not None:
            here.take_away(cause)
            await here.over()
            accepted = here.journaled.accepted
        else:
            accepted = accepted_of(record, await self.store.journal(record))
        _check_position(position, accepted)
        owner = record.owner_id, record.owner_instance_id
        own, heard = (self._host.id, self._host.instance_id), self._heard()
        owner_died = own in heard and owner not in heard
        claimed = claimed_record(record, self._host, accepted, self.journal.position + 1, owner_died=owner_died)
        new_revision = await self.store.replace(claimed, revision)
        if new_revision is None:
            return None
        if owner != own:
            subject = self._host.subjects.gateway_peers(*owner)
            await self._host.transport.publish(subject, encode(StreamTaken(record.request_id, claimed.fence)))
        return Claim(claimed, new_revision, accepted, position, whole)

    def _resumed(self, claim: Claim, context: RequestContext) -> RunningStream:
        events, replayed, resumed = claim.run(context)
        stream = self._add(claim.record, replayed, events)
        assert stream.journaled is not None
        stream.journaled.revision = claim.revision
        stream.resumed = resumed
        return stream

    def _add(self, record: StreamRecord, replayed: tuple[Accepted, ...], events: PositionedEvents) -> RunningStream:
        stream = RunningStream(events, self._grace_s if record.outlives_client else 0.0, self.ended)
        stream.journaled = JournaledStream(record, replayed, stream.take_away)
        self._running[record.request_id] = stream
        self.store.use(record.request_id)
        self.journal.add(stream.journaled)
        return stream


def _nothing() -> None:
    """Does nothing: a run that has ended cannot lose its stream."""


def _check_position(position: Position, accepted: list[Accepted]) -> None:
    """Raises ServiceError for a position after the end of a stream that is known to have ended."""
    for shown, one in zip(position.shown, accepted, strict=False):
        if one.ended and shown.num_tokens > len(one.token_ids):
            raise beyond_the_end()


def _unknown(request_id: str) -> ServiceError:
    message = f"No stream with the id {request_id[:64]!r} is known. Send the request again."
    return ServiceError("not_found", message, param="id")


def _expired(request_id: str, why: str) -> ServiceError:
    told = f"The stream {request_id!r} is too old: {why}. Send the request again."
    return ServiceError("stream_expired", told, param="id")
