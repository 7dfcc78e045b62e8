"""Connections that receive into one buffer: nothing that one of them was given may change when another receives."""

import asyncio
import concurrent.futures
import hashlib
import random

import pytest

from antiphon.shared.receiving import RECEIVE_BYTES, ReceivesIntoOneBuffer


class Keeper(asyncio.Protocol, ReceivesIntoOneBuffer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Keeps what it gets, and the largest piece."""

    def __init__(self) -> None:
        self.received, self.longest, self.ended = bytearray(), 0, asyncio.Event()

    def data_received(self, data: bytes | memoryview) -> None:
        self.longest = max(self.longest, len(data))
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def received_of(count: int, size: int, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Sends random bytes over `count` connections at once; returns digests of what was sent and received."""
    keepers: list[Keeper] = []

    def keeper() -> Keeper:
        keepers.append(Keeper())
        return keepers[-1]

    server = await asyncio.get_running_loop().create_server(keeper, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    chance = random.Random(seed)
    sent = [chance.randbytes(size) for _ in range(count)]

    async def send(data: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, len(data), size // 7):
            writer.write(data[at : at + size // 7])
            await writer.drain()
        writer.close()

    await asyncio.gather(*(send(data) for data in sent))
    for one in keepers:
        await one.ended.wait()
    server.close()
    assert max(one.longest for one in keepers) <= RECEIVE_BYTES
    return sorted(hashlib.sha256(data).digest() for data in sent), sorted(
        hashlib.sha256(one.received).digest() for one in keepers
    )


@pytest.mark.parametrize("size", [100, 700_000])
async def test_connections_that_receive_at_once_keep_their_own_bytes(size: int) -> None:
    sent, received = await received_of(8, size, seed=1)
    assert sent == received


def test_event_loops_of_several_threads_have_buffers_of_their_own() -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(asyncio.run, received_of(4, 700_000, seed)) for seed in range(4)]
        for run in runs:
            sent, received = run.result()
            assert sent == received
