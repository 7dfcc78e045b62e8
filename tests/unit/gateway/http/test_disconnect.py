import asyncio
from typing import Any, NoReturn

import pytest

from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, LaterGuard, unless_gone
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError


async def silent() -> Any:
    await asyncio.Event().wait()


async def leaving() -> Any:
    return {"type": "http.disconnect"}


def sender(*chunks: bytes, leaves: bool = False) -> tuple[Any, list[bytes]]:
    """A receive callable, and what is left of its chunks."""
    left = list(chunks)

    async def receive() -> Any:
        if not left:
            assert leaves, "read beyond the end"
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or leaves}

    return receive, left


async def test_work_that_ends_gives_its_result():
    async def work() -> int:
        return 5

    assert await unless_gone(silent, work()) == 5


async def test_work_that_fails_raises_its_error():
    async def work() -> int:
        raise ServiceError("timeout", "x")

    with pytest.raises(ServiceError, match="x"):
        await unless_gone(silent, work())


async def test_work_is_cancelled_when_the_client_leaves():
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ClientGoneError) as gone:
        await unless_gone(leaving, work())
    assert gone.value.cause == "client_closed_request"
    assert cancelled.is_set()


async def test_nothing_keeps_running_when_the_waiting_task_is_cancelled():
    before = asyncio.all_tasks()
    waiter = asyncio.create_task(unless_gone(silent, silent(), LaterGuard(0.0, silent)))
    while len(asyncio.all_tasks() - before) < 3:
        await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert asyncio.all_tasks() == before


async def test_a_cancellation_keeps_its_message_and_has_precedence_over_the_client() -> None:
    left = asyncio.Event()

    async def leaves() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    waiter = asyncio.create_task(unless_gone(leaves, silent()))
    await asyncio.sleep(0)
    left.set()
    waiter.cancel("draining")
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await waiter
    assert cancelled.value.args == ("draining",)
    assert waiter.cancelled()


async def test_a_task_can_go_on_after_its_client_has_left():
    for _ in range(2):
        with pytest.raises(ClientGoneError):
            await unless_gone(leaving, silent())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("fails", [True, False])
async def test_a_client_that_leaves_is_reported_however_the_work_takes_its_cancellation(fails: bool) -> None:
    async def work() -> None:
        try:
            await silent()
        except asyncio.CancelledError:
            if fails:
                raise ServiceError("timeout", "x") from None

    with pytest.raises(ClientGoneError):
        await unless_gone(leaving, work())


async def test_a_client_that_leaves_just_after_the_work_has_ended_changes_nothing() -> None:
    left = asyncio.Event()

    async def leaves() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> int:
        await asyncio.sleep(0)
        left.set()
        return 5

    assert await unless_gone(leaves, work()) == 5
    await asyncio.sleep(0)


async def test_a_guard_that_raises_ends_the_work_and_one_that_is_not_due_has_no_task() -> None:
    async def fails() -> NoReturn:
        raise ClientGoneError("client_stopped_reading")

    with pytest.raises(ClientGoneError) as gone:
        await unless_gone(silent, silent(), LaterGuard(0.01, fails))
    assert gone.value.cause == "client_stopped_reading"
    assert await unless_gone(silent, asyncio.sleep(0, 5), LaterGuard(60.0, fails)) == 5


async def test_a_body_is_joined_from_its_parts():
    receive, _ = sender(b"ab", b"", b"c")
    assert await request_body.read([], receive) == b"abc"


async def test_a_body_of_just_the_limit_is_read():
    receive, _ = sender(b"x" * limits.BODY_BYTES_MAX)
    assert len(await request_body.read([], receive)) == limits.BODY_BYTES_MAX


@pytest.mark.parametrize("size", [limits.BODY_BYTES_MAX + 1, 10**30])
async def test_an_announced_body_over_the_limit_is_refused(size: int):
    receive, left = sender(b"x", b"y")
    with pytest.raises(ServiceError) as raised:
        await request_body.read([(b"content-length", str(size).encode())], receive)
    assert raised.value.code == "request_too_large"
    assert len(left) == 2


async def test_a_body_that_grows_over_the_limit_is_refused_and_not_read_for_ever():
    part = b"x" * 2**20
    receive, left = sender(*[part] * 100)
    with pytest.raises(ServiceError) as raised:
        await request_body.read([], receive)
    assert raised.value.code == "request_too_large"
    assert 100 - len(left) == limits.BODY_BYTES_MAX // 2**20 + 1


async def test_a_client_that_leaves_while_it_sends_is_gone():
    receive, _ = sender(b"ab", leaves=True)
    with pytest.raises(ClientGoneError):
        await request_body.read([], receive)


@pytest.mark.matrix("G-09")
async def test_a_body_that_does_not_arrive_is_a_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BODY_READ_S", 0.01)
    with pytest.raises(ServiceError) as raised:
        await request_body.read([], silent)
    assert raised.value.code == "timeout"
