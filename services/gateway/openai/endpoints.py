"""The endpoints `POST /v1/completions` and `POST /v1/chat/completions`: decode a request and run its generation."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation import Backend, GenerationRequest, ModelCard
from services.gateway.http import request_body
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import parameters, schemas, unsupported_params
from services.gateway.openai.answer_format import answer_format
from services.gateway.openai.body import SamplingFields, read_body, read_fields
from services.gateway.openai.parameters import RequestDefaults
from services.gateway.openai.request_context import Arrival, Kind, RequestContext
from services.gateway.openai.response_runner import ResponseRunner, StreamedAnswer
from services.gateway.openai.tracing import RequestTrace
from shared import codec
from shared.config import GatewaySettings
from shared.request.checks import given
from shared.request.seed_source import seeds_of


class GenerationEndpoints:
    """The two endpoints that generate text."""

    def __init__(self, backend: Backend, metrics: GatewayMetrics, settings: GatewaySettings) -> None:
        self._backend = backend
        self._metrics = metrics
        self._settings = settings
        self._defaults = RequestDefaults(
            draw_seed=seeds_of(settings.seed),
            chat_temperature=settings.default_chat_temperature,
            max_logprobs=settings.max_logprobs,
        )

    async def completions(self, request: Request) -> Response:
        """Continues a text, or each of several texts."""
        arrival = Arrival.now()
        data = await _checked(request, schemas.CompletionBody)
        body = read_body(data, schemas.COMPLETION_DECODER)
        card = self._backend.resolve_model(body.model)
        wanted = parameters.completion(body, card, request.state.request_id, self._defaults)
        echoes = await self._echoes(wanted) if body.echo else _no_echoes(wanted)
        return await self._answer(request, self._context("completion", arrival, card, wanted, body, echoes))

    async def chat_completions(self, request: Request) -> Response:
        """Continues a conversation."""
        arrival = Arrival.now()
        data = await _checked(request, schemas.ChatBody)
        body = read_body(data, schemas.CHAT_DECODER)
        card = self._backend.resolve_model(body.model)
        wanted = parameters.chat(body, card, request.state.request_id, self._defaults)
        answer = answer_format(body, card, self._settings)
        if answer is not None:
            wanted = replace(wanted, shown_special_tokens=answer.special_tokens)
        echoes = await self._echoes(wanted) if body.echo else _no_echoes(wanted)
        context = self._context("chat", arrival, card, wanted, body, echoes)
        return await self._answer(request, replace(context, answer_format=answer))

    async def _answer(self, request: Request, context: RequestContext) -> Response:
        trace = RequestTrace(context, request.headers)
        run = ResponseRunner(self._backend, context, self._metrics, trace)
        if context.stream:
            return StreamedAnswer(run, self._settings.keep_alive_s)
        return Response(await run.whole(request.receive), media_type="application/json")

    async def _echoes(self, wanted: GenerationRequest) -> tuple[str, ...]:
        """Returns the text to echo for each prompt. For a conversation this is its last message."""
        if wanted.texts:
            return wanted.texts
        if wanted.messages and not wanted.messages[-1].token_ids:
            return (wanted.messages[-1].content,)
        last = [tuple(codec.unpack_ids(message.token_ids)) for message in wanted.messages[-1:]]
        return tuple([await self._backend.detokenize(wanted.model, ids) for ids in wanted.token_ids or last])

    def _context(
        self,
        kind: Kind,
        arrival: Arrival,
        card: ModelCard,
        wanted: GenerationRequest,
        body: SamplingFields,
        echoes: tuple[str, ...],
    ) -> RequestContext:
        options = body.stream_options
        return RequestContext(
            kind=kind,
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            echoes=echoes,
            return_token_ids=given(body.return_token_ids, self._settings.return_token_ids),
        )


async def _checked(request: Request, body: type[SamplingFields]) -> bytes:
    data = await request_body.read(request.scope["headers"], request.receive)
    unsupported_params.check(read_fields(data), body)
    return data


def _no_echoes(wanted: GenerationRequest) -> tuple[str, ...]:
    return ("",) * (len(wanted.texts) + len(wanted.token_ids) + bool(wanted.messages))
