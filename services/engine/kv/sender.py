"""Serves the blocks that this engine has computed for other engines, which fetch them over connections.

A saved block is held until it has been sent, is no longer needed, or has not been fetched for `KV_LEASE_S`. Everything
here runs on the event loop of `connector`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from antiphon.services.engine.core.kv.kv_transfer import KvMeta, KvSave
from antiphon.services.engine.kv.channel import Channel, Closed
from antiphon.services.engine.kv.layout import KvLayout, KvMemory, OwnForm
from antiphon.services.engine.kv.pieces import Bytes
from antiphon.services.engine.kv.shared_memory import SenderPool, SharedMemory
from antiphon.services.engine.kv.wire import VERSION, Alive, Block, Failed, Fetch, Taken
from antiphon.shared import limits

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Export:
    """One transfer. `blocks`: the computed blocks that are not sent yet: block id and number of tokens by name."""

    touched_at: float
    blocks: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])
    complete: bool = False
    failure: str = ""
    """Reason why no further block will be sent; empty while blocks may follow."""
    fetched: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Sender:
    """Serves the receivers. `release` is called with the ids of saved blocks that are not read any more.

    `content` is this engine's `EngineFacts.content`, which must be the receiver's too.
    """

    def __init__(self, memory: KvMemory, release: Callable[[tuple[int, ...]], None], content: str) -> None:
        self._memory, self._content = memory, content
        self._release = release
        self._exports: dict[str, _Export] = {}
        self._pool = SenderPool()
        self._announced = asyncio.Event()
        """The event that is set when the next transfer is announced; it is then replaced by a new one."""

    def take(self, meta: KvMeta) -> None:
        """Records announced transfers, saved blocks and dropped transfers."""
        now = asyncio.get_running_loop().time()
        for transfer_id in meta.opened:
            self._exports[transfer_id] = _Export(touched_at=now)
        if meta.opened:
            self._announced.set()
            self._announced = asyncio.Event()
        for save in meta.saves:
            self._save(save, now)
        for transfer_id in meta.dropped:
            if (export := self._exports.get(transfer_id)) is not None:
                self._fail(export, "the prompt is not computed to its end")

    def fail_all(self, reason: str) -> None:
        """Ends all transfers, so that no receiver waits for this engine."""
        for export in self._exports.values():
            self._fail(export, reason)

    def expire(self) -> None:
        """Frees the blocks of transfers that no engine fetches, and drops old transfers and old shared memory."""
        self._pool.expire()
        now = asyncio.get_running_loop().time()
        for transfer_id, export in list(self._exports.items()):
            if export.fetched and not export.failure:
                continue
            if now - export.touched_at > limits.KV_LEASE_S and export.blocks:
                log.warning("nobody has fetched the KV of a prompt for %g s: it is dropped", limits.KV_LEASE_S)
                self._fail(export, "the blocks were not fetched in time")
            elif now - export.touched_at > 2 * limits.KV_LEASE_S and (export.complete or export.failure):
                del self._exports[transfer_id]

    def close(self) -> None:
        """Frees memory that was shared with receivers. Nothing may be served any more."""
        self._pool.close()

    async def serve(self, channel: Channel, fetch: Fetch) -> None:
        """Answers one receiver. Raises an error of the connection."""
        if fetch.version != VERSION or fetch.layout != self._memory.layout:
            await channel.send(Failed("the engines have different versions or types of the KV cache"))
            return
        if fetch.content != self._content:
            await channel.send(Failed("the engines have different weights, or compute with different types"))
            return
        export = await self._find(fetch.transfer_id, channel)
        if export is None or export.fetched:
            await channel.send(Failed("there is no such transfer, or it has been fetched"))
            return
        export.fetched = True
        try:
            await self._send_in(channel, fetch, export)
        finally:
            self._fail(export, "the transfer has ended")

    async def _find(self, transfer_id: str, channel: Channel) -> _Export | None:
        """Waits until the transfer is announced, for at most `KV_ARRIVAL_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.KV_ARRIVAL_S
        while (export := self._exports.get(transfer_id)) is None and loop.time() < deadline:
            if not await _within(self._announced, limits.KV_ALIVE_S):
                await channel.send(Alive())
        return export

    async def _send_in(self, channel: Channel, fetch: Fetch, export: _Export) -> None:
        """Sends all blocks in the memory that the receiver shares, or over the connection if that cannot be used."""
        own = self._memory.own
        if own is not None and own.name != fetch.form:
            own = None
        layout, shared = self._memory.layout, None
        if fetch.shared and fetch.place_bytes >= _size_of(layout, own, layout.block_size):
            shared = self._pool.open(fetch.shared, fetch.transfer_id, fetch.num_places, fetch.place_bytes)
        try:
            sending = _Sending(channel, set(fetch.names), export, self._memory, self._release, shared, own)
            if await sending.run() and shared is not None:
                self._pool.keep(shared)
                shared = None
        finally:
            if shared is not None:
                shared.close()

    def _save(self, save: KvSave, now: float) -> None:
        export = self._exports.get(save.transfer_id)
        if export is None or export.failure:
            self._release(save.block_ids)
            return
        export.touched_at, export.complete = now, save.complete
        size, last = self._memory.layout.block_size, len(save.block_ids) - 1
        for index, (name, block) in enumerate(zip(save.hashes, save.block_ids, strict=True)):
            export.blocks[name] = block, save.num_tokens_in_last if index == last else size
        _wake(export)

    def _fail(self, export: _Export, reason: str) -> None:
        """Ends a transfer and releases the blocks that were not sent. Later blocks are released when they are saved."""
        export.failure = export.failure or reason
        export.touched_at = asyncio.get_running_loop().time()
        self._release_all(export.blocks.values())
        export.blocks.clear()
        _wake(export)

    def _release_all(self, blocks: Iterable[tuple[int, int]]) -> None:
        ids = tuple(block for block, _ in blocks)
        if ids:
            self._release(ids)


class _Sending:
    """The blocks of one transfer on their way to the receiver, in shared memory or over the connection.

    `wanted`: names of the blocks that the receiver has asked for and that are not sent. `own`: the form of the blocks;
    None: the common one.
    """

    def __init__(
        self,
        channel: Channel,
        wanted: set[bytes],
        export: _Export,
        memory: KvMemory,
        release: Callable[[tuple[int, ...]], None],
        shared: SharedMemory | None,
        own: OwnForm | None,
    ) -> None:
        self._channel, self._wanted, self._export = channel, wanted, export
        self._memory, self._release = memory, release
        self._shared, self._own = shared, own
        self._places = _Places(channel, 0 if shared is None else shared.num_places)
        size = 0 if shared is not None else _size_of(memory.layout, own, memory.layout.block_size)
        self._room = np.empty(size, dtype=np.uint8)

    async def run(self) -> bool:
        """Sends each block when it is computed. Returns whether the receiver has got all blocks."""
        export = self._export
        await self._channel.send(Alive(self._shared is not None))
        while self._wanted:
            if not export.blocks:
                if export.failure or export.complete:
                    await self._channel.send(Failed(export.failure or "the prompt has no such block"))
                    break
                if not await _within(export.changed, limits.KV_ALIVE_S):
                    await self._channel.send(Alive())
                continue
            if self._shared is not None and not await self._places.one_is_free():
                continue
            await self._send_some()
            await asyncio.sleep(0)  # other transfers run on the same loop
        await self._places.all_free()
        return not self._wanted

    async def _send_some(self) -> None:
        """Sends computed blocks: one over the connection; in shared memory several, if they are small."""
        headers: list[Block] = []
        num_bytes = 0
        while self._export.blocks and (self._shared is None or self._places.num_free):
            name = next(iter(self._export.blocks))
            block, num_tokens = self._export.blocks.pop(name)
            if name not in self._wanted:
                self._release((block,))
                continue
            self._wanted.discard(name)
            size = _size_of(self._memory.layout, self._own, num_tokens)
            place = 0 if self._shared is None else self._places.use()
            data = self._room[:size] if self._shared is None else self._shared.place(place, size)
            found = self._read(block, num_tokens, data)
            headers.append(
                Block(
                    name=name,
                    num_tokens=num_tokens,
                    checksum=found,
                    size=size if self._shared is None else 0,
                    place=place,
                    is_own=self._is_own,
                )
            )
            num_bytes += size
            if self._shared is None or num_bytes >= limits.KV_BATCH_BYTES:
                break
        if not headers:
            return
        async with asyncio.timeout(limits.KV_LEASE_S):  # a receiver that hangs reads nothing
            if self._shared is None:
                await self._channel.send(headers[0], self._room[: headers[0].size])
            else:
                await self._channel.send_all(headers)

    @property
    def _is_own(self) -> bool:
        return self._own is not None

    def _read(self, block: int, num_tokens: int, data: Bytes) -> int:
        """Copies a block, which is not read again afterwards. Returns the checksum."""
        try:
            if self._own is not None:
                return self._own.cache.read(block, data)
            return self._memory.read(block, data.reshape(self._memory.layout.shape(num_tokens)))
        finally:
            self._release((block,))


class _Places:
    """The places of one transfer's shared memory, and which of them are free."""

    def __init__(self, channel: Channel, count: int) -> None:
        self._channel, self._count = channel, count
        self._free = list(range(count))

    @property
    def num_free(self) -> int:
        """Number of free places."""
        return len(self._free)

    async def one_is_free(self) -> bool:
        """Returns True if a place is free; otherwise waits until one becomes free and returns False.

        Raises OSError or TimeoutError if the receiver no longer reads blocks.
        """
        if self._free:
            return True
        await self._take()
        return False

    def use(self) -> int:
        """Returns a free place and marks it as used."""
        return self._free.pop()

    async def all_free(self) -> None:
        """Waits for all answers: if the connection were closed before, the last blocks would be lost."""
        while len(self._free) < self._count:
            await self._take()

    async def _take(self) -> None:
        async with asyncio.timeout(limits.KV_LEASE_S):
            header = await self._channel.receive()
        if not isinstance(header, Taken):
            raise Closed("an unexpected message")
        for place in header.places:
            if not 0 <= place < self._count or place in self._free:
                raise Closed("a place that is not in use")
            self._free.append(place)


def _size_of(layout: KvLayout, own: OwnForm | None, num_tokens: int) -> int:
    return layout.num_bytes(num_tokens) if own is None else own.cache.num_bytes


def _wake(export: _Export) -> None:
    export.changed.set()
    export.changed = asyncio.Event()


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event. Returns False after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
