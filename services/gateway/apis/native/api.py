"""The routes of the API."""

from services.gateway.apis.native.endpoint import GenerateEndpoint
from services.gateway.apis.native.schemas import EngineBody, GenerateBody
from services.gateway.apis.openai.base import Api
from services.gateway.apis.openai.serving import Serving
from services.gateway.edge.http.routing.openapi import Body
from services.gateway.edge.http.routing.routes import Routes


class TheApi(Api):
    """See Api."""

    always = True

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        routes.post("/generate", GenerateEndpoint(serving).generate, Body(GenerateBody, ("prompt",), EngineBody))
