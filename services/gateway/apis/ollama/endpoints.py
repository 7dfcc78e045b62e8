"""The endpoints of Ollama's API: decode a request, run its generation, or describe a model."""

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.ollama import convert, models, schemas
from antiphon.services.gateway.apis.ollama.encoder import Form, LineEncoder, common_fields, message
from antiphon.services.gateway.apis.ollama.lookup import find, read
from antiphon.services.gateway.apis.ollama.schemas import OllamaFields
from antiphon.services.gateway.apis.openai.chat import ChatRequest
from antiphon.services.gateway.apis.openai.request_context import Arrival, Kind, RequestContext
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.request.checks import given


class OllamaEndpoints:
    """The endpoints of Ollama's API."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat(self, request: Request) -> Response:
        """Continues a conversation."""
        arrival = Arrival.now()
        body = await read(request, schemas.CHAT_DECODER)
        card = find(self._serving.backend, body.model)
        _tell(body)
        if not body.messages:
            return _loaded(body, "chat", card, arrival)
        serving = self._serving
        wanted = convert.chat(body, card, request.state.request_id, serving.defaults, serving.settings)
        return await self._answer(request, arrival, body, card, wanted, "chat")

    async def generate(self, request: Request) -> Response:
        """Answers a prompt."""
        arrival = Arrival.now()
        body = await read(request, schemas.GENERATE_DECODER)
        card = find(self._serving.backend, body.model)
        _tell(body)
        if not (body.prompt or body.images or body.suffix):
            return _loaded(body, "generate", card, arrival)
        serving = self._serving
        wanted = convert.generate(body, card, request.state.request_id, serving.defaults, serving.settings)
        return await self._answer(request, arrival, body, card, wanted, "generate")

    async def show(self, request: Request) -> Response:
        """Describes one model."""
        body = await read(request, schemas.SHOW_DECODER)
        card = find(self._serving.backend, given(body.model, body.name))
        return json_response(models.show(card, self._serving.settings))

    async def _answer(
        self,
        request: Request,
        arrival: Arrival,
        body: OllamaFields,
        card: ModelCard,
        wanted: ChatRequest,
        form: Form,
    ) -> Response:
        kind: Kind = "chat" if wanted.request.inputs.messages else "completion"
        context = RequestContext(
            kind=kind,
            arrival=arrival,
            card=card,
            request=wanted.request,
            stream=given(body.stream, True),
            answer_format=wanted.answer,
        )
        return await self._serving.answer(request, context, LineEncoder(context, form))


def _tell(body: OllamaFields) -> None:
    if body.keep_alive is not None:
        ignore("keep_alive")


def _loaded(body: OllamaFields, form: Form, card: ModelCard, arrival: Arrival) -> Response:
    """Answers a request without a prompt. Clients send it to load a model, or to unload it (`keep_alive` 0)."""
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    fields = common_fields(card.name, arrival.created)
    return json_response({**fields, **message(form, {"content": ""}), "done": True, "done_reason": reason})
