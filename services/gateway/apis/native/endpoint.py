"""The endpoint `POST /generate`: determines the form of a request, decodes it, and runs its generation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon.services.gateway.apis.native.convert import client_facts, engine_request, text_request
from antiphon.services.gateway.apis.native.encoders import RequestOutputEncoder, TextEncoder, engine_error
from antiphon.services.gateway.apis.native.schemas import (
    ENGINE_DECODER,
    ENGINE_ONLY,
    GENERATE_DECODER,
    EngineBody,
    EngineSampling,
    GenerateBody,
)
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.parameter_names import in_names
from antiphon.services.gateway.apis.openai.request_context import Arrival, RequestContext
from antiphon.services.gateway.apis.openai.serving import ResponseRunner, Serving, StreamedAnswer
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.errors import as_service_error, error_response
from antiphon.services.gateway.edge.http.json_response import encoded_response
from antiphon.services.gateway.edge.http.request_body import RawFields, read_body, read_fields
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import check_request_id, refuse

_RULES = request_fields.OPENAI._replace(
    hints=frozenset({"user"}),
    elsewhere=dict.fromkeys(
        (*EngineSampling.__struct_fields__, "return_token_ids"),
        "Give it in 'sampling_params'; the answer then has token ids and log probabilities too.",
    ),
)


class GenerateEndpoint:
    """The endpoint. No two running requests in the engine form have the same answer id.

    An answer id is the `request_id` that the client gave in the body, or the server's own request id if it gave none.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._running = RunningIds()

    async def generate(self, request: Request) -> Response:
        """Continues a prompt or conversations. The answer has the form of the request."""
        arrival, received_at = Arrival.now(), time.time()
        data = await request_body.read(request.scope["headers"], request.receive)
        fields = read_fields(data)
        if ENGINE_ONLY.isdisjoint(fields):
            return await self._text(request, data, fields, arrival)
        answer_id = request.state.request_id
        try:
            answer_id = _client_id(fields) or answer_id
            return self._engine(request, data, fields, arrival, received_at, answer_id)
        except ServiceError as error:
            self._serving.metrics.count_error(error.code)
            return error_response(error, body=engine_error(error, answer_id))

    async def _text(self, request: Request, data: bytes, fields: RawFields, arrival: Arrival) -> Response:
        request_fields.check(fields, GenerateBody, _RULES)
        body = read_body(data, GENERATE_DECODER)
        card = self._card(body.model)
        wanted = text_request(body, card, request.state.request_id, self._serving.defaults)
        context = _context(
            arrival, card, wanted, stream=bool(body.stream), echoes=wanted.inputs.texts, timings=bool(body.timings)
        )
        return await self._serving.answer(request, context, TextEncoder(context))

    def _engine(
        self, request: Request, data: bytes, fields: RawFields, arrival: Arrival, received_at: float, answer_id: str
    ) -> Response:
        _check_names(fields)
        body = read_body(data, ENGINE_DECODER)
        card = self._card(body.model)
        facts = client_facts(body, answer_id, received_at)
        wanted = engine_request(body, card, request.state.request_id, self._serving.defaults)
        context = _context(arrival, card, wanted, stream=bool(body.stream), echoes=("",) * wanted.inputs.num_prompts)
        run = self._serving.runner(request, context, RequestOutputEncoder(context, facts))
        return EngineAnswer(run, self._running, facts.answer_id, stream=context.stream)

    def _card(self, name: str | None) -> ModelCard:
        return self._serving.backend.resolve_model(name if self._serving.settings.use_openai else None)


class RunningIds:
    """The answer ids of running requests in the engine form."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    @contextmanager
    def holding(self, answer_id: str) -> Iterator[None]:
        """Marks the id as in use inside the block. Raises ServiceError('invalid_value') if it is already in use."""
        if answer_id in self._ids:
            refuse("request_id", "is the id of a request that is still running: use another id")
        self._ids.add(answer_id)
        try:
            yield
        finally:
            self._ids.discard(answer_id)


class EngineAnswer(Response):
    """An ASGI response that runs a request in the engine form. Its failures are `RequestOutput`s too."""

    def __init__(self, run: ResponseRunner, running: RunningIds, answer_id: str, *, stream: bool) -> None:
        # The constructor of Response is not called, because it would render a body.
        self.background = None
        self._run = run
        self._running = running
        self._answer_id = answer_id
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request and sends its answer. A failure after the first byte of a stream is sent in the stream."""
        try:
            with self._running.holding(self._answer_id):
                if self._stream:
                    await StreamedAnswer(self._run, keep_alive_s=0)(scope, receive, send)
                    return
                answer = encoded_response(await self._run.whole(receive))
        except Exception as error:
            failure = as_service_error(error)
            self._run.metrics.count_error(failure.code)
            answer = error_response(failure, body=engine_error(failure, self._answer_id))
        await answer(scope, receive, send)


def _context(
    arrival: Arrival,
    card: ModelCard,
    wanted: GenerationRequest,
    *,
    stream: bool,
    echoes: tuple[str, ...],
    timings: bool = False,
) -> RequestContext:
    return RequestContext(
        kind="completion" if wanted.inputs.texts or wanted.inputs.token_ids else "chat",
        arrival=arrival,
        card=card,
        request=wanted,
        stream=stream,
        include_usage=False,
        echoes=echoes,
        return_token_ids=True,
        timings=timings,
        id_prefix="gen-",
    )


def _client_id(fields: RawFields) -> str | None:
    """Returns the id that the client gave. Read before the rest of the body, so that every error can repeat it."""
    raw = fields.get("request_id")
    if raw is None:
        return None
    client_id = read_body(b'{"request_id":%b}' % bytes(raw), _ID_DECODER).request_id
    if client_id is not None:
        check_request_id(client_id)
    return client_id


class _Id(msgspec.Struct):
    request_id: str | None


_ID_DECODER = msgspec.json.Decoder(_Id)


def _check_names(fields: RawFields) -> None:
    """Raises ServiceError for a field, or a member of `sampling_params`, that is not supported."""
    request_fields.check(fields, EngineBody, _RULES)
    raw = bytes(fields.get("sampling_params", b"null"))
    if not raw.startswith(b"{"):
        return  # if not null, refused when the body is decoded
    try:
        request_fields.check(read_fields(raw), EngineSampling, _RULES._replace(elsewhere={}))
    except ServiceError as error:
        raise in_names(error, {error.param: f"sampling_params.{error.param}"}) from None
