"""The endpoints of the Responses API."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.listing import check_query, page
from antiphon.services.gateway.apis.openai.request_context import Arrival, RequestContext, Resumption
from antiphon.services.gateway.apis.openai.serving import Detached, Serving, nothing
from antiphon.services.gateway.edge.access.call import current_call, ignore, may_see
from antiphon.services.gateway.edge.http import request_body, sse
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, unless_gone
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.guests.offers import UploadedFiles
from antiphon.services.gateway.guests.responses import compaction, convert, images, input_items, schemas
from antiphon.services.gateway.guests.responses.background import BackgroundResponses, Kept, Unfinished
from antiphon.services.gateway.guests.responses.conversations.conversations import Conversations
from antiphon.services.gateway.guests.responses.conversations.record import NAME, check_room, turns_before
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.event_log import EventLog
from antiphon.services.gateway.guests.responses.input_items import Input, Item
from antiphon.services.gateway.guests.responses.response_object import ID_PREFIX, ResponseObject
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.services.gateway.guests.responses.server_tools.items import approved_ids, conversation
from antiphon.services.gateway.guests.responses.server_tools.seam import ServerTools, TurnPlan
from antiphon.services.gateway.guests.responses.server_tools.waiting import Waited, was_taken_over
from antiphon.services.gateway.guests.responses.socket import warm_up
from antiphon.services.gateway.guests.responses.socket.memory import SocketTurn, turn_of
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore, StoredResponse, unknown_response
from antiphon.services.gateway.guests.responses.tools import Tools
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import missing, refuse, unsupported
from antiphon.shared.request.conversation import Turn

log = logging.getLogger(__name__)
_CONTINUED = ("completed", "incomplete")
ReadEvents = Callable[[int], AsyncGenerator[bytes]]
"""Yields events from a number on, see `Unfinished.read`."""


class ResponseEndpoints:
    """The endpoints of the Responses API."""

    def __init__(
        self,
        serving: Serving,
        store: ResponseStore,
        conversations: Conversations,
    ) -> None:
        """`conversations`: those to which responses may belong."""
        self.store = store
        self.background = BackgroundResponses(serving, store)
        self.server_tools: ServerTools | None = None
        self._serving = serving
        self._conversations = conversations

    async def create(self, request: Request) -> Response:
        """Creates a response: whole, as a stream, or in the background."""
        arrival = Arrival.of(request)
        data = request.state.body = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.RESPONSES_DECODER, schemas.RULES)
        if body.store is None:
            # The answer of a request in a batch is in the output file of the batch.
            body.store = not current_call().in_batch
        convert.check(body)
        plan = self.server_tools.plan(body) if self.server_tools is not None else None
        if plan is None:
            _without_server_tools(body)
            shown = body
        else:
            body, shown = plan.first, plan.body
        told, socket = Tools(body), turn_of(request)
        if socket is not None and not socket.generates:
            return await self._warmed_up(request, arrival, body, told, socket)
        given = await self._given(request, body)
        turns = [*await self._earlier_turns(request, body, given), *given.turns]
        if plan is None and approved_ids(given.items):
            refuse("input", "approves a call, and the request has no tool of the type 'mcp' that makes it")
        if body.truncation == "auto":
            turns = await self._fitting(request, arrival, body, turns, told)
        context = await self._fetched(request, self._context(request, arrival, body, turns, told), turns)
        with _withdrawn_on_error(context):
            described = ResponseObject(shown, context, told)
            return await self._created(request, context, described, body, given, turns, plan)

    async def _given(self, request: Request, body: ResponsesBody) -> Input:
        """Returns the input of a request, with the files that it names. Raises ServiceError."""
        given = input_items.read(body.input, request.state.request_id)
        await self._read_files(given.turns)
        return given

    async def _read_files(self, turns: list[Turn]) -> None:
        await images.read_files(turns, self._serving.guests.offered(UploadedFiles))

    async def _warmed_up(
        self, request: Request, arrival: Arrival, body: ResponsesBody, told: Tools, socket: SocketTurn
    ) -> Response:
        """Answers with a response without output, whose prompt has been computed, so that the next one is faster."""
        given = await self._given(request, body) if body.input else Input([], [])
        turns = [*await self._earlier_turns(request, body, given), *given.turns]
        asked = warm_up.asked(body)
        context = self._context(request, arrival, asked, turns or warm_up.NO_TURNS, told)
        context = await self._fetched(request, context, turns)
        encoder = ResponseEncoder(ResponseObject(asked, context, told), context)
        with _withdrawn_on_error(context):
            await self._serving.runner(request, context, encoder).whole(request.receive)
        response, events = warm_up.completed(ResponseObject(body, context, told), encoder.response["usage"])
        record = StoredResponse(
            response=response,
            input_items=given.items,
            turns=turns,
            key_name=current_call().key.name,
        )
        await socket.responses.keep(record)
        if body.store:
            await self.store.put(record)
        return Response(events, headers={"content-type": sse.CONTENT_TYPE.decode()})

    async def _created(
        self,
        request: Request,
        context: RequestContext,
        described: ResponseObject,
        body: ResponsesBody,
        given: Input,
        turns: list[Turn],
        plan: TurnPlan | None,
    ) -> Response:
        encoder = ResponseEncoder(described, context) if plan is None else plan.encoder(described, context)
        key_name, socket = current_call().key.name, turn_of(request)

        def record_of(final: dict[str, Any], events: list[bytes]) -> StoredResponse:
            return StoredResponse(
                response=final,
                input_items=given.items,
                turns=conversation(turns, final["output"]),
                events=events,
                key_name=key_name,
            )

        async def kept(final: dict[str, Any], events: list[bytes]) -> StoredResponse:
            await self._append_later(described.conversation_id, given, final)
            return record_of(final, events)

        async def store() -> None:
            record = record_of(encoder.response, [])
            await self._append(described.conversation_id, given, record.response)
            if socket is not None:
                await socket.responses.keep(record)
            if body.store:
                await self.store.put(record)

        if plan is not None:

            def step(asked: ResponsesBody, before: Sequence[Turn]) -> RequestContext:
                return self._context(request, context.arrival, asked, [*before], Tools(asked))

            turn = plan.run(request, given, turns, context, step)
            return await self._start(request, context, encoder, kept, given.items, turn)
        if body.background:
            self._serving.check_comes_later(request, "a response in the background")
            return await self._start(request, context, encoder, kept, given.items)
        keeps = body.store or socket is not None or described.conversation_id is not None
        return await self._serving.answer(request, context, encoder, store if keeps else nothing)

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
        if unfinished := await self._unfinished(response_id):
            return json_response(await unfinished.response())
        return json_response((await self._stored(response_id)).response)

    async def cancel(self, response_id: str) -> Response:
        """Cancels a background response. Does nothing if it has ended."""
        if unfinished := await self._unfinished(response_id):
            return json_response(await unfinished.cancel())
        response = (await self._stored(response_id)).response
        if not response["background"]:
            raise _not_in_background(response_id, "cancelled")
        return json_response(response)

    async def delete(self, response_id: str) -> Response:
        """Removes a response from the store. A response that runs in the background is cancelled first."""
        if unfinished := await self._unfinished(response_id):
            await unfinished.cancel()
        await self._stored(response_id)
        if not await self.store.delete(response_id):
            raise unknown_response(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self, request: Request, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None
    ) -> Response:
        """Lists the input items of a response, without those of the responses that it continues."""
        check_query(request, ("limit", "order", "after", *schemas.INCLUDE_NAMES))
        for name in schemas.INCLUDE_NAMES:
            for number, value in enumerate(request.query_params.getlist(name)):
                if value != schemas.IMAGE_URLS:
                    unsupported(f"include[{number}]", f"Including '{value}' in input items is")
        if unfinished := await self._unfinished(response_id):
            items = await unfinished.items()
        else:
            items = (await self._stored(response_id, with_images=True)).input_items
        return json_response(page(items, limit=limit, order=order, after=after))

    # --- inside ---

    async def _earlier_turns(self, request: Request, body: ResponsesBody, given: Input) -> list[Turn]:
        """Returns the turns that come before those of the input. Raises ServiceError."""
        conversation_id = convert.conversation_of(body)
        if conversation_id is not None:
            conversation = await self._conversations.get(conversation_id)
            check_room(len(conversation.items) + len(given.items) + 1)
            earlier = turns_before(conversation, request.state.request_id)
            await self._read_files(earlier)
            earlier = images.earlier(earlier, NAME)
        elif body.previous_response_id is not None:
            earlier = await self._continued_turns(request, body.previous_response_id)
        else:
            return []
        input_items.check_results(given.turns, earlier)
        return earlier

    async def _continued_turns(self, request: Request, response_id: str) -> list[Turn]:
        """Returns the conversation that a response continues, including the output of the earlier response."""
        param, socket = "previous_response_id", turn_of(request)
        if socket is not None and (known := await socket.responses.get(response_id)) is not None:
            return images.earlier(known.turns)
        unfinished = await self._unfinished(response_id)
        if unfinished is not None and not await unfinished.is_stored():
            refuse(param, f"names the response '{response_id}', which is in progress")
        try:
            record = await self._stored(response_id, with_images=True)
        except ServiceError as error:
            if error.code != "not_found":
                raise
            raise ServiceError("previous_response_not_found", error.message, param=param) from None
        if record.response["status"] not in _CONTINUED:
            refuse(param, f"names the response '{response_id}', which is {record.response['status']}")
        return images.earlier(record.turns)

    async def _fetched(self, request: Request, context: RequestContext, turns: list[Turn]) -> RequestContext:
        """Fetches the input's images that are URLs, so that a response that continues this one has the same files."""
        wanted = context.request
        if not any(image.url for image in wanted.inputs.images):
            return context
        resumption: Resumption | None = getattr(request.state, "resumption", None)
        known = {} if resumption is None else resumption.fetched
        given = tuple([replace(one, file=known.get(one.url, one.file)) for one in wanted.inputs.images])
        wanted = structs.replace(wanted, inputs=structs.replace(wanted.inputs, images=given))
        fetched = await self._serving.backend.fetch_images(wanted)
        images.keep_files(turns, fetched.inputs.images)
        return structs.replace(context, request=fetched)

    async def _fitting(
        self,
        request: Request,
        arrival: Arrival,
        body: ResponsesBody,
        turns: list[Turn],
        told: Tools,
        num_output_tokens: int = 1,
    ) -> list[Turn]:
        """Returns the turns without the oldest ones for which the context has no room (`truncation` `auto`).

        `num_output_tokens`: room that must be left for the output, if the context has twice as much.
        """
        while len(turns) > 1:
            wanted = self._context(request, arrival, body, turns, told)
            [(tokens, _)] = await self._serving.backend.tokenize(wanted.request, return_tokens=False)
            most = wanted.card.max_model_len
            if len(tokens) + min(num_output_tokens, most // 2) <= most:
                break
            ignore("truncation")
            # Halves at first, so that few rounds are needed; a result of a tool is not left without its call.
            turns = turns[max(1, (len(turns) - 1) // 2) :]
            while len(turns) > 1 and turns[0].role == "tool":
                turns = turns[1:]
        return turns

    async def count_tokens(self, request: Request) -> Response:
        """Answers with the number of prompt tokens of a response, which is not created."""
        arrival = Arrival.now()
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.RESPONSES_DECODER, schemas.RULES)
        convert.check(body)
        given = input_items.read(body.input, request.state.request_id)
        turns = [*await self._earlier_turns(request, body, given), *given.turns]
        wanted = self._context(request, arrival, body, turns, Tools(body)).request
        [(tokens, _)] = await self._serving.backend.tokenize(wanted, return_tokens=False)
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def compact(self, request: Request) -> Response:
        """Answers with a shorter conversation: its user's messages, and the model's own summary of everything."""
        arrival = Arrival.now()
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.RESPONSES_DECODER, schemas.RULES)
        if body.model is None:
            missing("model")
        given = input_items.read(body.input, request.state.request_id)
        turns = [*await self._earlier_turns(request, body, given), *given.turns, compaction.QUESTION]
        asked, tools = compaction.body_of(body), Tools(compaction.body_of(body))
        turns = await self._fitting(request, arrival, asked, turns, tools, limits.COMPACTION_TOKENS_MAX)
        context = self._context(request, arrival, asked, turns, tools)
        encoder = ResponseEncoder(ResponseObject(asked, context, tools), context)
        await self._serving.runner(request, context, encoder).whole(request.receive)
        return json_response(compaction.answer(encoder.response, given.items))

    def _context(
        self, request: Request, arrival: Arrival, body: ResponsesBody, turns: list[Turn], told: Tools
    ) -> RequestContext:
        serving, request_id = self._serving, request.state.request_id
        card = serving.backend.resolve_model(body.model)
        conversation = input_items.conversation(body.instructions, turns)
        wanted, answer = convert.response_request(
            body, conversation, told, card, request_id, serving.defaults_of(request), serving.settings
        )
        return RequestContext(
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            id_prefix=ID_PREFIX,
            answer_format=answer,
        )

    async def _start(
        self,
        request: Request,
        context: RequestContext,
        encoder: ResponseEncoder,
        kept: Kept,
        items: list[Item],
        turn: Detached | None = None,
    ) -> Response:
        """Starts a background response, or one of several steps. `items`: those of its input."""
        if not current_call().was_admitted:
            self.background.check_room()
        if turn is not None and context.request.origin.reservation is not None:
            context.request.origin.reservation.withdraw()  # each step has its own
        begun = await self.background.start(request, context, encoder, kept, items, turn)
        request.state.body = b""
        keep_alive_s, is_stored = self._serving.settings.keep_alive_s, encoder.response["store"]
        if encoder.response["background"] or turn is None or was_taken_over(request):
            return (
                LoggedAnswer(begun.read, 0, keep_alive_s) if context.stream else json_response(await begun.response())
            )
        waited = Waited(begun, cancels=not is_stored)
        if context.stream:
            return LoggedAnswer(waited.read, 0, keep_alive_s)
        return json_response(await waited.whole(request.receive))

    async def _append(self, conversation_id: str | None, given: Input, response: dict[str, Any]) -> None:
        """Appends the items of a response that has ended to its conversation. Raises ServiceError."""
        if conversation_id is None or response["status"] not in _CONTINUED:
            return
        try:
            # A later response has the same images, whatever becomes of their URLs.
            asked = images.with_files(given.items, given.turns)
            await self._conversations.append(conversation_id, [*asked, *response["output"]])
        except ServiceError as error:
            if error.code != "not_found":  # else the client has deleted it meanwhile
                raise

    async def _append_later(self, conversation_id: str | None, given: Input, response: dict[str, Any]) -> None:
        """Does the same for a background response, whose client has seen its end. Raises LogUnavailableError."""
        try:
            await self._append(conversation_id, given, response)
        except ServiceError as error:
            if error.code == "bus_unavailable" and self.background.keeps_trying:
                raise LogUnavailableError(error.message) from error
            log.warning("the response %s is not in its conversation: %s", response["id"], error)

    async def _stored(self, response_id: str, *, with_images: bool = False) -> StoredResponse:
        """Returns a stored response. Raises ServiceError if there is none, or if it belongs to another key."""
        record = await self.store.get(response_id)
        if record is None or not may_see(record.key_name):
            raise unknown_response(response_id)
        return await self.store.with_images(record) if with_images else record

    async def _unfinished(self, response_id: str) -> Unfinished | None:
        """Returns a background response that has not ended, if the current call's key created it."""
        found = await self.background.find(response_id)
        return found if found is not None and may_see(found.key_name) else None

    async def _events(self, response_id: str) -> ReadEvents:
        if unfinished := await self._unfinished(response_id):
            return unfinished.read
        record = await self._stored(response_id)
        if not record.response["background"] and not record.events:
            raise _not_in_background(response_id, "streamed again")
        return EventLog(record.events, ended=True).read


class LoggedAnswer(Response):
    """An ASGI response that writes the events of a background response.

    The background response continues if the client disconnects.
    """

    def __init__(self, read: ReadEvents, first: int, keep_alive_s: float) -> None:
        # The constructor of Response is not called, because it would render a body.
        self.background = None
        self._read = read
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
        async with contextlib.aclosing(self._read(self._first)) as reading:
            async for data in reading:
                await channel.write(data)
        await channel.end(b"")


@contextlib.contextmanager
def _withdrawn_on_error(context: RequestContext) -> Iterator[None]:
    """Withdraws the reservation of a request that fails in the block. It has no effect if the request was run."""
    try:
        yield
    except BaseException:
        if context.request.origin.reservation is not None:
            context.request.origin.reservation.withdraw()
        raise


def _without_server_tools(body: ResponsesBody) -> None:
    """Tells the client that a limit for tools that the server runs has no effect."""
    if body.max_tool_calls is not None:
        ignore("max_tool_calls")


def _not_in_background(response_id: str, what: str) -> ServiceError:
    message = f"The response '{response_id}' cannot be {what}: it was not created with 'background'."
    return ServiceError("invalid_value", message, param="response_id")
