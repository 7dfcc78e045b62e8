"""The endpoints that do not generate text: models, tokenize, detokenize, health, load, metrics, version."""

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.apis.openai.answers import full_response as responses
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.chat import tokenize_request
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import encoded_response, json_response
from antiphon.services.gateway.edge.metrics import CONTENT_TYPE, GatewayMetrics
from antiphon.services.gateway.path.generation import Backend
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat
from antiphon.shared.request.checks import check_token_ids, missing
from antiphon.shared.version import __version__


class ServiceEndpoints:
    """The endpoints that do not generate text."""

    def __init__(self, backend: Backend, metrics: GatewayMetrics, images_max: int = limits.IMAGES_MAX) -> None:
        """`images_max`: maximum number of images in a conversation."""
        self._backend = backend
        self._metrics = metrics
        self._images_max = images_max

    async def models(self) -> Response:
        """Lists the models that can be used now."""
        return encoded_response(responses.model_list(self._backend.models()))

    async def model(self, model_id: str) -> Response:
        """Describes one model."""
        card = self._backend.resolve_model(model_id)
        if model_id not in (card.name, *card.aliases):
            # A request may name a model by its path or 'default', but neither is a model id.
            raise ServiceError("model_not_found", f"The model '{model_id}' does not exist.", param="model")
        return encoded_response(responses.model(card))

    async def tokenize(self, request: Request) -> Response:
        """Answers with the token ids of a text or a conversation."""
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.TOKENIZE_DECODER)
        card = self._backend.resolve_model(body.model)
        wanted = tokenize_request(body, card, request.state.request_id, self._images_max)
        [(tokens, texts)] = await self._backend.tokenize(wanted, return_tokens=bool(body.return_token_strs))
        return json_response(
            schemas.TokenizeAnswer(
                count=len(tokens),
                max_model_len=card.max_model_len,
                tokens=tokens,
                token_strs=texts if body.return_token_strs else None,
            )
        )

    async def count_tokens(self, request: Request) -> Response:
        """Answers with the number of prompt tokens of a conversation, in the form of `/v1/responses/input_tokens`."""
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.TOKENIZE_DECODER)
        if body.messages is None:
            missing("messages")
        card = self._backend.resolve_model(body.model)
        wanted = tokenize_request(body, card, request.state.request_id, self._images_max)
        [(tokens, _)] = await self._backend.tokenize(wanted, return_tokens=False)
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """Answers with the text of token ids."""
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.DETOKENIZE_DECODER)
        card = self._backend.resolve_model(body.model)
        if not body.tokens:
            return json_response(schemas.DetokenizeAnswer(prompt=""))
        check_token_ids(body.tokens, card.vocab_size, "tokens")
        text = await self._backend.detokenize(card.name, tuple(body.tokens))
        return json_response(schemas.DetokenizeAnswer(prompt=text))

    async def livez(self) -> Response:
        """Answers 200 while the process can handle requests at all."""
        return json_response({"status": "alive"})

    async def readyz(self) -> Response:
        """Answers 200 if generation requests can be served now; else 503 and what is missing."""
        reason = self._backend.ready()
        if reason:
            return json_response({"status": "not_ready", "reason": reason}, 503)
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        """Answers with the metrics in Prometheus's text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self) -> Response:
        """Answers with the version of this software."""
        return json_response({"version": __version__})


class LoadEndpoint:
    """The endpoint by which load balancers of vLLM's servers choose one."""

    def __init__(self, heartbeats: Callable[[], Sequence[Heartbeat]]) -> None:
        """`heartbeats` returns the last heartbeat of each engine."""
        self._heartbeats = heartbeats

    async def load(self) -> Response:
        """Answers with the number of sequences that run or wait in all engines, as they have said last."""
        loads = [beat.status.load for beat in self._heartbeats() if isinstance(beat.status, EngineStatus)]
        return json_response({"server_load": sum(one.num_running + one.num_waiting for one in loads)})
