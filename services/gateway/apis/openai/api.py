"""The routes of the API, and those that clients of other servers know."""

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.chat import ChatEndpoint
from antiphon.services.gateway.apis.openai.completions import CompletionEndpoint
from antiphon.services.gateway.apis.openai.invocations import InvocationEndpoint
from antiphon.services.gateway.apis.openai.pooling.endpoints import PoolingEndpoints
from antiphon.services.gateway.apis.openai.pooling.schemas import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from antiphon.services.gateway.apis.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from antiphon.services.gateway.apis.openai.service_endpoints import ServiceEndpoints
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes

_CHAT = Body(ChatBody, ("messages",))


class TheApi(Api):
    """See Api."""

    order = 0  # most requests are for its first routes

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        routes.post_resumable(
            "/v1/completions", CompletionEndpoint(serving).completions, Body(CompletionBody, ("prompt",))
        )
        routes.post_resumable("/v1/chat/completions", ChatEndpoint(serving).chat_completions, _CHAT)
        pooling = PoolingEndpoints(serving.backend, serving.metrics)
        _add_pooling(routes, pooling)
        routes.post("/invocations", InvocationEndpoint(serving, pooling).invocations)
        service = ServiceEndpoints(serving.backend, serving.metrics, serving.defaults.images_max)
        routes.post("/tokenize", service.tokenize, Body(TokenizeBody))
        routes.post("/v1/chat/completions/input_tokens", service.count_tokens, _CHAT)
        routes.post("/detokenize", service.detokenize, Body(DetokenizeBody))
        routes.get("/v1/models", service.models)
        routes.get("/v1/models/{model_id:path}", service.model)
        routes.get("/version", service.version)


def _add_pooling(routes: Routes, endpoints: PoolingEndpoints) -> None:
    # Servers have different paths for score and rerank, and each client has one of them built in.
    routes.post("/v1/embeddings", endpoints.embeddings, Body(EmbeddingBody, ("input",)))
    routes.post("/pooling", endpoints.pooling, Body(PoolingBody, ("input",)))
    for path in ("/v1/classify", "/classify"):
        routes.post(path, endpoints.classify, Body(ClassifyBody, ("input",)))
    for path in ("/v1/score", "/score"):
        routes.post(path, endpoints.score, Body(ScoreBody, ("text_1", "text_2")))
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        routes.post(path, endpoints.rerank, Body(RerankBody, ("query", "documents")))
