"""Responses whose body is JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

NOT_KEPT = {"cache-control": "no-store"}
"""Header of answers that show the present state: neither browsers nor proxies keep them."""
_JSON = "application/json"
_encode = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a value as JSON: builtin types or structs."""
    return encoded_response(_encode(value), status, headers)


def encoded_response(data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with JSON that is encoded already."""
    return Response(data, status_code=status, media_type=_JSON, headers=headers)
