"""Keeps copies of other engines' blocks: receives them over connections and writes them to the own store.

A block counts only if its checksum is right and if it was asked for. One block of each connection is in memory. Runs
on the event loop of `connector`, except `admit`.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict

import numpy as np

from antiphon.services.engine.kv.channel import Channel
from antiphon.services.engine.kv.disk.tier import DiskTier, StoredBlock
from antiphon.services.engine.kv.pieces import Bytes, checksum
from antiphon.services.engine.kv.wire import VERSION, Block, Failed, Kept, Offer, Want
from antiphon.shared import limits

log = logging.getLogger(__name__)
_IDLE_S = 4 * limits.KV_COPIES_AVOID_S
"""A connection without an offer is closed after this time; the other engine closes it before."""
_TOKEN_BYTES = 16


class WrongBlockError(Exception):
    """The other engine has sent something else than the blocks that were asked for."""


class CopyKeeper:
    """The copies that one engine keeps for others, in its own store."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._tokens: OrderedDict[str, str] = OrderedDict()
        """The secret of each engine whose copies are kept, the latest last."""
        self.num_kept = 0

    def admit(self, engine_id: str) -> str:
        """Returns the secret with which an engine may send its blocks from now on. Called on any thread.

        The engine that asked longest ago loses its place if there are too many.
        """
        token = secrets.token_hex(_TOKEN_BYTES)
        self._tokens.pop(engine_id, None)
        self._tokens[engine_id] = token
        while len(self._tokens) > limits.KV_COPIES_FROM_MAX:
            self._tokens.popitem(last=False)
        return token

    async def serve(self, channel: Channel, offer: Offer) -> None:
        """Answers an engine's offers until its connection ends."""
        try:
            while True:
                await self._take(channel, offer)
                async with asyncio.timeout(_IDLE_S):
                    header = await channel.receive()
                if not isinstance(header, Offer):
                    raise WrongBlockError("an unexpected message")
                offer = header
        except WrongBlockError as error:
            log.warning("copies of KV are refused: %s", error)
            await channel.send(Failed(str(error)))

    async def _take(self, channel: Channel, offer: Offer) -> None:
        known = any(secrets.compare_digest(offer.token, token) for token in tuple(self._tokens.values()))
        if offer.version != VERSION or not known or len(offer.names) > limits.KV_COPIES_OFFER_MAX:
            raise WrongBlockError("the offer is of another version, or from an engine that was not admitted")
        places = tuple(place for place, name in enumerate(offer.names) if name not in self._tier)
        await channel.send(Want(places))
        room = np.empty(self._tier.block_bytes, dtype=np.uint8)
        for place in places:
            await self._take_block(channel, offer.names[place], room)
        await channel.send(Kept())

    async def _take_block(self, channel: Channel, name: bytes, room: Bytes) -> None:
        async with asyncio.timeout(limits.KV_COPIES_SILENCE_S):
            block = await channel.receive()
        if not isinstance(block, Block) or block.name != name or block.size not in (0, room.nbytes):
            raise WrongBlockError("a block that was not asked for")
        if not block.size:
            return
        await channel.receive_into(room, limits.KV_COPIES_SILENCE_S)
        if checksum(room) != block.checksum:
            raise WrongBlockError("a block was damaged on its way")
        if not await asyncio.wrap_future(self._tier.keep(StoredBlock(name, room, block.checksum))):
            raise WrongBlockError("the disk takes no blocks now")
        self.num_kept += 1
