"""Transfers of KV in the simulation: the product's sender and receiver, with connections in memory and no thread."""

import asyncio
import contextvars
import random
from dataclasses import dataclass, field

import numpy as np

from antiphon.services.engine.core.kv.kv_transfer import KvLoad, KvLoaded, KvMeta, KvReleased
from antiphon.services.engine.kv.channel import Channel, Closed
from antiphon.services.engine.kv.connector import answer
from antiphon.services.engine.kv.layout import KvLayout
from antiphon.services.engine.kv.pieces import Bytes, checksum
from antiphon.services.engine.kv.receiver import load
from antiphon.services.engine.kv.sender import Sender
from antiphon.services.engine.kv.shared_memory import ReceiverPool
from antiphon.services.engine.kv.wire import Block, Header
from antiphon.services.engine.steps.loop import StepLoop

DELAY_S = 0.001


class NoMemory:
    """Blocks of four tokens without content that matters: the model of the simulation has none."""

    layout, own = KvLayout(num_layers=1, num_kv_heads=1, head_bytes=2, dtype="none", block_size=4), None

    def __init__(self) -> None:
        self.damaged: set[int] = set()
        """Host blocks that were written with damaged bytes."""

    def read(self, block: int, out: Bytes) -> int:
        out[:] = block % 256
        return checksum(out)

    def write(self, host_block: int, data: Bytes) -> int:
        if len(np.unique(data)) > 1:
            self.damaged.add(host_block)
        return checksum(data)


@dataclass
class Network:
    """The connections between engines. `damage`: the share of blocks that arrive damaged."""

    draw: random.Random
    damage: float = 0.0
    num_damaged: int = 0
    senders: "dict[str, SimConnector]" = field(default_factory=dict)

    async def connect(self, address: str) -> "MemoryChannel":
        await asyncio.sleep(DELAY_S)
        if address not in self.senders:
            raise ConnectionRefusedError(address)
        here, there = MemoryChannel(self), MemoryChannel(self)
        here.peer, there.peer = there, here
        self.senders[address].serve(there)
        return here


class MemoryChannel(Channel):
    """One end of a connection."""

    is_local = False  # type: ignore[assignment]

    def __init__(self, network: Network) -> None:
        self._network = network
        self._queue: asyncio.Queue[tuple[Header, Bytes | None] | None] = asyncio.Queue()
        self._data: Bytes | None = None
        self.peer: MemoryChannel
        self.closed = False

    async def send(self, header: Header, data: Bytes | None = None) -> None:
        await asyncio.sleep(DELAY_S)
        if self.closed or self.peer.closed:
            raise Closed("closed")
        copied = None if data is None else data.copy()
        if copied is not None and self._network.draw.random() < self._network.damage:
            self._network.num_damaged += 1
            copied[0] ^= 1
        self.peer._queue.put_nowait((header, copied))

    @property
    def has_header(self) -> bool:
        return False

    async def receive(self) -> Header:
        item = await self._queue.get()
        if item is None:
            raise Closed("closed")
        header, self._data = item
        assert isinstance(header, Block) == (self._data is not None)
        return header

    async def receive_into(self, out: Bytes, timeout_s: float) -> None:
        assert self._data is not None
        out[:] = self._data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.peer._queue.put_nowait(None)


class SimConnector:
    """A connector on the simulation's event loop. A sender has an address."""

    tier = keeper = copies = None  # there is no disk

    def __init__(self, network: Network, steps: StepLoop, address: str) -> None:
        self.address = address
        self._network, self._steps = network, steps
        self._results: list[KvLoaded | KvReleased] = []
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._context = contextvars.copy_context()
        self._sender = Sender(NoMemory(), self._release, "")
        self._expiry = asyncio.get_running_loop().create_task(self._expire())
        if address:
            network.senders[address] = self

    def start_load(self, meta: KvMeta) -> None:
        loop = asyncio.get_running_loop()
        self._sender.take(meta)
        for order in meta.loads:
            self._loads[order.transfer_id] = loop.create_task(self._load(order), context=self._context)
        for transfer_id in meta.cancelled:
            if transfer_id in self._loads:
                self._loads[transfer_id].cancel()

    def finished(self) -> list[KvLoaded | KvReleased]:
        found, self._results = self._results, []
        return found

    def serve(self, channel: MemoryChannel) -> None:
        asyncio.get_running_loop().create_task(answer(channel, self._sender, None), context=self._context)

    def stand_still(self) -> None:
        self._sender.fail_all("stands still")

    def close(self) -> None:
        self._expiry.cancel()

    async def _load(self, order: KvLoad) -> None:
        count, memory = 0, NoMemory()
        try:
            count = await load(order, memory, "", ReceiverPool(), self._network.connect)
            assert not memory.damaged & set(order.host_blocks[:count]), "a damaged block counts as received"
        finally:
            del self._loads[order.transfer_id]
            self._results.append(KvLoaded(order.transfer_id, count))
            self._steps.wake()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._sender.expire()

    def _release(self, block_ids: tuple[int, ...]) -> None:
        self._results.append(KvReleased(block_ids))
        self._steps.wake()
