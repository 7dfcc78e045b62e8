"""The background responses of one gateway, recorded so that any gateway can show, stream, cancel and continue them.

A response has ended when its last batch of events is in the log. Then it is stored like any other response, and its
record is removed.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.serving import Detached, Serving
from antiphon.services.gateway.edge.access.call import Call, is_id, serving
from antiphon.services.gateway.edge.http.errors import as_service_error
from antiphon.services.gateway.edge.http.request_body import read_body
from antiphon.services.gateway.guests.background import snapshot
from antiphon.services.gateway.guests.background.event_writer import EventReader, EventWriter
from antiphon.services.gateway.guests.background.requests import BackgroundRun, BackgroundStreams
from antiphon.services.gateway.guests.background.store import History
from antiphon.services.gateway.guests.responses import input_items, schemas
from antiphon.services.gateway.guests.responses.background import BackgroundResponses, Kept, Unfinished
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.response_object import FINAL, ID_PREFIX
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore, StoredResponse
from antiphon.services.gateway.guests.resume.claim import Claim, stored_request
from antiphon.services.gateway.guests.resume.record import StreamRecord
from antiphon.services.gateway.guests.resume.store import body_of
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
_PERMANENT = ("invalid_api_key", "permission_denied", "invalid_value")
_RETRY_S = 1.0
_WATCH_S = 1.0
"""Interval at which a gateway checks whether other gateways are gone, seconds."""


class RecordedResponse:
    """One background response that has not ended. Implements Unfinished."""

    def __init__(self, streams: BackgroundStreams, store: ResponseStore, record: StreamRecord) -> None:
        self._streams, self._store, self._record = streams, store, record
        self.key_name = record.key_name

    def read(self, first: int) -> AsyncGenerator[bytes]:
        """See Unfinished."""
        here = self._streams.running.get(self._record.request_id)
        writer = None if here is None else here.writer
        return EventReader(self._streams.store, self._record.request_id, writer).read(first)

    async def response(self) -> dict[str, Any]:
        """See Unfinished."""
        here = self._streams.running.get(self._record.request_id)
        if here is not None and (events := here.writer.shown()):
            return snapshot.response_of(events)
        with _told():
            history = await self._streams.store.history(self._record.request_id)
            if not history.events:
                raise LogUnavailableError("the events of the response are not on the bus yet")
        return final_of(history)

    async def items(self) -> list[input_items.Item]:
        """See Unfinished."""
        with _told():
            return await self._items()

    async def is_stored(self) -> bool:
        """See Unfinished."""
        if (await self.response())["status"] not in FINAL:
            return False
        with _told():
            return await self._stored_elsewhere()

    async def cancel(self) -> dict[str, Any]:
        """See Unfinished. The response may run on any gateway."""

        def ending(history: History) -> tuple[tuple[bytes, ...], bytes]:
            return (), msgspec.json.encode(snapshot.cancelled_of(history.events))

        with _told():
            history = await self._streams.stop(self._record, ending)
            if history.final:
                await self._store.keep(await self.kept(history))
                await self._streams.store.forget(self._record.request_id)
            else:
                await self._stored_elsewhere()
        return final_of(history)

    async def kept(self, history: History) -> StoredResponse:
        """Returns the stored form of a cancelled or failed response, which no other response can continue.

        Raises LogUnavailableError.
        """
        record = self._record
        return StoredResponse(
            response=final_of(history),
            input_items=await self._items(),
            turns=[],
            events=history.events,
            key_name=record.key_name,
        )

    async def _items(self) -> list[input_items.Item]:
        whole = await body_of(self._record, self._streams.store.images)
        body = read_body(whole.body, schemas.RESPONSES_DECODER)
        return input_items.read(body.input, self._record.request_id).items

    async def _stored_elsewhere(self) -> bool:
        """Waits until a response that has ended is stored, for a limited time. Returns whether it is."""
        for _ in range(int(limits.STREAM_STORE_TIMEOUT_S / limits.STREAM_FLUSH_S)):
            if await self._streams.store.find(self._record.request_id) is None:
                return True
            await asyncio.sleep(limits.STREAM_FLUSH_S)
        return False


class RecordedResponses(BackgroundResponses):
    """The background responses of one gateway. Those that cannot be recorded end with it.

    `create`: the endpoint, with which responses of other gateways are run again.
    """

    keeps_trying = True

    def __init__(
        self,
        serving: Serving,
        store: ResponseStore,
        streams: BackgroundStreams,
        create: Callable[[Request], Awaitable[Response]],
    ) -> None:
        super().__init__(serving, store)
        self._streams = streams
        self._create = create
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks that take over or run a response, by request id."""

    def num_running(self) -> int:
        """See BackgroundResponses."""
        return super().num_running() + len(self._streams.running)

    async def find(self, response_id: str) -> Unfinished | None:
        """See BackgroundResponses. The response may run in any gateway; it is taken over if its gateway is gone."""
        request_id = response_id.removeprefix(ID_PREFIX)
        if (here := await super().find(response_id)) is not None or not is_id(request_id):
            return here
        with _told():
            found = await self._streams.store.find(request_id)
        if found is None:
            return None
        self._adopt(*found)
        return self._one(found[0])

    async def start(
        self,
        request: Request,
        context: RequestContext,
        encoder: ResponseEncoder,
        kept: Kept,
        items: list[input_items.Item],
        turn: Detached | None = None,
    ) -> Unfinished:
        """See BackgroundResponses. The response begins, or this gateway has taken it over."""
        taken_over: tuple[Claim, EventWriter] | None = getattr(request.state, "taken_over", None)
        if taken_over is None:
            run = await self._streams.begin(request, context) if encoder.response["store"] else None
            if run is None:
                return await super().start(request, context, encoder, kept, items, turn)
            await run.writer.write(encoder.queued())
            await run.writer.flush()
        else:
            run = self._streams.resumed(*taken_over, context)
            encoder.queued()  # The events are already in the log.
        request_id = context.request.request_id
        task = asyncio.create_task(
            self._run(request, turn or self.serving.runner(request, context, encoder, recorded=run.stream), run, kept)
        )
        self._keep(request_id, task)
        return self._one(run.record)

    async def watch(self) -> None:
        """Takes over the responses of gateways that are gone, until it is cancelled."""
        known: set[tuple[str, str]] = set()
        missing: set[tuple[str, str]] = set()
        is_due = True
        while True:
            await asyncio.sleep(_WATCH_S)
            living = self._streams.living()
            if not living:
                continue
            # A gateway counts as gone if it is missing in two checks: after a loss of the bus, heartbeats do not all
            # return at once.
            is_due = is_due or bool(missing - living)
            is_first, missing, known = not known, known - living, living
            if is_due and not is_first:
                is_due = not await self._adopt_all()

    async def leave(self) -> None:
        """Ends all runs in this gateway, because it shuts down; other gateways continue them."""
        await self._streams.leave()
        for task in list(self._tasks.values()):
            task.cancel()

    # --- inside ---

    def _one(self, record: StreamRecord) -> RecordedResponse:
        return RecordedResponse(self._streams, self.store, record)

    async def _adopt_all(self) -> bool:
        """Takes over all responses that no gateway runs. Returns False if the bus did not answer."""
        try:
            async for record, revision in self._streams.store.unfinished():
                self._adopt(record, revision)
        except LogUnavailableError as error:
            log.warning("background responses of gateways that are gone wait for the bus: %s", error)
            return False
        return True

    def _adopt(self, record: StreamRecord, revision: int) -> None:
        if self._streams.is_orphan(record) and record.request_id not in self._tasks:
            self._keep(record.request_id, asyncio.create_task(self._take_over(record, revision)))

    async def _take_over(self, record: StreamRecord, revision: int) -> None:
        try:
            taken_over = await self._streams.take_over(record, revision)
        except LogUnavailableError as error:
            log.warning("the background response %s is not taken over yet: %s", record.request_id, error)
            return
        except ServiceError as error:
            if error.code != "stream_taken":
                await self._fail(record, error)
            return
        if taken_over is not None:
            log.info("goes on with the background response %s of %s", record.request_id, record.owner_id)
            await self._run_again(*taken_over)

    async def _run_again(self, claim: Claim, writer: EventWriter) -> None:
        """Runs the stored request as soon as its model can be used.

        If the model stays unavailable, the response fails.
        """
        record, history = claim.record, writer.history
        if history.ended and final_of(history)["status"] not in ("completed", "incomplete"):
            await self._store_it(record.request_id, lambda: self._one(record).kept(history))
            return
        attempts = int(limits.BACKGROUND_RETRY_S / _RETRY_S)
        for attempt in range(1, attempts + 1):
            request = stored_request(claim)
            request.state.taken_over = claim, writer
            try:
                key = self.serving.keys.named(record.key_name, record.path)
                name, timeout = record.client_request_id, record.timeout
                with serving(Call(key=key, client_request_id=name, timeout=timeout, was_admitted=True)):
                    await self._create(request)
                return
            except ServiceError as error:
                if error.code in _PERMANENT or attempt == attempts:
                    await self._fail(record, error)
                    return
            await asyncio.sleep(_RETRY_S)

    async def _run(self, request: Request, runner: Detached, run: BackgroundRun, kept: Kept) -> None:
        writer = run.writer
        try:
            if writer.history.ended:
                run.stream.take_away()
            await run.run(runner)
        except ServiceError as error:
            if error.code != "stream_taken":
                await self._failed(run, runner.metrics.count_error, error)
        except Exception as error:
            await self._failed(run, runner.metrics.count_error, as_service_error(error))
        if writer.history.ended:

            async def stored() -> StoredResponse:
                return await kept(final_of(writer.history), writer.history.events)

            await self._store_it(request.state.request_id, stored)

    async def _failed(self, run: BackgroundRun, count: Callable[[str], None], error: ServiceError) -> None:
        count(error.code)
        try:
            await run.writer.end(snapshot.failure_of(run.writer.history.events, error))
        except ServiceError as taken:
            log.info("the failed response %s goes on elsewhere: %s", run.writer.request_id, taken)

    async def _fail(self, record: StreamRecord, error: ServiceError) -> None:
        """Ends a response as failed, because it cannot be run again."""

        def ending(history: History) -> tuple[tuple[bytes, ...], bytes]:
            return (snapshot.failure_of(history.events, error),), b""

        log.warning("the background response %s cannot go on: %s", record.request_id, error)
        try:
            try:
                history = await self._streams.stop(record, ending)
            except ServiceError:  # its events are lost, so its end cannot be recorded
                await self._streams.store.forget(record.request_id)
                return
        except LogUnavailableError as unavailable:
            log.warning("the failure of the response %s is not stored: %s", record.request_id, unavailable)
            return
        await self._store_it(record.request_id, lambda: self._one(record).kept(history))

    async def _store_it(self, request_id: str, kept: Callable[[], Awaitable[StoredResponse]]) -> None:
        """Stores a response that has ended, as soon as the bus answers."""
        while True:
            try:
                await self.store.keep(await kept())
                await self._streams.store.forget(request_id)
                return
            except LogUnavailableError as error:
                log.warning("the response of the request %s waits for the bus: %s", request_id, error)
                await asyncio.sleep(limits.STREAM_STORE_TIMEOUT_S)

    def _keep(self, request_id: str, task: "asyncio.Task[None]") -> None:
        self._tasks[request_id] = task

        def ended(done: "asyncio.Task[None]") -> None:
            if self._tasks.get(request_id) is done:
                del self._tasks[request_id]
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("the background response %s: %s", request_id, error, exc_info=error)

        task.add_done_callback(ended)


def final_of(history: History) -> dict[str, Any]:
    """Returns the response after these events."""
    return msgspec.json.decode(history.final) if history.final else snapshot.response_of(history.events)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Has clients get an error if the bus does not answer in the block."""
    try:
        yield
    except LogUnavailableError as error:
        told = f"Background responses cannot be looked up now: {error}."
        raise ServiceError("bus_unavailable", told, retry_after_s=1.0) from error
