"""Adds routes to the HTTP server, with their part of `/openapi.json`."""

from collections.abc import Callable, Mapping

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from antiphon.services.gateway.edge.http.routing import openapi
from antiphon.services.gateway.edge.http.routing.direct_route import DirectRoute, Endpoint, is_direct

Resumable = Callable[[str, Endpoint], Endpoint]


class EventStream(Response):
    """Placeholder for an event stream in the OpenAPI schema."""

    media_type = "text/event-stream"


class JsonLines(Response):
    """Placeholder for a batch file in the OpenAPI schema."""

    media_type = "application/jsonl"


class Routes:
    """The routes of one application. `errors`: the schema of error objects under a path, if it is not OpenAI's.

    `resumable` makes the streams of an endpoint, for its path, resumable; None: they are not.
    """

    def __init__(
        self, app: FastAPI, errors: Mapping[str, openapi.ErrorSchema], resumable: Resumable | None = None
    ) -> None:
        self.app = app
        self.bodies: dict[str, openapi.Body] = {}
        """The body of each POST route that has one, by its path."""
        self._errors, self._resumable = errors, resumable

    def post(self, path: str, endpoint: Callable[..., object], body: openapi.Body | None = None) -> None:
        """Adds a route. `body` is described in the OpenAPI schema; the endpoint reads it."""
        if body is not None:
            self.bodies[path] = body
        self.app.router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            openapi_extra=None if body is None else openapi.request_body(body),
            responses=self._responses(path),
            response_model=None,
            route_class_override=DirectRoute if is_direct(endpoint) else None,
        )

    def post_resumable(self, path: str, endpoint: Endpoint, body: openapi.Body) -> None:
        """Adds a route whose streams can be resumed, if streams are recorded."""
        self.post(path, endpoint if self._resumable is None else self._resumable(path, endpoint), body)

    def get(self, path: str, endpoint: Callable[..., object], answer: type[Response] = JSONResponse) -> None:
        """Adds a route. `answer`: a response class whose media type appears in the OpenAPI schema."""
        responses = self._responses(path)
        self.app.add_api_route(
            path, endpoint, methods=["GET"], responses=responses, response_class=answer, response_model=None
        )
        self.app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)

    def delete(self, path: str, endpoint: Callable[..., object]) -> None:
        """Adds a route."""
        responses = self._responses(path)
        self.app.add_api_route(path, endpoint, methods=["DELETE"], responses=responses, response_model=None)

    def page(self, path: str, endpoint: Callable[..., object]) -> None:
        """Adds a route for people, which the OpenAPI schema does not have."""
        self.app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)

    def describe(self) -> None:
        """Adds the schemas of bodies and errors to the OpenAPI document. Called when all routes are added."""
        openapi.add_schemas(self.app, [*self.bodies.values()], [*self._errors.values()])

    def _responses(self, path: str) -> dict[int | str, dict[str, object]]:
        found = next((schema for start, schema in self._errors.items() if path.startswith(start)), openapi.ERROR)
        return openapi.error_responses(found)
