"""The endpoints `POST /v1/completions` and `POST /v1/chat/completions`: decode a request and run its generation."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.http import request_body
from services.gateway.openai import schemas
from services.gateway.openai.answers.stream_encoder import OpenAIEncoder
from services.gateway.openai.bodies import parameters, unsupported_params
from services.gateway.openai.bodies.chat_request import chat_request
from services.gateway.openai.body import GenerationFields, StreamOptions, read_body, read_fields
from services.gateway.openai.request_context import Arrival, Kind, RequestContext
from services.gateway.openai.serving import Serving
from shared import codec
from shared.request import rules
from shared.request.checks import given


class GenerationEndpoints:
    """The two endpoints that generate text."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, request: Request) -> Response:
        """Continues a text, or each of several texts."""
        arrival = Arrival.of(request)
        data = await _checked(request, schemas.CompletionBody)
        body = read_body(data, schemas.COMPLETION_DECODER)
        card = self._serving.resolve_model(body.model)
        wanted = parameters.completion(body, card, request.state.request_id, self._serving.defaults_of(request))
        echoes = await self._echoes(wanted) if body.echo else _no_echoes(wanted)
        return await self._answer(request, self._context("completion", arrival, card, wanted, body, echoes))

    async def chat_completions(self, request: Request) -> Response:
        """Continues a conversation."""
        arrival = Arrival.of(request)
        data = await _checked(request, schemas.ChatBody)
        body = read_body(data, schemas.CHAT_DECODER)
        card = self._serving.resolve_model(body.model)
        serving = self._serving
        wanted, answer = chat_request(
            body, card, request.state.request_id, serving.defaults_of(request), serving.settings
        )
        echoes = await self._echoes(wanted) if body.echo else _no_echoes(wanted)
        context = self._context("chat", arrival, card, wanted, body, echoes)
        return await self._answer(request, replace(context, answer_format=answer))

    async def _answer(self, request: Request, context: RequestContext) -> Response:
        return await self._serving.answer(request, context, OpenAIEncoder(context))

    async def _echoes(self, wanted: GenerationRequest) -> tuple[str, ...]:
        """Returns the text to echo for each prompt. For a conversation this is its last message."""
        if wanted.texts:
            return wanted.texts
        if wanted.messages and not wanted.messages[-1].token_ids:
            return (wanted.messages[-1].content,)
        last = [tuple(codec.unpack_ids(message.token_ids)) for message in wanted.messages[-1:]]
        return tuple([await self._serving.backend.detokenize(wanted.model, ids) for ids in wanted.token_ids or last])

    def _context(
        self,
        kind: Kind,
        arrival: Arrival,
        card: ModelCard,
        wanted: GenerationRequest,
        body: GenerationFields,
        echoes: tuple[str, ...],
    ) -> RequestContext:
        options, settings = body.stream_options or StreamOptions(), self._serving.settings
        return RequestContext(
            kind=kind,
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            echoes=echoes,
            # Without text, token ids are all that the answer has.
            return_token_ids=given(body.return_token_ids, settings.return_token_ids) or not wanted.detokenize,
            tokens_as_ids=given(body.return_tokens_as_token_ids, settings.return_tokens_as_token_ids)
            or not wanted.detokenize,
            continuous_usage=bool(options.continuous_usage_stats),
            timings=bool(body.timings),
            prompt_logprobs=rules.prompt_logprobs(body.prompt_logprobs, self._serving.defaults.max_logprobs),
            echoes_logprobs=kind == "completion" and bool(body.echo) and wanted.params.logprobs is not None,
        )


async def _checked(request: Request, body: type[GenerationFields]) -> bytes:
    data = request.state.body = await request_body.read(request.scope["headers"], request.receive)
    unsupported_params.check(read_fields(data), body)
    return data


def _no_echoes(wanted: GenerationRequest) -> tuple[str, ...]:
    return ("",) * wanted.num_prompts
