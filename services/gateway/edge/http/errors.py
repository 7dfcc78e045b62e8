"""Converts failures to error objects; no stack traces.

The format is OpenAI's, `{"error": {"message", "type", "param", "code"}}`, except under the paths of other APIs.
"""

import difflib
import logging
import math
import random
from collections.abc import Callable, Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from antiphon.services.gateway.edge.access.call import note_error, route_path
from antiphon.services.gateway.edge.http.json_response import encoded_response
from antiphon.shared.errors import CODES, ServiceError

log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
"""Time to retry after, in seconds, if the error gives none."""
_JITTER = 0.25
"""`Retry-After` is increased by a random share up to this, so that refused clients do not all retry at once."""
_PATH_CHARS_MAX, _NEAR = 100, 0.8
"""Longest path that is compared with the routes, and the similarity from which a route is suggested."""
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 503: "server_is_overloaded"}


def error_body(error: ServiceError) -> bytes:
    """Returns the JSON of the error object."""
    inner = {
        "message": error.message,
        "type": CODES[error.code].type,
        "param": error.param or None,
        "code": error.code,
    }
    return msgspec.json.encode({"error": inner})


ErrorFormat = Callable[[ServiceError, str], bytes]
"""Returns the JSON of an error object in an API's format, from the failure and the id of the request."""


class ErrorFormats:
    """Chooses the format of an error object by the path of its request. `by_prefix`: formats by path prefixes."""

    def __init__(self, by_prefix: Mapping[str, ErrorFormat] | None = None) -> None:
        self._by_prefix = dict(by_prefix or {})

    def body(self, error: ServiceError, scope: Scope) -> bytes:
        """Returns the JSON of the error object for a request. OpenAI's format, unless its path has another one."""
        path = route_path(scope)
        found = next((self._by_prefix[one] for one in self._by_prefix if path.startswith(one)), None)
        return error_body(error) if found is None else found(error, scope["state"]["request_id"])


def error_response(
    error: ServiceError, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> Response:
    """Returns the HTTP response of a failure. `headers` are added to its own; `body` replaces OpenAI's error object."""
    every = {**_own_headers(error), **(headers or {})}
    data = error_body(error) if body is None else body
    return encoded_response(data, error.status, every)


def as_service_error(error: Exception) -> ServiceError:
    """Returns any exception as a ServiceError. An unexpected exception is logged; the client gets 'internal_error'."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, HTTPException):
        return ServiceError(_CODE_OF_STATUS.get(error.status_code, "invalid_value"), f"{error.detail}.")
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    log.error("a request failed unexpectedly", exc_info=error)
    return ServiceError("internal_error", "The server had an error while processing the request.")


def install(app: FastAPI, count: Callable[[str], None], formats: ErrorFormats) -> None:
    """Makes the application answer with error objects. Calls `count` with the code of each error."""

    async def answer(request: Request, error: Exception) -> Response:
        failure = _unknown_route(request, error) if isinstance(error, HTTPException) else as_service_error(error)
        count(failure.code)
        note_error(failure.code)
        return error_response(failure, getattr(error, "headers", None), formats.body(failure, request.scope))

    for kind in (ServiceError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def _unknown_route(request: Request, error: HTTPException) -> ServiceError:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        near = _near_route(request)
        suggestion = f" Did you mean {near}?" if near else ""
        return ServiceError("not_found", f"Unknown request URL: {method} {path}.{suggestion}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        suggestion = f" Use {allowed.replace(', ', ' or ')}." if allowed else ""
        return ServiceError("method_not_allowed", f"Method not allowed: {method} {path}.{suggestion}")
    return as_service_error(error)


def _near_route(request: Request) -> str:
    """Returns the path of a route that the request may have meant; empty if none is near."""
    path = route_path(request.scope)
    if len(path) > _PATH_CHARS_MAX:
        return ""
    paths = [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
    for meant in (path.rstrip("/"), f"/v1{path.rstrip('/')}", path.removeprefix("/v1")):
        if meant in paths and meant != "/":
            return meant
    return next(iter(difflib.get_close_matches(path, paths, n=1, cutoff=_NEAR)), "")


def _invalid(error: RequestValidationError) -> ServiceError:
    first = error.errors()[0]
    param = ".".join(str(item) for item in first.get("loc", ())[1:])
    return ServiceError("invalid_value", f"'{param}' is not valid: {first.get('msg', '')}.", param=param)


def _own_headers(error: ServiceError) -> dict[str, str]:
    if error.code == "invalid_api_key":
        return {"www-authenticate": "Bearer"}
    if not error.retryable:
        return {}
    seconds = (error.retry_after_s or _RETRY_AFTER_S) * random.uniform(1.0, 1.0 + _JITTER)
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
