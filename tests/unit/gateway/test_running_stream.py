"""How the run of a recorded stream ends, whose client has gone or does not read."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError
from antiphon.services.gateway.guests.resume.positioned import PositionedEvents
from antiphon.services.gateway.guests.resume.running import RunningStream
from antiphon.shared.errors import ServiceError

GRACE_S = 0.05


class Run:
    """Implements what a stream uses of a ResponseRunner: writes what `work` writes."""

    def __init__(self, work: Callable[[sse.EventChannel], Awaitable[None]]) -> None:
        self._work = work
        self.cause: str | None = None

    async def detached(self, channel: sse.EventChannel) -> None:
        try:
            await self._work(channel)
        except asyncio.CancelledError as cancelled:
            self.cause = cancelled.args[0] if cancelled.args else ""
            raise


async def forever(*_: Any) -> Any:
    await asyncio.Event().wait()


async def leaving() -> Message:
    return {"type": "http.disconnect"}


async def sent(message: Message) -> None:
    pass


async def serve(run: Run, receive: Any, send: Any = sent, grace_s: float = GRACE_S) -> list[RunningStream]:
    ended: list[RunningStream] = []
    stream = RunningStream(PositionedEvents("r", 1), grace_s, ended.append)
    task = asyncio.current_task()
    assert task is not None
    try:
        channel = sse.EventChannel(send, keep_alive_s=0.0, stall_s=0.02)
        await stream.serve(run, receive, channel)  # type: ignore[arg-type]
    finally:
        assert (ended, task.cancelling()) == ([stream], 0)
    return ended


async def test_a_run_whose_client_has_gone_is_cancelled_after_the_grace_and_told_why() -> None:
    run = Run(forever)
    with pytest.raises(ClientGoneError):
        await serve(run, leaving)
    assert run.cause == "client_closed_request"


async def test_a_run_that_ends_within_the_grace_is_not_cancelled() -> None:
    async def work(channel: sse.EventChannel) -> None:
        await asyncio.sleep(0.01)
        await channel.end(b"x")

    run = Run(work)
    with pytest.raises(ClientGoneError):
        await serve(run, leaving, grace_s=60.0)
    assert run.cause is None


async def test_a_failure_without_a_client_is_reported_as_the_loss_of_the_client() -> None:
    async def work(channel: sse.EventChannel) -> None:
        await asyncio.sleep(0.01)
        raise ServiceError("engine_failure", "x")

    with pytest.raises(ClientGoneError):
        await serve(Run(work), leaving, grace_s=60.0)


async def test_a_client_that_does_not_read_the_last_events_is_not_waited_for() -> None:
    run = Run(lambda channel: channel.end(b"x"))
    with pytest.raises(ClientGoneError) as gone:
        await asyncio.wait_for(serve(run, forever, forever), 20)
    assert (gone.value.cause, run.cause) == (sse.NOT_READING, sse.NOT_READING)


async def test_an_answer_that_has_ended_has_a_client() -> None:
    over = asyncio.Event()

    async def ends() -> Message:
        await over.wait()
        return {"type": "http.disconnect"}

    async def work(channel: sse.EventChannel) -> None:
        await channel.end(b"x")
        over.set()
        await asyncio.sleep(0.01)

    assert await serve(Run(work), ends)
