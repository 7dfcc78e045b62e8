import asyncio
from typing import Any

import pytest

from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, unless_gone


class Client:
    """Takes what is sent, unless it is blocked."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.open = asyncio.Event()
        self.open.set()
        self.got = asyncio.Condition()

    async def send(self, message: Any) -> None:
        await self.open.wait()
        async with self.got:
            self.messages.append(message)
            self.got.notify_all()

    async def until(self, count: int) -> list[bytes]:
        async with self.got:
            await self.got.wait_for(lambda: len(self.messages) > count)
        return [message["body"] for message in self.messages[1:]]


async def never() -> Any:
    await asyncio.Event().wait()


@pytest.mark.spec("S-API-085")
async def test_nothing_is_sent_before_the_first_write():
    client = Client()
    channel = sse.EventChannel(client.send, keep_alive_s=60)
    assert not channel.started
    await channel.write(sse.event(b"{}"))
    await channel.end(sse.DONE)
    assert client.messages[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in client.messages[0]["headers"]
    bodies = [(message["body"], message["more_body"]) for message in client.messages[1:]]
    assert bodies == [(b"data: {}\n\n", True), (b"data: [DONE]\n\n", False)]


async def test_silence_is_filled_with_comments():
    client = Client()
    channel = sse.EventChannel(client.send, keep_alive_s=0.01)
    minder = asyncio.create_task(channel.mind())
    assert await client.until(2) == [sse.KEEP_ALIVE] * 2
    minder.cancel()


async def test_zero_means_no_comments():
    client = Client()
    channel = sse.EventChannel(client.send, keep_alive_s=0, stall_s=0.005)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.mind(), 0.05)
    assert client.messages == []


@pytest.mark.matrix("G-02")
async def test_a_client_that_takes_nothing_counts_as_gone():
    client = Client()
    channel = sse.EventChannel(client.send, keep_alive_s=60, stall_s=0.02)
    await channel.write(b"a")
    client.open.clear()
    with pytest.raises(ClientGoneError) as gone:
        await unless_gone(never, channel.write(b"b"), channel.guard())
    assert gone.value.cause == "client_stopped_reading"


@pytest.mark.matrix("G-02")
async def test_a_client_that_does_not_even_take_a_comment_counts_as_gone():
    client = Client()
    channel = sse.EventChannel(client.send, keep_alive_s=0.01, stall_s=0.02)
    client.open.clear()
    with pytest.raises(ClientGoneError) as gone:
        await unless_gone(never, never(), channel.guard())
    assert gone.value.cause == "client_stopped_reading"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (sse.event(b"{}"), True),
        (sse.named_event(b"delta", b"{}"), True),
        (sse.DONE, True),
        (sse.event(b"1") + sse.event(b"2"), False),
        (sse.named_event(b"a", b"1") + sse.event(b"2"), False),
        (b"data: 1\n", False),
        (b"", False),
    ],
)
def test_one_event_is_told_from_several(data: bytes, expected: bool) -> None:
    assert sse.is_one_event(data) == expected
    assert not expected or sse.split_events(data) == [data]
