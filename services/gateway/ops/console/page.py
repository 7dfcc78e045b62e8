"""Serves the files of the console and of `/docs`: plain modules and styles, without a build step or other hosts.

The files hold no secrets and need no key; the console asks for a key when an endpoint does.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.shared.errors import ServiceError

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_INDEX, _DOCS = "index.html", "docs.html"


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    tag: str


class ConsolePage:
    """The console's files, read once at the start.

    Their links are relative, so a proxy may serve them under any path.
    """

    def __init__(self) -> None:
        folder = resources.files("antiphon.services.gateway.ops.console") / "static"
        self._files = {name: _file(name, entry.read_bytes()) for name, entry in _entries(folder)}

    def add(self, routes: Routes) -> None:
        """Adds the routes."""
        for path in ("/", "/console/{name:path}"):
            routes.page(path, self.file)
        routes.page("/docs", self.docs)

    async def file(self, request: Request, name: str = _INDEX) -> Response:
        """Answers with one file; 304 if the client has it already."""
        found = self._files.get(name)
        if found is None:
            raise ServiceError("not_found", f"The console has no file '{name}'. Open it at '/'.")
        headers = {**SECURITY_HEADERS, "etag": found.tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.content_type)

    async def docs(self, request: Request) -> Response:
        """Answers with the page that shows /openapi.json."""
        return await self.file(request, _DOCS)


def _entries(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yields the files that are served, also those of folders in it, with their names relative to the first folder."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _entries(entry, f"{above}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            yield above + entry.name, entry


def _file(name: str, body: bytes) -> _File:
    return _File(body, _TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
