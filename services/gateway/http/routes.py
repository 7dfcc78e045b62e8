"""Routes of the HTTP application: the endpoint of a path, which gets its path and query parameters as arguments.

Starlette serves the routes. `description` has what `/openapi.json` says about a route; FastAPI makes that document from
it (`documentation`). FastAPI itself serves no request, because its import takes a third of a gateway's start.
"""

import inspect
import re
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_args

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from shared.errors import ServiceError

Endpoint = Callable[..., Awaitable[Response]]
"""An endpoint. Its parameters are the request, the parameters of the path, and those of the query with defaults."""
_SHOWN_CHARS = 64
"""Characters of a wrong value that its error message repeats."""
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("false", "0", "no", "off", "n", "f"), False),
}


class ApiRoute(Route):
    """A route of one endpoint. A route for GET also answers HEAD."""

    def __init__(
        self, path: str, endpoint: Endpoint, methods: Sequence[str], description: Mapping[str, Any] | None = None
    ) -> None:
        """`description`: arguments of `FastAPI.add_api_route`; None: the route is not in `/openapi.json`."""
        super().__init__(path, Caller(endpoint).answer, methods=methods, include_in_schema=description is not None)
        self.described_methods = [*methods]
        self.documented = endpoint
        self.description = description

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Route. Also names the route in the scope, for the metrics of the edge."""
        match, found = super().matches(scope)
        return match, found if match == Match.NONE else {**found, "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Route. Raises HTTPException for a method that the route does not have."""
        allowed = sorted(self.methods or ())
        if scope["method"] not in allowed:
            raise HTTPException(405, headers={"Allow": ", ".join(allowed)})
        await self.app(scope, receive, send)


class Caller:
    """Calls an endpoint with the arguments that it takes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._parameters: list[inspect.Parameter] | None = None

    async def answer(self, request: Request) -> Response:
        """Returns the endpoint's response. Raises ServiceError if a parameter of the query has a wrong type."""
        if self._parameters is None:  # read at the first request: a gateway has a hundred routes
            self._parameters = [*inspect.signature(self._endpoint).parameters.values()]
        values: dict[str, Any] = {}
        for one in self._parameters:
            if one.annotation is Request:
                values[one.name] = request
            elif one.name in request.path_params:
                values[one.name] = request.path_params[one.name]
            elif (text := request.query_params.get(one.name)) is not None:
                values[one.name] = converted(text, one)
        return await self._endpoint(**values)


def converted(text: str, parameter: inspect.Parameter) -> object:
    """Returns the value of a parameter of the query. Raises ServiceError if it is not of the parameter's type."""
    kind: Any = parameter.annotation
    if isinstance(kind, types.UnionType):
        [kind] = [one for one in get_args(kind) if one is not types.NoneType]
    if kind is int:
        if _INTEGER.fullmatch(text) is None:
            raise _wrong(parameter.name, text, "an integer")
        return int(text)
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise _wrong(parameter.name, text, "true or false")
        return _BOOLEANS[text.lower()]
    assert kind is str, f"a parameter of the query cannot have the type {kind}"
    return text


def _wrong(name: str, text: str, wanted: str) -> ServiceError:
    shown = repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
    return ServiceError("invalid_value", f"'{name}' is not valid: {shown} is not {wanted}.", param=name)
