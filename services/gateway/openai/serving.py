"""Runs generations for the endpoints of all APIs, from the converted request to the answer."""

from dataclasses import replace
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation import Backend, ModelCard
from services.gateway.http.json_response import encoded_response
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.answers.answer_encoder import AnswerEncoder
from services.gateway.openai.bodies.parameters import RequestDefaults
from services.gateway.openai.request_context import RequestContext, Resumption
from services.gateway.openai.response_runner import BeforeEnd, RecordedStream, ResponseRunner, StreamedAnswer, nothing
from services.gateway.openai.tracing import RequestTrace
from shared.config import GatewaySettings
from shared.request.seed_source import seeds_of


class StreamBook(Protocol):
    """Records streams, so that a client can resume them: `streams.Streams`."""

    async def begin(self, request: Request, context: RequestContext) -> RecordedStream | None:
        """Returns the record of a stream that begins or goes on; None if it is not recorded. Raises ServiceError."""
        ...


class Serving:
    """The backend, the settings and the defaults of one application. All its APIs share one object.

    They share it because requests without a seed get theirs by their order, whatever their API.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: GatewayMetrics,
        settings: GatewaySettings,
        streams: StreamBook | None = None,
    ) -> None:
        """`streams` records streams; by default none are recorded."""
        self.backend = backend
        self.metrics = metrics
        self.settings = settings
        self._streams = streams
        self.defaults = RequestDefaults(
            draw_seed=seeds_of(settings.seed),
            chat_temperature=settings.default_chat_temperature,
            max_logprobs=settings.max_logprobs,
        )

    def resolve_model(self, name: str | None) -> ModelCard:
        """Returns the model of a request. Raises ServiceError, see `Backend.resolve_model`."""
        return self.backend.resolve_model(name)

    def defaults_of(self, request: Request) -> RequestDefaults:
        """Returns the defaults of a request. One that resumes a stream has the seed that the stream began with."""
        resumption: Resumption | None = getattr(request.state, "resumption", None)
        if resumption is None or resumption.seed is None:
            return self.defaults
        seed = resumption.seed
        return replace(self.defaults, draw_seed=lambda: seed)

    def runner(
        self,
        request: Request,
        context: RequestContext,
        encoder: AnswerEncoder,
        before_end: BeforeEnd = nothing,
        recorded: RecordedStream | None = None,
    ) -> ResponseRunner:
        """Returns what runs the generation of a request. `before_end` and `recorded`: see ResponseRunner."""
        if recorded is not None and recorded.resumed is not None:
            context = replace(context, request=replace(context.request, resumed=recorded.resumed))
        trace = RequestTrace(context, request.headers)
        return ResponseRunner(self.backend, context, encoder, self.metrics, trace, before_end, recorded)

    async def answer(
        self, request: Request, context: RequestContext, encoder: AnswerEncoder, before_end: BeforeEnd = nothing
    ) -> Response:
        """Runs a generation and returns its answer, whole or as a stream. Raises ServiceError."""
        recorded: RecordedStream | None = None
        if context.stream and self._streams is not None:
            recorded = await self._streams.begin(request, context)
        run = self.runner(request, context, encoder, before_end, recorded)
        if context.stream:
            return StreamedAnswer(run, self.settings.keep_alive_s, recorded)
        return encoded_response(await run.whole(request.receive))
