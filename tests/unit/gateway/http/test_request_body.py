"""Reading bodies whose bytes come too slowly."""

import asyncio

import pytest
from starlette.types import Message, Receive

from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.request_body import HeldBody
from antiphon.shared import limits
from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.errors import ServiceError


async def test_an_upload_of_a_byte_now_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_READ_S", 0.2)

    async def drip() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(ServiceError) as caught:
        async for _ in request_body.pieces([], drip, 10**9):
            pass
    assert caught.value.code == "timeout"


def _pieces(*sizes: int) -> Receive:
    """The `receive` of a connection that sends pieces of these sizes."""
    left = list(sizes)

    async def receive() -> Message:
        size = left.pop(0)
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(left)}

    return receive


async def test_bodies_of_one_key_leave_room_for_those_of_others_and_count_until_their_requests_end() -> None:
    shares = Shares(300)

    def body(key: str, *sizes: int, announced: int = 0) -> HeldBody:
        headers = [(b"content-length", str(announced).encode())] if announced else []
        return HeldBody(shares, key, headers, _pieces(*sizes))

    first, second = body("bob", 100), body("bob", 25, 26)
    await first.receive()
    await second.receive()
    with pytest.raises(ServiceError, match="too many large request bodies") as caught:
        await second.receive()
    assert (caught.value.code, caught.value.status) == ("server_is_overloaded", 503)
    alice = body("alice", 80)
    await alice.receive()
    announced = body("bob", 1, announced=26)
    with pytest.raises(ServiceError):
        await announced.receive()
    for each in (first, second, alice, announced):
        each.release()
        each.release()
    assert shares.total == 0
    await body("bob", 1, announced=150).receive()
    assert shares.total == 150


async def test_a_body_that_is_too_large_counts_as_the_largest_that_is_kept() -> None:
    shares = Shares(3 * limits.BODY_BYTES_MAX)
    body = HeldBody(shares, "bob", [(b"content-length", b"9" * 15)], _pieces(2 * limits.BODY_BYTES_MAX, 10))
    await body.receive()
    await body.receive()
    assert shares.total == limits.BODY_BYTES_MAX


@pytest.mark.parametrize("values", [b"[],", b"{},", b"1,", b'{"a":[1]},'])
async def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(
    values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JSON_VALUES_MAX", 1000)
    most = 1000 // sum(values.count(mark) for mark in (b",", b"[", b"{"))
    request_body.check_values(values * most + b'"' + b"text " * 1000 + b'"')
    with pytest.raises(ServiceError, match="JSON values"):
        request_body.check_values(values * (most + 1))
    with pytest.raises(ServiceError) as caught:
        await request_body.read([], _pieces_of(values * (most + 1)))
    assert caught.value.status == 413


def _pieces_of(data: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    return receive
