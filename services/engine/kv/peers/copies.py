"""Sends copies of stored blocks to the engine that keeps them, in the order in which they were written.

Only names wait; the blocks are read from the store when they are sent, a few at a time. Everything but `offer` runs on
the event loop of `connector`. If the other engine fails, refuses or is silent, `lost` is called, and the names that are
known here are offered to the next engine, which takes what it does not have.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import msgspec

from antiphon.services.engine.kv.channel import Channel, connect
from antiphon.services.engine.kv.disk.tier import DiskTier
from antiphon.services.engine.kv.wire import VERSION, Block, Failed, Header, Kept, Offer, Want
from antiphon.shared import limits

log = logging.getLogger(__name__)
Connect = Callable[[str], Awaitable[Channel]]


class Keeper(NamedTuple):
    """The engine that keeps the copies: its ids, where it listens, and the secret that it has given for this."""

    engine_id: str
    instance_id: str
    address: str
    token: str


class RefusedError(Exception):
    """The other engine keeps no copies, or has answered something unexpected."""


class Copies:
    """The copies of one engine's blocks. `lost` is called with the engine that does not keep them."""

    def __init__(self, tier: DiskTier, lost: Callable[[Keeper], None], connect: Connect = connect) -> None:
        self._tier, self._lost, self._connect = tier, lost, connect
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[bytes] = deque()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """What has been copied, the oldest first."""
        self._keeper: Keeper | None = None
        self._changed = asyncio.Event()
        self.num_copied = 0
        self.num_dropped = 0
        """Blocks that were not copied because too many waited."""

    # --- called on any thread ---

    def offer(self, names: Iterable[bytes]) -> None:
        """Has stored blocks copied, if the engine that keeps the copies does not have them."""
        # The loop may have ended just before: then there is nobody to send copies to.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._add, tuple(names))

    # --- on the loop ---

    def _add(self, names: tuple[bytes, ...]) -> None:
        for name in names:
            if name in self._known:
                self._known.move_to_end(name)
            elif len(self._waiting) < limits.KV_COPIES_WAITING_MAX:
                self._waiting.append(name)
            else:
                self.num_dropped += 1
        self._changed.set()

    def keep_at(self, keeper: Keeper | None) -> None:
        """Sends copies to another engine from now on, also of what the one before has. None: to nobody."""
        if keeper == self._keeper:
            return
        if keeper is not None:
            again = (*self._known, *self._waiting)
            self._waiting = deque(again[-limits.KV_COPIES_WAITING_MAX :])
            self._known.clear()
        self._keeper = keeper
        self._changed.set()

    async def run(self) -> None:
        """Sends without end."""
        while True:
            keeper = self._keeper
            if keeper is None or not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                await self._send_to(keeper)
            except (OSError, TimeoutError, ValueError, msgspec.DecodeError, RefusedError) as error:
                log.warning("%s keeps no copies of KV now: %s", keeper.engine_id, error or type(error).__name__)
                if self._keeper == keeper:
                    self._keeper = None
                self._lost(keeper)

    async def _send_to(self, keeper: Keeper) -> None:
        """Sends until there is nothing to send for a while, or another engine is to keep the copies."""
        channel = await self._connect(keeper.address)
        try:
            while self._keeper == keeper:
                if self._waiting:
                    await self._send_some(channel, keeper)
                elif not await self._within(limits.KV_COPIES_AVOID_S):
                    return
        finally:
            channel.close()

    async def _within(self, timeout_s: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _send_some(self, channel: Channel, keeper: Keeper) -> None:
        """Offers the next names and sends the blocks that are wanted. Names stay in the queue until all are kept."""
        names = tuple(self._waiting[place] for place in range(min(len(self._waiting), limits.KV_COPIES_OFFER_MAX)))
        await channel.send(Offer(version=VERSION, token=keeper.token, names=names))
        want = await _answer(channel)
        if not isinstance(want, Want) or not all(0 <= place < len(names) for place in want.places):
            raise RefusedError("an unexpected answer to an offer")
        await self._send_blocks(channel, tuple(names[place] for place in want.places))
        if not isinstance(await _answer(channel), Kept):
            raise RefusedError("the blocks were not confirmed")
        for name in names:
            # Unless the queue was filled again for another engine meanwhile.
            if self._waiting and self._waiting[0] == name:
                self._waiting.popleft()
            self._known[name] = None
        while len(self._known) > limits.KV_COPIES_KNOWN_MAX:
            self._known.popitem(last=False)

    async def _send_blocks(self, channel: Channel, wanted: tuple[bytes, ...]) -> None:
        for name in wanted:
            found = await self._tier.read((name,))
            # A block that is gone or damaged is announced without bytes: the other engine waits for each.
            size, total = (found[0].data.nbytes, found[0].checksum) if found else (0, 0)
            block = Block(name=name, num_tokens=0, checksum=total, size=size)
            async with asyncio.timeout(limits.KV_COPIES_SILENCE_S):
                await channel.send(block, found[0].data if found else None)
            self.num_copied += bool(found)


async def _answer(channel: Channel) -> Header:
    """Returns the next header. Raises RefusedError if it says that no block will be kept."""
    async with asyncio.timeout(limits.KV_COPIES_SILENCE_S):
        header = await channel.receive()
    if isinstance(header, Failed):
        raise RefusedError(header.reason)
    return header
