"""One load: fetches the blocks of a transfer, checks them and writes them to host blocks.

A load never raises because of the other side or the network: it ends with the blocks that it has received, and the
engine computes the rest. Runs on the event loop of `connector`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from services.engine.core.kv.kv_transfer import KvLoad
from services.engine.kv.channel import Channel, SharedMemory, connect, forget
from services.engine.kv.layout import Bytes, KvMemory, checksum
from services.engine.kv.wire import VERSION, Alive, Block, Failed, Fetch, Taken
from shared import limits

log = logging.getLogger(__name__)
Connect = Callable[[str], Awaitable[Channel]]


class TransferError(Exception):
    """Raised if the sender gives up, is silent for too long, or has sent wrong data."""


async def load(order: KvLoad, memory: KvMemory, content: str, connect: Connect = connect) -> int:
    """Fetches blocks until all are received or an error occurs. Returns the number of leading blocks that are written.

    `content` is this engine's `EngineFacts.content`, which must be the sender's too. May be cancelled.
    """
    one = _Load(order, memory, content, connect)
    try:
        await one.run()
    except (OSError, TimeoutError, ValueError, msgspec.DecodeError, TransferError) as error:
        text = str(error) or type(error).__name__
        log.warning("KV from %s did not come (%s): the prompt is computed here", order.address, text)
    return one.num_leading


class _Load:
    def __init__(self, order: KvLoad, memory: KvMemory, content: str, connect: Connect) -> None:
        self._order, self._content = order, content
        self._connect = connect
        self._memory = memory
        self._written: set[int] = set()
        self._places = {name: place for place, name in enumerate(order.hashes)}

    @property
    def num_leading(self) -> int:
        """Number of blocks that are written, up to the first one that is not."""
        return next(place for place in range(len(self._order.hashes) + 1) if place not in self._written)

    async def run(self) -> None:
        """Returns when all blocks are written. Raises an error of the connection or TransferError."""
        channel, shared, name = await self._connect(self._order.address), None, ""
        try:
            if channel.is_local:
                shared, name = self._shared_memory()
            layout, hashes = self._memory.layout, self._order.hashes
            num_places = 0 if shared is None else shared.num_places
            fetch = Fetch(VERSION, self._order.transfer_id, layout, self._content, hashes, name, num_places)
            await channel.send(fetch)
            await self._receive_all(channel, shared, name)
        finally:
            forget(name)
            if shared is not None:
                shared.close()
            channel.close()

    def _shared_memory(self) -> tuple[SharedMemory | None, str]:
        """Returns shared memory for a few blocks and its name; None and "" if the blocks are sent over the socket."""
        layout = self._memory.layout
        size = layout.num_bytes(layout.block_size)
        count = min(len(self._order.hashes), limits.KV_SHARED_BYTES_MAX // size)
        if not count:
            return None, ""
        try:
            return SharedMemory.create(self._order.transfer_id, count, size)
        except OSError as error:
            log.info("no shared memory (%s): KV goes through a socket", error)
            return None, ""

    async def _receive_all(self, channel: Channel, shared: SharedMemory | None, name: str) -> None:
        layout, loop = self._memory.layout, asyncio.get_running_loop()
        room = np.empty(layout.num_bytes(layout.block_size), dtype=np.uint8)
        progress_at = loop.time()
        while len(self._written) < len(self._order.hashes):
            async with asyncio.timeout(limits.KV_SILENCE_S):
                header = await channel.receive()
            if isinstance(header, Block):
                progress_at = loop.time()
                await self._take(header, channel, shared, room)
            elif isinstance(header, Failed):
                raise TransferError(header.reason)
            elif not isinstance(header, Alive):
                raise TransferError("an unexpected message")
            elif header.shared:
                forget(name)  # the sender has opened it
            elif loop.time() - progress_at > limits.KV_PROGRESS_S:
                raise TransferError(f"no block has come for {limits.KV_PROGRESS_S:g} s")

    async def _take(self, block: Block, channel: Channel, shared: SharedMemory | None, room: Bytes) -> None:
        """Receives a block, checks it and writes it. Raises TransferError if it is not a requested block."""
        layout, place = self._memory.layout, self._places.get(block.name)
        size = layout.num_bytes(block.num_tokens)
        if place is None or not 0 < block.num_tokens <= layout.block_size or block.size not in (0, size):
            raise TransferError("a block that was not asked for")
        first = place * layout.block_size
        if block.num_tokens < min(layout.block_size, self._order.num_tokens - first):
            raise TransferError("a block with too few tokens")
        if block.size:
            data = room[:size]
            await channel.receive_into(data, limits.KV_SILENCE_S)
        elif shared is not None and 0 <= block.place < shared.num_places:
            data = shared.place(block.place, size)
        else:
            raise TransferError("a block in memory that is not shared")
        if checksum(data) != block.checksum:
            raise TransferError("a block was damaged on its way")
        self._memory.write(self._order.host_blocks[place], data.reshape(layout.shape(block.num_tokens)))
        self._written.add(place)
        if not block.size:
            # If the sender has ended, its earlier messages can still be read; then `receive` raises the error.
            with contextlib.suppress(OSError):
                await channel.send(Taken(block.place))
