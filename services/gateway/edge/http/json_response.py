"""Responses whose body is JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

NOT_KEPT = {"cache-control": "no-store"}
"""Header of answers about the present state, so that browsers and proxies do not cache them."""
_JSON = "application/json"
_encode = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a value as JSON: builtin types or structs."""
    return encoded_response(_encode(value), status, headers)


def encoded_response(data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with already encoded JSON."""
    return Response(data, status_code=status, media_type=_JSON, headers=headers)
