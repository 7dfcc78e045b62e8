"""The routes of the API, and its errors."""

from antiphon.services.gateway.apis.anthropic.endpoints import MessageEndpoints
from antiphon.services.gateway.apis.anthropic.errors import SCHEMA, error_body
from antiphon.services.gateway.apis.anthropic.schemas import CountTokensBody, MessagesBody
from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes


class TheApi(Api):
    """See Api."""

    error_formats = {"/v1/messages": error_body}  # noqa: RUF012
    error_schemas = {"/v1/messages": SCHEMA}  # noqa: RUF012

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        endpoints = MessageEndpoints(serving)
        routes.post_resumable("/v1/messages", endpoints.messages, Body(MessagesBody, ("messages", "max_tokens")))
        routes.post("/v1/messages/count_tokens", endpoints.count_tokens, Body(CountTokensBody, ("messages",)))
