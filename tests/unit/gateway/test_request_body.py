"""Reading bodies that are too large, as announced by the client."""

import asyncio
from typing import NoReturn

import pytest

from services.gateway import request_body
from shared import limits
from shared.errors import ServiceError


async def _nothing_comes() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_body_that_is_announced_far_too_large_is_refused_before_it_comes() -> None:
    headers = [(b"content-length", str(100 * limits.BODY_BYTES_MAX).encode())]
    with pytest.raises(ServiceError) as caught:
        async with asyncio.timeout(1.0):
            await request_body.read(headers, _nothing_comes)
    assert caught.value.code == "request_too_large"
