"""The routes of the API, and its errors."""

from antiphon.services.gateway.apis.ollama import schemas
from antiphon.services.gateway.apis.ollama.embed import OllamaEmbedEndpoints
from antiphon.services.gateway.apis.ollama.endpoints import OllamaEndpoints
from antiphon.services.gateway.apis.ollama.errors import SCHEMA, error_body
from antiphon.services.gateway.apis.ollama.library import OllamaLibraryEndpoints
from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes

_MODEL = Body(schemas.OllamaModelBody, ("model",))


class TheApi(Api):
    """See Api."""

    error_formats = {"/api/": error_body}  # noqa: RUF012
    error_schemas = {"/api/": SCHEMA}  # noqa: RUF012
    streaming = ("/api/chat", "/api/generate")

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        endpoints, embed = OllamaEndpoints(serving), OllamaEmbedEndpoints(serving)
        library = OllamaLibraryEndpoints(serving.backend)
        routes.post("/api/chat", endpoints.chat, Body(schemas.OllamaChatBody, ("model", "messages")))
        routes.post("/api/generate", endpoints.generate, Body(schemas.OllamaGenerateBody, ("model",)))
        routes.post("/api/show", endpoints.show, Body(schemas.OllamaShowBody, ("model",)))
        routes.post("/api/embed", embed.embed, Body(schemas.OllamaEmbedBody, ("model", "input")))
        routes.post("/api/embeddings", embed.embeddings, Body(schemas.OllamaEmbeddingsBody, ("model", "prompt")))
        routes.get("/api/tags", library.tags)
        routes.get("/api/ps", library.ps)
        routes.get("/api/version", library.version)
        routes.post("/api/pull", library.pull, _MODEL)
        routes.post("/api/push", library.push, _MODEL)
        routes.post("/api/copy", library.copy, Body(schemas.OllamaCopyBody, ("source", "destination")))
        routes.post("/api/create", library.create, _MODEL)
        routes.delete("/api/delete", library.delete)
