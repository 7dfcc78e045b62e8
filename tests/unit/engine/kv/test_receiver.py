"""What a receiver answers to messages that come together."""

import asyncio
import socket

from antiphon.services.engine.core.kv.kv_transfer import KvLoad
from antiphon.services.engine.kv.channel import Channel
from antiphon.services.engine.kv.pieces import checksum
from antiphon.services.engine.kv.receiver import load
from antiphon.services.engine.kv.shared_memory import ReceiverPool, SenderPool
from antiphon.services.engine.kv.wire import Alive, Block, Fetch, Taken
from tests.sim.transfers import NoMemory

NAMES = (b"1" * 16, b"2" * 16)
HOST, WAIT_S = "127.0.0.1", 10.0


async def answer_to(*following: Alive) -> tuple[Taken, int]:
    """Returns the answer to the first of two blocks, which comes with other messages, and what the load has got."""
    loop, memory, pool = asyncio.get_running_loop(), NoMemory(), ReceiverPool()
    size = memory.layout.num_bytes(memory.layout.block_size)
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        order = KvLoad(
            transfer_id="transfer",
            address=f"{HOST}:{listener.getsockname()[1]}",
            hashes=NAMES,
            host_blocks=(0, 1),
            num_tokens=2 * memory.layout.block_size,
        )
        task = asyncio.create_task(load(order, memory, "", pool))
        channel = Channel((await loop.sock_accept(listener))[0])
    fetch = await channel.receive()
    assert isinstance(fetch, Fetch)
    shared = SenderPool().open(fetch.shared, fetch.transfer_id, fetch.num_places, fetch.place_bytes)
    assert shared is not None
    shared.place(0, size)[:] = 7
    block = Block(
        name=NAMES[0], num_tokens=memory.layout.block_size, checksum=checksum(shared.place(0, size)), size=0, place=0
    )
    await channel.send_all([Alive(True), block, *following])
    async with asyncio.timeout(WAIT_S):
        taken = await channel.receive()
    channel.close()
    assert isinstance(taken, Taken)
    return taken, await task


def test_a_place_is_free_again_though_the_sender_has_nothing_more_to_send() -> None:
    """Otherwise both sides would wait for each other."""
    assert asyncio.run(answer_to()) == (Taken((0,)), 1)
    assert asyncio.run(answer_to(Alive())) == (Taken((0,)), 1)
