"""The endpoints of `/v1/sessions`. A session belongs to the API key that made it; for other keys it does not exist."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from antiphon.services.gateway.apis.openai.answers.stream_encoder import OpenAIEncoder
from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.body import StreamOptions, TokenFields
from antiphon.services.gateway.apis.openai.listing import check_query, page
from antiphon.services.gateway.apis.openai.request_context import Arrival, RequestContext
from antiphon.services.gateway.apis.openai.serving import Serving, StreamedAnswer
from antiphon.services.gateway.edge.access.call import current_call, new_id, reachable_key
from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, encoded_response, json_response
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.responses.stored.records import LogRecords, MemoryRecords
from antiphon.services.gateway.guests.sessions.blocks import EngineBlocks
from antiphon.services.gateway.guests.sessions.continued import continuing
from antiphon.services.gateway.guests.sessions.exporting import exported
from antiphon.services.gateway.guests.sessions.importing import Importer
from antiphon.services.gateway.guests.sessions.schemas import ContinueBody, SessionBody
from antiphon.services.gateway.guests.sessions.session import ID_PREFIX, Session, as_raw, described
from antiphon.services.gateway.guests.sessions.store import WHAT, SessionStore
from antiphon.services.gateway.ops.timeline.directory import RecordDirectory
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import RecordQuery
from antiphon.shared.recorded_request import decode
from antiphon.shared.request.checks import refuse
from antiphon.shared.session_file.sealing import Sealer, check_key

KEY = "x-antiphon-session-key"
"""The header with the key of a file. It is never logged, and kept only while the file is written or read."""
FILE_TYPE = "application/octet-stream"
_BODY, _CONTINUE = msgspec.json.Decoder(SessionBody), msgspec.json.Decoder(ContinueBody)
_RETRY_AFTER_S = 5.0


class SessionFile(Response):
    """Describes the content of a session in the OpenAPI document."""

    media_type = FILE_TYPE


class TheApi(Api):
    """See Api. Without engines on a bus there are no sessions."""

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        blocks = serving.guests.offered(EngineBlocks)
        if blocks is None:
            return
        images = serving.guests.offered(KeptImages)
        self._store = SessionStore(MemoryRecords() if images is None else LogRecords(images, WHAT))
        self._records = serving.guests.offered(RecordDirectory) or RecordDirectory(Recorder(0))
        self._serving, self._blocks = serving, blocks
        self._num_moves = 0
        routes.post("/v1/sessions", self.create, Body(SessionBody))
        routes.get("/v1/sessions", self.list)
        routes.get("/v1/sessions/{session_id}", self.retrieve)
        routes.get("/v1/sessions/{session_id}/content", self.content, SessionFile)
        routes.post("/v1/sessions/{session_id}/continue", self.proceed, Body(ContinueBody))
        routes.delete("/v1/sessions/{session_id}", self.delete)

    async def create(self, request: Request) -> Response:
        """Makes a session of a recorded request, or of a file that is sent as `application/octet-stream`."""
        check_query(request, ())
        if request.headers.get("content-type", "").partition(";")[0].strip() == FILE_TYPE:
            session = await self._imported(request)
        else:
            session = await self._recorded(await _read(request, _BODY))
        await self._store.put(session)
        return json_response(described(session), headers=NOT_KEPT)

    async def list(self, request: Request, limit: int = 20, order: str = "desc", after: str | None = None) -> Response:
        """Lists the sessions of the key, the newest first."""
        check_query(request, ("limit", "order", "after"))
        objects = [described(one) for one in await self._store.all()]
        return json_response(page(objects, limit=limit, order=order, after=after), headers=NOT_KEPT)

    async def retrieve(self, request: Request, session_id: str) -> Response:
        """Answers with the description of a session."""
        check_query(request, ())
        return json_response(described(await self._store.get(session_id)), headers=NOT_KEPT)

    async def content(self, request: Request, session_id: str) -> Response:
        """Answers with the file of a session, encrypted with the key in the header."""
        check_query(request, ())
        key, session = _key(request), await self._store.get(session_id)
        card = self._serving.backend.resolve_model(session.recorded().model)
        self._check_moves()
        with self._moving():
            sealer = await asyncio.to_thread(Sealer, key)
        pieces = self._moved(exported(session, card, sealer, self._blocks))
        disposition = {"content-disposition": f'attachment; filename="{session_id}.session"'}
        return StreamingResponse(pieces, media_type=FILE_TYPE, headers={**NOT_KEPT, **disposition})

    async def proceed(self, request: Request, session_id: str) -> Response:
        """Continues a session, whole or streamed."""
        arrival = Arrival.now()
        body = await _read(request, _CONTINUE)
        if body.stream_options is not None and not body.stream:
            refuse("stream_options", "needs 'stream' to be true")
        session = await self._store.get(session_id)
        content = session.recorded()
        card = self._serving.backend.resolve_model(content.model)
        changes = {name: value for name in TokenFields.__struct_fields__ if (value := getattr(body, name)) is not None}
        backend, request_id = self._serving.backend, request.state.request_id
        wanted = await continuing(content, card, request_id, body, changes, backend=backend)
        salt = session.salt or body.cache_salt or ""
        wanted = replace(wanted, cache_salt=salt.encode())
        options, has_text = body.stream_options or StreamOptions(), wanted.output.detokenize
        context = RequestContext(
            kind="completion" if body.messages is None else "chat",
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            return_token_ids=bool(body.return_token_ids) or not has_text,
            tokens_as_ids=not has_text,
            continuous_usage=bool(options.continuous_usage_stats),
        )
        run = self._serving.runner(request, context, OpenAIEncoder(context))
        if context.stream:
            return StreamedAnswer(run, self._serving.settings.keep_alive_s)
        return encoded_response(await run.whole(request.receive))

    async def delete(self, request: Request, session_id: str) -> Response:
        """Removes a session. A file that was made of it stays valid."""
        check_query(request, ())
        await self._store.delete(await self._store.get(session_id))
        return json_response({"id": session_id, "object": "session", "deleted": True})

    async def _recorded(self, body: SessionBody) -> Session:
        content = decode(await self._find(body.id))
        if content.num_images:
            message = "The request has images, whose files are not recorded: it cannot become a session."
            raise ServiceError("unsupported_parameter", message, param="id")
        card = self._serving.backend.resolve_model(content.model)
        return Session(
            id=ID_PREFIX + new_id(),
            created=time.time(),
            key_name=current_call().key.name,
            content=as_raw(content),
            weights=card.facts.digest,
        )

    async def _find(self, name: str) -> bytes:
        """Returns the content of a request, also of one that runs. Raises ServiceError('not_found')."""
        found: dict[str, Any] | None = await self._records.find(RecordQuery(name, reachable_key(), "snapshot"))
        if found is None:
            message = f"No request '{name}' is recorded. The latest are kept: see --record-requests."
            raise ServiceError("not_found", message, param="id")
        if not found["content"]:
            why = (
                "it has not begun, or newer ones have taken its room: see --record-content-mb"
                if found["content_bytes"]
                else "start the server with --record-content-mb=64 (megabytes) before the requests"
            )
            raise ServiceError("not_found", f"The tokens of '{name}' are not recorded: {why}.", param="id")
        return found["content"]

    async def _imported(self, request: Request) -> Session:
        key, models = _key(request), self._serving.backend.models()
        self._check_moves()
        importer = Importer(ID_PREFIX + new_id(), current_call().key.name, models, self._blocks)
        pieces = request_body.pieces(request.scope["headers"], request.receive, limits.SESSION_BYTES_MAX)
        with self._moving():
            try:
                return await importer.read(pieces, key)
            except ServiceError:
                await _drained(pieces)
                raise

    def _check_moves(self) -> None:
        if self._num_moves >= limits.SESSION_MOVES_MAX:
            message = "Other sessions are being exported or imported. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=_RETRY_AFTER_S)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Counts an export or an import while it takes memory."""
        self._num_moves += 1
        try:
            yield
        finally:
            self._num_moves -= 1

    async def _moved(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        # Counted here, because an answer whose client has left before it begins is never read.
        with self._moving():
            async for piece in pieces:
                yield piece


async def _drained(pieces: AsyncIterator[bytes]) -> None:
    """Reads on for a while: a client that still sends would not see why its file is refused."""
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > limits.SESSION_DRAINED_BYTES:
            break


def _key(request: Request) -> bytes:
    passphrase = request.headers.get(KEY, "")
    if not passphrase:
        message = f"Give the key of the file in the header '{KEY}': make one with `openssl rand -hex 32`."
        raise ServiceError("missing_required_parameter", message, param="key")
    return check_key(passphrase)


async def _read(request: Request, decoder: "msgspec.json.Decoder[request_fields.T]") -> request_fields.T:
    data = await request_body.read(request.scope["headers"], request.receive) or b"{}"
    return request_fields.read(data, decoder, request_fields.OWN)
