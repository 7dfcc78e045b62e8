"""Routes whose endpoint takes only the request."""

from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from antiphon.services.gateway.edge.http import errors
from antiphon.services.gateway.edge.http.in_process import InProcessClient
from antiphon.services.gateway.edge.http.routing.direct_route import DirectRoute, is_direct
from antiphon.shared.errors import ServiceError


async def direct(request: Request) -> Response:
    if await request.body() == b"bad":
        raise ServiceError("invalid_value", "It is bad.")
    return PlainTextResponse((await request.body()).decode())


async def with_parameter(request: Request, name: str) -> Response:
    return PlainTextResponse(name)


async def with_value(request: Request) -> dict[str, str]:
    return {}


def synchronous(request: Request) -> Response:
    return PlainTextResponse("")


@pytest.mark.parametrize(
    ("endpoint", "expected"), [(direct, True), (with_parameter, False), (with_value, False), (synchronous, False)]
)
def test_an_endpoint_is_direct_if_it_needs_nothing_of_fastapi(endpoint: Any, expected: bool) -> None:
    assert is_direct(endpoint) is expected


async def test_a_direct_route_is_in_the_schema_and_has_the_applications_errors() -> None:
    app, counted = FastAPI(), list[str]()
    errors.install(app, counted.append, errors.ErrorFormats())
    app.router.add_api_route("/echo", direct, methods=["POST"], response_model=None, route_class_override=DirectRoute)
    client = InProcessClient(lambda: app)
    assert (await client.post("/echo", b"hello")).body == b"hello"
    refused = await client.post("/echo", b"bad")
    assert (refused.status, msgspec.json.decode(refused.body)["error"]["message"]) == (400, "It is bad.")
    assert (await client.post("/other", b"")).status == 404
    assert list(app.openapi()["paths"]["/echo"]) == ["post"]
    assert counted == ["invalid_value", "not_found"]
