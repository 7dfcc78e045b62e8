"""Responses whose body is JSON."""

from typing import Any

import msgspec
from starlette.responses import Response

_JSON = "application/json"
_encode = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200) -> Response:
    """Returns a response with a value as JSON: builtin types or structs."""
    return encoded_response(_encode(value), status)


def encoded_response(data: bytes, status: int = 200) -> Response:
    """Returns a response with JSON that is encoded already."""
    return Response(data, status_code=status, media_type=_JSON)
