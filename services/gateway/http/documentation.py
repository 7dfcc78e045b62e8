"""`/openapi.json` and `/docs`: FastAPI makes both from the routes of the application, at the first request for one."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.routes import ApiRoute
from shared.version import __version__

PATHS = ("/openapi.json", "/docs")


class Documentation:
    """The documentation of an application. `complete` adds to the document what FastAPI does not know."""

    def __init__(self, app: Starlette, complete: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._app, self._complete = app, complete
        self._made: ASGIApp | None = None
        self._lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Returns the routes of the documentation."""
        return [Route(path, self, methods=["GET"], include_in_schema=False) for path in PATHS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        async with self._lock:
            if self._made is None:
                self._made = await asyncio.to_thread(self._make)  # takes half a second
        await self._made(scope, receive, send)

    def _make(self) -> ASGIApp:
        # Imported here because its import takes a third of a gateway's start.
        from fastapi import FastAPI

        made = FastAPI(
            title="Antiphon",
            description="Language models behind the OpenAI API.",
            version=__version__,
            redoc_url=None,
            swagger_ui_oauth2_redirect_url=None,
        )
        for route in self._app.routes:
            if isinstance(route, ApiRoute) and route.description is not None:
                told, methods = route.description, route.described_methods
                made.add_api_route(route.path, route.documented, methods=methods, response_model=None, **told)
        generate = made.openapi
        made.openapi = lambda: self._complete(generate())
        return made
