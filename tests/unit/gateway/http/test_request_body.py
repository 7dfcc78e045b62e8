"""Reading bodies that are too large, as announced by the client."""

import asyncio
from typing import NoReturn

import pytest

from services.gateway.http import request_body
from shared import limits
from shared.errors import ServiceError


async def _nothing_comes() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_body_that_is_announced_too_large_and_never_comes_is_refused_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "DISCARD_S", 0.01)
    headers = [(b"content-length", str(limits.BODY_BYTES_MAX + 1).encode())]
    with pytest.raises(ServiceError) as caught:
        async with asyncio.timeout(60):
            await request_body.read(headers, _nothing_comes)
    assert caught.value.code == "request_too_large"
