"""The API `GET /v1/requests/{id}/record` and `…/output`, `POST …/replay` and `…/fork`, and `POST /v1/replay`.

A key can read and repeat the requests that it has made; a key with the scope `admin` can do so with those of all keys.
A request that runs again counts as a request of the key that asks for it.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.answers.stream_encoder import OpenAIEncoder
from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.body import StreamOptions, TokenFields
from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.apis.openai.request_context import Arrival, RequestContext
from antiphon.services.gateway.apis.openai.serving import Serving, StreamedAnswer
from antiphon.services.gateway.edge.access.call import reachable_key
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, encoded_response, json_response
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.replay.checks import check_record
from antiphon.services.gateway.guests.replay.comparison import replay
from antiphon.services.gateway.guests.replay.output import output_of
from antiphon.services.gateway.guests.replay.rerun import forked
from antiphon.services.gateway.ops.timeline.directory import RecordDirectory
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import RecordQuery
from antiphon.shared.recorded_request import RecordedContent, decode
from antiphon.shared.request.checks import given, refuse


class ReplayBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/requests/{id}/replay`."""

    engine: str | None = None
    """Id of the engine that runs the request. Default: any engine of the model."""


class RecordBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/replay`."""

    record: msgspec.Raw
    """A recorded request, as `GET /v1/requests/{id}/record` gave it, perhaps elsewhere."""
    engine: str | None = None


class ForkBody(TokenFields, kw_only=True):
    """Body of `POST /v1/requests/{id}/fork`. Parameters that are not given are those of the recorded request.

    `max_tokens` counts the whole output, with the tokens that it begins with.
    """

    position: int
    """Number of recorded output tokens that the new output begins with."""
    index: int | None = None
    """Which output of the recorded request. Default: the first."""
    token_id: int | None = None
    """The token at `position`, in place of the one that would be chosen."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


_REPLAY, _RECORD = msgspec.json.Decoder(ReplayBody), msgspec.json.Decoder(RecordBody)
_FORK = msgspec.json.Decoder(ForkBody)


class TheApi(Api):
    """See Api. Finds the requests of all gateways."""

    always = True

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        self._records, self._serving = serving.guests.offered(RecordDirectory) or RecordDirectory(Recorder(0)), serving
        routes.get("/v1/requests/{request_id}/record", self.record)
        routes.get("/v1/requests/{request_id}/output", self.output)
        routes.post("/v1/requests/{request_id}/replay", self.replay, Body(ReplayBody))
        routes.post("/v1/requests/{request_id}/fork", self.fork, Body(ForkBody))
        routes.post("/v1/replay", self.replay_record, Body(RecordBody))

    async def record(self, request: Request, request_id: str) -> Response:
        """Answers with everything that it takes to run a request again."""
        check_query(request, ())
        data = await self._find(request_id)
        name = decode(data).request_id
        attachment = {"content-disposition": f'attachment; filename="{name}.request.json"'}
        return encoded_response(data, headers={**NOT_KEPT, **attachment})

    async def output(self, request: Request, request_id: str) -> Response:
        """Answers with the recorded outputs: each token with its text, and the parameters that a fork may change."""
        check_query(request, ())
        content = decode(await self._find(request_id))
        card = self._serving.backend.resolve_model(content.model)
        return json_response(await output_of(self._serving.backend, content, card), headers=NOT_KEPT)

    async def replay(self, request: Request, request_id: str) -> Response:
        """Runs a recorded request again and answers with the comparison of the tokens."""
        body = await _read(request, _REPLAY)
        return await self._compare(request, decode(await self._find(request_id)), body.engine)

    async def replay_record(self, request: Request) -> Response:
        """Runs the recorded request in the body again and answers with the comparison of the tokens."""
        body = await _read(request, _RECORD)
        content = decode(bytes(body.record))
        check_record(content, self._serving.backend.resolve_model(content.model))
        return await self._compare(request, content, body.engine)

    async def fork(self, request: Request, request_id: str) -> Response:
        """Continues a recorded output from a position on, whole or streamed. The text begins with the recorded one."""
        arrival = Arrival.now()
        body = await _read(request, _FORK)
        if body.stream_options is not None and not body.stream:
            refuse("stream_options", "needs 'stream' to be true")
        content = decode(await self._find(request_id))
        card = self._serving.backend.resolve_model(content.model)
        changes = {name: value for name in TokenFields.__struct_fields__ if (value := getattr(body, name)) is not None}
        wanted = forked(
            content,
            card,
            request.state.request_id,
            index=given(body.index, 0),
            position=body.position,
            token_id=body.token_id,
            changes=changes,
        )
        options = body.stream_options or StreamOptions()
        context = RequestContext(
            kind="completion",
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            echoes=("",),
            return_token_ids=given(body.return_token_ids, not wanted.output.detokenize),
            tokens_as_ids=not wanted.output.detokenize,
            continuous_usage=bool(options.continuous_usage_stats),
        )
        run = self._serving.runner(request, context, OpenAIEncoder(context))
        if context.stream:
            # Not resumable: the recorded request may be lost with its gateway.
            return StreamedAnswer(run, self._serving.settings.keep_alive_s)
        return encoded_response(await run.whole(request.receive))

    async def _compare(self, request: Request, content: RecordedContent, engine: str | None) -> Response:
        card = self._serving.backend.resolve_model(content.model)
        found = await replay(self._serving.backend, content, request.state.request_id, card, engine or "")
        summary = await self._records.find(RecordQuery(request.state.request_id, reachable_key(), "summary"))
        return json_response({**found, "engines": summary["engines"] if summary else []}, headers=NOT_KEPT)

    async def _find(self, request_id: str) -> bytes:
        found: dict[str, Any] | None = await self._records.find(RecordQuery(request_id, reachable_key(), "content"))
        if found is None:
            raise ServiceError("not_found", f"No request '{request_id}' is recorded: see --record-requests.")
        if not found["content"]:
            why = (
                "it has not ended, or newer ones have taken its room: see --record-content-mb"
                if found["content_bytes"]
                else "start the server with --record-content-mb=64 (megabytes) before the requests to replay"
            )
            raise ServiceError("not_found", f"The prompts and tokens of '{request_id}' are not recorded: {why}.")
        return found["content"]


async def _read(request: Request, decoder: "msgspec.json.Decoder[request_fields.T]") -> request_fields.T:
    check_query(request, ())
    data = await request_body.read(request.scope["headers"], request.receive) or b"{}"
    return request_fields.read(data, decoder, request_fields.OWN)
