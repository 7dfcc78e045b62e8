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

from antiphon.services.engine.core.kv.kv_transfer import KvLoad
from antiphon.services.engine.kv.channel import Channel, connect
from antiphon.services.engine.kv.layout import KvMemory, place_bytes
from antiphon.services.engine.kv.pieces import Bytes
from antiphon.services.engine.kv.shared_memory import ReceiverPool, SharedMemory
from antiphon.services.engine.kv.wire import VERSION, Alive, Block, Failed, Fetch, Taken
from antiphon.shared import limits

log = logging.getLogger(__name__)
Connect = Callable[[str], Awaitable[Channel]]


class TransferError(Exception):
    """Raised if the sender gives up, is silent for too long, or has sent wrong data."""


async def load(order: KvLoad, memory: KvMemory, content: str, pool: ReceiverPool, connect: Connect = connect) -> int:
    """Fetches blocks until all are received or an error occurs. Returns the number of leading blocks that are written.

    `content` is this engine's `EngineFacts.content`, which must be the sender's too. May be cancelled.
    """
    one = _Load(order, memory, content, pool, connect)
    try:
        await one.run()
    except (OSError, TimeoutError, ValueError, msgspec.DecodeError, TransferError) as error:
        text = str(error) or type(error).__name__
        log.warning("KV from %s did not come (%s): the prompt is computed here", order.address, text)
    return one.num_leading


class _Load:
    def __init__(self, order: KvLoad, memory: KvMemory, content: str, pool: ReceiverPool, connect: Connect) -> None:
        self._order, self._content = order, content
        self._pool, self._connect = pool, connect
        self._memory = memory
        self._written: set[int] = set()
        self._places = {name: place for place, name in enumerate(order.hashes)}
        self._shared: SharedMemory | None = None
        self._is_shared = False
        """Whether the sender has opened the shared memory."""
        self._taken: list[int] = []
        """Places of the shared memory whose blocks have been written, which the sender has not been told yet."""

    @property
    def num_leading(self) -> int:
        """Number of blocks that are written, up to the first one that is not."""
        return next(place for place in range(len(self._order.hashes) + 1) if place not in self._written)

    async def run(self) -> None:
        """Returns when all blocks are written. Raises an error of the connection or TransferError."""
        channel, address = await self._connect(self._order.address), self._order.address
        try:
            if channel.is_local:
                self._shared = self._pool.take(address, self._order.transfer_id, place_bytes(self._memory))
            await channel.send(self._fetch())
            await self._receive_all(channel)
            if self._shared is not None and self._is_shared:
                # Given back only after success: the sender of a failed transfer might still write to it.
                self._pool.release(address, self._shared)
                self._shared = None
        finally:
            if self._shared is not None:
                self._shared.close()
                self._shared = None
            channel.close()

    def _fetch(self) -> Fetch:
        shared, own = self._shared, self._memory.own
        return Fetch(
            version=VERSION,
            transfer_id=self._order.transfer_id,
            layout=self._memory.layout,
            content=self._content,
            names=self._order.hashes,
            shared="" if shared is None else shared.name,
            num_places=0 if shared is None else shared.num_places,
            place_bytes=0 if shared is None else shared.place_bytes,
            form="" if own is None else own.name,
        )

    async def _receive_all(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        room = np.empty(place_bytes(self._memory), dtype=np.uint8)
        progress_at = loop.time()
        while len(self._written) < len(self._order.hashes):
            async with asyncio.timeout(limits.KV_SILENCE_S):
                header = await channel.receive()
            if isinstance(header, Block):
                progress_at = loop.time()
                await self._take(header, channel, room)
            elif isinstance(header, Failed):
                raise TransferError(header.reason)
            elif not isinstance(header, Alive):
                raise TransferError("an unexpected message")
            elif header.shared and self._shared is not None:
                self._is_shared = True
                self._shared.forget_name()
            elif loop.time() - progress_at > limits.KV_PROGRESS_S:
                raise TransferError(f"no block has come for {limits.KV_PROGRESS_S:g} s")
            await self._answer(channel)  # after every message: `Alive` may come between a block and the next wait

    async def _take(self, block: Block, channel: Channel, room: Bytes) -> None:
        """Receives a block and writes it. Raises TransferError if it is damaged, or not a requested block.

        Its place counts as written only if the checksum of what was written is right.
        """
        place = self._place_of(block)
        size = self._size_of(block)
        if block.size not in (0, size):
            raise TransferError("a block of another size")
        if block.size:
            data = room[:size]
            await channel.receive_into(data, limits.KV_SILENCE_S)
        elif self._is_shared and self._shared is not None and 0 <= block.place < self._shared.num_places:
            data = self._shared.place(block.place, size)
        else:
            raise TransferError("a block in memory that is not shared")
        if self._write(self._order.host_blocks[place], block, data) != block.checksum:
            raise TransferError("a block was damaged on its way")
        self._written.add(place)
        if not block.size:
            self._taken.append(block.place)

    async def _answer(self, channel: Channel) -> None:
        """Tells the sender which places are free. If further blocks have arrived, small ones are answered together."""
        is_last = len(self._written) == len(self._order.hashes) or not channel.has_header
        num_bytes = len(self._taken) * place_bytes(self._memory)
        if self._taken and (is_last or num_bytes >= limits.KV_BATCH_BYTES):
            taken, self._taken = Taken(tuple(self._taken)), []
            # If the sender has ended, its earlier messages can still be read; then `receive` raises the error.
            with contextlib.suppress(OSError):
                await channel.send(taken)
        await asyncio.sleep(0)  # other transfers run on the same loop

    def _place_of(self, block: Block) -> int:
        """Returns which of the requested blocks this is. Raises TransferError if it is none that is missing."""
        place, block_size = self._places.get(block.name), self._memory.layout.block_size
        # A block that was written must not be written again: a damaged one would replace it.
        if place is None or place in self._written or not 0 < block.num_tokens <= block_size:
            raise TransferError("a block that was not asked for")
        if block.num_tokens < min(block_size, self._order.num_tokens - place * block_size):
            raise TransferError("a block with too few tokens")
        return place

    def _size_of(self, block: Block) -> int:
        own = self._memory.own
        if not block.is_own:
            return self._memory.layout.num_bytes(block.num_tokens)
        if own is None:
            raise TransferError("a block in an unknown form")
        return own.host.num_bytes

    def _write(self, host_block: int, block: Block, data: Bytes) -> int:
        own = self._memory.own
        if block.is_own and own is not None:
            return own.host.write(host_block, data)
        return self._memory.write(host_block, data.reshape(self._memory.layout.shape(block.num_tokens)))
