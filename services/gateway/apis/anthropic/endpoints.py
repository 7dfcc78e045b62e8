"""The endpoints of Anthropic's API: decode a request, run its generation or count its tokens."""

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.anthropic import convert, schemas, thinking
from antiphon.services.gateway.apis.anthropic.encoder import ID_PREFIX, MessageEncoder
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.request_context import Arrival, RequestContext
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import json_response

_NO_EFFECT_ON_COUNT = frozenset(schemas.MessagesBody.__struct_fields__)


class MessageEndpoints:
    """The endpoints of Anthropic's API."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def messages(self, request: Request) -> Response:
        """Continues a conversation."""
        arrival = Arrival.of(request)
        data = request.state.body = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.MESSAGES_DECODER, schemas.RULES)
        card = self._serving.backend.resolve_model(body.model)
        serving = self._serving
        defaults = serving.defaults_of(request)
        wanted, answer = convert.messages(body, card, request.state.request_id, defaults, serving.settings)
        context = RequestContext(
            arrival=arrival,
            card=card,
            request=wanted,
            stream=bool(body.stream),
            id_prefix=ID_PREFIX,
            answer_format=answer,
        )
        shown = thinking.shown(body)
        return await serving.answer(request, context, MessageEncoder(context, shows_reasoning=shown.has_text))

    async def count_tokens(self, request: Request) -> Response:
        """Answers with the number of prompt tokens of a conversation."""
        data = await request_body.read(request.scope["headers"], request.receive)
        # Clients send the body of `/v1/messages` here unchanged: its other fields have no effect.
        body = request_fields.read(
            data, schemas.COUNT_TOKENS_DECODER, schemas.RULES, without_effect=_NO_EFFECT_ON_COUNT
        )
        card = self._serving.backend.resolve_model(body.model)
        wanted = convert.count_tokens(body, card, request.state.request_id, self._serving.defaults.images_max)
        [(tokens, _)] = await self._serving.backend.tokenize(wanted, return_tokens=False)
        return json_response({"input_tokens": len(tokens)})
