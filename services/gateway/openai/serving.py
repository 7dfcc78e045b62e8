"""Runs generations for the endpoints of all APIs, from the converted request to the answer."""

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation import Backend, ModelCard
from services.gateway.http.json_response import encoded_response
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.answer_encoder import AnswerEncoder
from services.gateway.openai.parameters import RequestDefaults
from services.gateway.openai.request_context import RequestContext
from services.gateway.openai.response_runner import BeforeEnd, ResponseRunner, StreamedAnswer, nothing
from services.gateway.openai.tracing import RequestTrace
from shared.config import GatewaySettings
from shared.request.seed_source import seeds_of


class Serving:
    """The backend, the settings and the defaults of one application. All its APIs share one object.

    They share it because requests without a seed get theirs by their order, whatever their API.
    """

    def __init__(self, backend: Backend, metrics: GatewayMetrics, settings: GatewaySettings) -> None:
        self.backend = backend
        self.metrics = metrics
        self.settings = settings
        self.defaults = RequestDefaults(
            draw_seed=seeds_of(settings.seed),
            chat_temperature=settings.default_chat_temperature,
            max_logprobs=settings.max_logprobs,
        )

    def resolve_model(self, name: str | None) -> ModelCard:
        """Returns the model of a request. Raises ServiceError, see `Backend.resolve_model`."""
        return self.backend.resolve_model(name)

    def runner(
        self, request: Request, context: RequestContext, encoder: AnswerEncoder, before_end: BeforeEnd = nothing
    ) -> ResponseRunner:
        """Returns what runs the generation of a request. `before_end`: see ResponseRunner."""
        trace = RequestTrace(context, request.headers)
        return ResponseRunner(self.backend, context, encoder, self.metrics, trace, before_end)

    async def answer(
        self, request: Request, context: RequestContext, encoder: AnswerEncoder, before_end: BeforeEnd = nothing
    ) -> Response:
        """Runs a generation and returns its answer, whole or as a stream. Raises ServiceError."""
        run = self.runner(request, context, encoder, before_end)
        if context.stream:
            return StreamedAnswer(run, self.settings.keep_alive_s)
        return encoded_response(await run.whole(request.receive))
