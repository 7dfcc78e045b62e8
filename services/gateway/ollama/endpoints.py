"""The endpoints of Ollama's API: decode a request, run its generation, or describe models."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation import ModelCard
from services.gateway.http import request_body
from services.gateway.http.json_response import json_response
from services.gateway.ollama import convert, models, schemas
from services.gateway.ollama.encoder import Form, LineEncoder, common_fields, message
from services.gateway.ollama.schemas import OllamaChatBody, OllamaFields, OllamaGenerateBody, OllamaShowBody
from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.request_context import Arrival, Kind, RequestContext
from services.gateway.openai.serving import Serving
from shared.errors import ServiceError
from shared.request.checks import given
from shared.version import __version__


class OllamaEndpoints:
    """The endpoints of Ollama's API."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat(self, request: Request) -> Response:
        """Continues a conversation."""
        arrival = Arrival.now()
        body = read_body(await _checked(request, OllamaChatBody), schemas.CHAT_DECODER)
        card = self._card(body.model)
        if not body.messages:
            return _loaded(body, "chat", card, arrival)
        serving = self._serving
        wanted = convert.chat(body, card, request.state.request_id, serving.defaults, serving.settings)
        return await self._answer(request, arrival, body, card, wanted, "chat")

    async def generate(self, request: Request) -> Response:
        """Answers a prompt."""
        arrival = Arrival.now()
        body = read_body(await _checked(request, OllamaGenerateBody), schemas.GENERATE_DECODER)
        card = self._card(body.model)
        if not body.prompt and not body.images:
            return _loaded(body, "generate", card, arrival)
        serving = self._serving
        wanted = convert.generate(body, card, request.state.request_id, serving.defaults, serving.settings)
        return await self._answer(request, arrival, body, card, wanted, "generate")

    async def tags(self) -> Response:
        """Lists the models that can be used now."""
        return json_response(models.tags(self._serving.backend.models()))

    async def show(self, request: Request) -> Response:
        """Describes one model."""
        body = read_body(await _checked(request, OllamaShowBody), schemas.SHOW_DECODER)
        return json_response(models.show(self._card(given(body.model, body.name)), self._serving.settings))

    async def version(self) -> Response:
        """Answers with the version of this software, not one of Ollama."""
        return json_response({"version": __version__})

    def _card(self, name: str | None) -> ModelCard:
        """Returns the model with this name. If there is none, tries the name without the default tag."""
        try:
            return self._serving.backend.resolve_model(name)
        except ServiceError as error:
            if error.code != "model_not_found" or name is None or not name.endswith(models.DEFAULT_TAG):
                raise
        return self._serving.backend.resolve_model(name.removesuffix(models.DEFAULT_TAG))

    async def _answer(
        self,
        request: Request,
        arrival: Arrival,
        body: OllamaFields,
        card: ModelCard,
        wanted: ChatRequest,
        form: Form,
    ) -> Response:
        kind: Kind = "chat" if wanted.request.messages else "completion"
        context = RequestContext(
            kind=kind,
            arrival=arrival,
            card=card,
            request=wanted.request,
            stream=given(body.stream, True),
            include_usage=True,
            echoes=("",),
            answer_format=wanted.answer,
        )
        return await self._serving.answer(request, context, LineEncoder(context, form))


async def _checked(request: Request, body: type[msgspec.Struct]) -> bytes:
    data = await request_body.read(request.scope["headers"], request.receive)
    unsupported_params.check(read_fields(data), body, rules=schemas.RULES)
    return data


def _loaded(body: OllamaFields, form: Form, card: ModelCard, arrival: Arrival) -> Response:
    """Answers a request without a prompt. Clients send it to load a model, or to unload it (`keep_alive` 0)."""
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    fields = common_fields(card.name, arrival.created)
    return json_response({**fields, **message(form, {"content": ""}), "done": True, "done_reason": reason})
