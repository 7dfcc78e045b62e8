"""The routes of the API."""

from antiphon.services.gateway.apis.native.endpoint import GenerateEndpoint
from antiphon.services.gateway.apis.native.schemas import EngineBody, GenerateBody
from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes


class TheApi(Api):
    """See Api."""

    always = True

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        routes.post("/generate", GenerateEndpoint(serving).generate, Body(GenerateBody, ("prompt",), EngineBody))
