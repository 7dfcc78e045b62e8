"""The endpoints of the Responses API."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.access.call import current_call, may_see
from services.gateway.http import request_body, sse
from services.gateway.http.auth import ApiKeys
from services.gateway.http.disconnect import ClientGoneError, unless_gone
from services.gateway.http.json_response import json_response
from services.gateway.http.request_id import is_id
from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.bodies.parameter_names import renamed
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.listing import check_query, page
from services.gateway.openai.request_context import Arrival, RequestContext, Resumption
from services.gateway.openai.serving import Serving, nothing
from services.gateway.responses import convert, input_items, pictures, schemas
from services.gateway.responses.background import BackgroundResponse, BackgroundResponses
from services.gateway.responses.encoder import ResponseEncoder
from services.gateway.responses.event_log import EventLog
from services.gateway.responses.input_items import Input
from services.gateway.responses.pictures import PictureFiles
from services.gateway.responses.response_object import ID_PREFIX, ResponseObject, output_turn
from services.gateway.responses.schemas import ResponsesBody
from services.gateway.responses.stored import snapshot
from services.gateway.responses.stored.recorded import RecordedResponses, final_of
from services.gateway.responses.stored.store import MemoryResponseStore, ResponseStore, StoredResponse, unknown_response
from services.gateway.streams.background.event_writer import EventReader
from services.gateway.streams.background.requests import BackgroundStreams
from services.gateway.streams.background.store import History
from services.gateway.streams.record import StreamRecord
from shared.errors import ServiceError
from shared.request.checks import refuse, unsupported
from shared.request.conversation import Turn

_CONTINUED = ("completed", "incomplete")
_INCLUDE = ("include", "include[]")
"""Names of the query parameter, a list. OpenAI's clients write it with brackets."""


class ResponseEndpoints:
    """The endpoints of the Responses API."""

    def __init__(
        self,
        serving: Serving,
        store: ResponseStore | None = None,
        streams: BackgroundStreams | None = None,
        keys: ApiKeys | None = None,
        files: PictureFiles | None = None,
    ) -> None:
        """`streams` records background responses, so that other gateways can continue them; default: they cannot.

        `keys` finds the API keys of these responses. `files` reads pictures that are uploaded files; by default there
        are none.
        """
        self._serving = serving
        self._store = MemoryResponseStore(time.monotonic) if store is None else store
        self._background = BackgroundResponses()
        self._files = files
        self.recorded: RecordedResponses | None = None
        if streams is not None and keys is not None:
            self.recorded = RecordedResponses(serving, self._store, streams, keys, self.create)

    async def create(self, request: Request) -> Response:
        """Creates a response: whole, as a stream, or in the background."""
        arrival = Arrival.of(request)
        data = request.state.body = await request_body.read(request.scope["headers"], request.receive)
        unsupported_params.check(read_fields(data), ResponsesBody, rules=schemas.RULES)
        body = read_body(data, schemas.RESPONSES_DECODER)
        if body.store is None:
            # The answer of a request in a batch is in the output file of the batch.
            body.store = not current_call().in_batch
        convert.check(body)
        given = input_items.read(body.input, request.state.request_id)
        if self._files is not None:
            await self._files.read_into(given.turns)
        turns = [*await self._earlier_turns(body.previous_response_id), *given.turns]
        context = await self._fetched(request, self._context(request, arrival, body, turns), turns)
        with _withdrawn_on_error(context):
            return await self._created(request, context, body, given, turns)

    async def _created(
        self, request: Request, context: RequestContext, body: ResponsesBody, given: Input, turns: list[Turn]
    ) -> Response:
        key_name, num_bytes = current_call().key.name, len(request.state.body)
        encoder = ResponseEncoder(ResponseObject(body, context), context)

        async def store() -> None:
            await self._put(encoder, given, turns, num_bytes, key_name)

        if body.background:
            return await self._start(request, context, encoder, given, turns, num_bytes)
        return await self._serving.answer(request, context, encoder, store if body.store else nothing)

    async def retrieve(
        self, request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        """Answers with a response, or with its events if `stream` is true: those after number `starting_after`."""
        check_query(request, ("stream", "starting_after", "include_obfuscation"))
        if starting_after is not None and not stream:
            refuse("starting_after", "needs 'stream' to be true")
        if starting_after is not None and starting_after < 0:
            refuse("starting_after", "must be the sequence number of an event")
        if stream:
            first = 0 if starting_after is None else starting_after + 1
            return LoggedAnswer(await self._events(response_id), first, self._serving.settings.keep_alive_s)
        if running := self._running(response_id):
            return json_response(running.encoder.snapshot())
        recorded, record = await self._unfinished(response_id)
        if recorded is not None and record is not None:
            return json_response(await recorded.response(record))
        return json_response((await self._stored(response_id)).response)

    async def cancel(self, response_id: str) -> Response:
        """Cancels a background response. Does nothing if it has ended."""
        if running := self._running(response_id):
            await running.cancel()
            return json_response(running.encoder.response)
        recorded, record = await self._unfinished(response_id)
        if recorded is not None and record is not None:
            return json_response(await recorded.cancel(record))
        response = (await self._stored(response_id)).response
        if not response["background"]:
            raise _not_in_background(response_id, "cancelled")
        return json_response(response)

    async def delete(self, response_id: str) -> Response:
        """Removes a response from the store. A response that runs in the background is cancelled first."""
        if running := self._running(response_id):
            await running.cancel()
        recorded, record = await self._unfinished(response_id)
        if recorded is not None and record is not None:
            await recorded.cancel(record)
        await self._stored(response_id)
        if not await self._store.delete(response_id):
            raise unknown_response(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self, request: Request, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None
    ) -> Response:
        """Lists the input items of a response, without those of the responses that it continues."""
        check_query(request, ("limit", "order", "after", *_INCLUDE))
        for name in _INCLUDE:
            for number, value in enumerate(request.query_params.getlist(name)):
                if value != schemas.PICTURE_URLS:
                    unsupported(f"include[{number}]", f"Including '{value}' in input items is")
        recorded, record = await self._unfinished(response_id)
        if running := self._running(response_id):
            items = running.input_items
        elif recorded is not None and record is not None:
            items = await recorded.items(record)
        else:
            items = (await self._stored(response_id, with_pictures=True)).input_items
        return json_response(page(items, limit=limit, order=order, after=after))

    # --- inside ---

    async def _earlier_turns(self, response_id: str | None) -> list[Turn]:
        """Returns the conversation that a response continues, including the output of the earlier response."""
        param = "previous_response_id"
        if response_id is None:
            return []
        recorded, unfinished = await self._unfinished(response_id)
        is_running = recorded is not None and unfinished is not None and not await recorded.is_stored(unfinished)
        if is_running or self._running(response_id):
            refuse(param, f"names the response '{response_id}', which is in progress")
        with renamed({"response_id": param}):
            record = await self._stored(response_id, with_pictures=True)
        if record.response["status"] not in _CONTINUED:
            refuse(param, f"names the response '{response_id}', which is {record.response['status']}")
        return pictures.earlier(record.turns)

    async def _fetched(self, request: Request, context: RequestContext, turns: list[Turn]) -> RequestContext:
        """Fetches the input's pictures that are URLs, so that a response that continues this one has the same files."""
        wanted = context.request
        if not any(picture.url for picture in wanted.pictures):
            return context
        resumption: Resumption | None = getattr(request.state, "resumption", None)
        known = {} if resumption is None else resumption.fetched
        given = tuple([replace(one, file=known.get(one.url, one.file)) for one in wanted.pictures])
        fetched = await self._serving.backend.fetch_pictures(structs.replace(wanted, pictures=given))
        pictures.keep_files(turns, fetched.pictures)
        return structs.replace(context, request=fetched)

    def _context(self, request: Request, arrival: Arrival, body: ResponsesBody, turns: list[Turn]) -> RequestContext:
        serving, request_id = self._serving, request.state.request_id
        card = serving.backend.resolve_model(body.model)
        conversation = input_items.conversation(body.instructions, turns)
        wanted, answer = convert.response_request(
            body, conversation, card, request_id, serving.defaults_of(request), serving.settings
        )
        return RequestContext(
            kind="chat",
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            include_usage=True,
            echoes=("",),
            id_prefix=ID_PREFIX,
            answer_format=answer,
        )

    async def _start(
        self,
        request: Request,
        context: RequestContext,
        encoder: ResponseEncoder,
        given: Input,
        turns: list[Turn],
        num_bytes: int,
    ) -> Response:
        async def store(ended: BackgroundResponse) -> None:
            await self._put(encoder, given, turns, num_bytes, key_name, ended.events.events)

        def kept(history: History) -> StoredResponse:
            final = final_of(history)
            return StoredResponse(
                response=final,
                input_items=given.items,
                turns=[*turns, output_turn(final["output"])],
                encoded_bytes=num_bytes + encoder.num_bytes,
                events=history.events,
                key_name=key_name,
            )

        key_name, recorded = current_call().key.name, self.recorded
        if recorded is None or not recorded.is_taken_over(request):
            self._background.check_room(0 if recorded is None else recorded.num_running())
        if recorded is not None and (begun := await recorded.start(request, context, encoder, kept)):
            if context.stream:
                return LoggedAnswer(recorded.reader(begun), 0, self._serving.settings.keep_alive_s)
            return json_response(snapshot.response_of(begun.writer.shown()))
        run = self._serving.runner(request, context, encoder)
        running = await self._background.start(BackgroundResponse(run, encoder, given.items, key_name), store)
        if context.stream:
            return LoggedAnswer(running.events, 0, self._serving.settings.keep_alive_s)
        return json_response(encoder.snapshot())

    async def _put(
        self,
        encoder: ResponseEncoder,
        given: Input,
        turns: list[Turn],
        num_bytes: int,
        key_name: str,
        events: list[bytes] | None = None,
    ) -> None:
        """Stores a response that has ended. `num_bytes`: size of the request's body; `key_name`: its API key's name."""
        record = StoredResponse(
            response=encoder.response,
            input_items=given.items,
            turns=[*turns, encoder.output_turn()],
            encoded_bytes=num_bytes + encoder.num_bytes,
            events=events or [],
            key_name=key_name,
        )
        await self._store.put(record)

    async def _stored(self, response_id: str, *, with_pictures: bool = False) -> StoredResponse:
        """Returns a stored response. Raises ServiceError if there is none, or if it belongs to another key."""
        record = await self._store.get(response_id)
        if record is None or not may_see(record.key_name):
            raise unknown_response(response_id)
        return await self._store.with_pictures(record) if with_pictures else record

    def _running(self, response_id: str) -> BackgroundResponse | None:
        """Returns a running background response of this gateway, if the current call's key created it."""
        found = self._background.get(response_id)
        return found if found is not None and may_see(found.key_name) else None

    async def _unfinished(self, response_id: str) -> tuple[RecordedResponses | None, StreamRecord | None]:
        """Returns `self.recorded` and the record of a background response, whichever gateway runs it.

        The record is None if there is none, or if another key created the response.
        """
        request_id = response_id.removeprefix(ID_PREFIX)
        if self.recorded is None or not is_id(request_id):
            return None, None
        found = await self.recorded.find(request_id)
        return self.recorded, found if found is not None and may_see(found.key_name) else None

    async def _events(self, response_id: str) -> EventLog | EventReader:
        if running := self._running(response_id):
            return running.events
        recorded, unfinished = await self._unfinished(response_id)
        if recorded is not None and unfinished is not None:
            return recorded.events(unfinished)
        record = await self._stored(response_id)
        if not record.response["background"]:
            raise _not_in_background(response_id, "streamed again")
        return EventLog(record.events, ended=True)


class LoggedAnswer(Response):
    """An ASGI response that writes the events of a background response.

    The background response continues if the client disconnects.
    """

    def __init__(self, events: EventLog | EventReader, first: int, keep_alive_s: float) -> None:
        # The constructor of Response is not called, because it would render a body.
        self.background = None
        self._events = events
        self._first = first
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the events from the first one on, until the response has ended or the client disconnects."""
        channel = sse.EventChannel(send, keep_alive_s=self._keep_alive_s)
        try:
            await unless_gone(receive, self._write(channel), channel.guard())
        except ClientGoneError:
            return

    async def _write(self, channel: sse.EventChannel) -> None:
        async for data in self._events.read(self._first):
            await channel.write(data)
        await channel.end(b"")


@contextlib.contextmanager
def _withdrawn_on_error(context: RequestContext) -> Iterator[None]:
    """Withdraws the reservation of a request that fails in the block. It has no effect if the request was run."""
    try:
        yield
    except BaseException:
        if context.request.reservation is not None:
            context.request.reservation.withdraw()
        raise


def _not_in_background(response_id: str, what: str) -> ServiceError:
    message = f"The response '{response_id}' cannot be {what}: it was not created with 'background'."
    return ServiceError("invalid_value", message, param="response_id")
