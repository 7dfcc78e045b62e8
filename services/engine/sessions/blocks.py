"""Reads and writes whole blocks in the store of an engine, as gateways ask for them: part by part."""

import asyncio
from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from antiphon.services.engine.kv.disk.tier import StoredBlock
from antiphon.services.engine.kv.pieces import checksum
from antiphon.shared import limits
from antiphon.shared.messages import BlockPiece, BlocksFound, BlockTaken, FindBlocks, ReadBlock, WriteBlock

OTHER_FORM = "its blocks have another form"


class Tier(Container[bytes], Protocol):
    """What is needed of `kv.disk.tier.DiskTier`."""

    block_bytes: int
    identity: str

    async def read(self, names: tuple[bytes, ...]) -> list[StoredBlock]:
        """Returns those of the blocks that are there and undamaged."""
        ...

    def keep(self, block: StoredBlock) -> "Future[bool]":
        """Queues a block to be written, whose data must not change until the result is there."""
        ...


class SessionBlocks:
    """The blocks of one engine for sessions. To be used by one task.

    Holds the block that was read last, and at most `limits.SESSION_WRITES_MAX` that are being received.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._read: StoredBlock | None = None
        self._arriving: OrderedDict[bytes, bytearray] = OrderedDict()

    def find(self, query: FindBlocks) -> BlocksFound:
        """Returns which blocks are there, each followed by those of windows and states that belong to it."""
        found = list[bytes]()
        for name in query.names[: limits.SESSION_NAMES_MAX]:
            if name in self._tier:
                found += [name, *self._beside(name)]
        return BlocksFound(self._tier.identity, self._tier.block_bytes, tuple(found))

    async def read(self, query: ReadBlock) -> BlockPiece:
        """Returns a part of a block; without data if it is not there any more."""
        if self._read is None or self._read.name != query.name:
            found = await self._tier.read((query.name,))
            self._read = found[0] if found else None
        if self._read is None:
            return BlockPiece(0)
        whole = self._read.data
        end = query.offset + limits.SESSION_PIECE_BYTES
        piece = BlockPiece(whole.size, whole[query.offset : end].tobytes())
        if end >= whole.size:
            self._read = None  # large, and not asked for again
        return piece

    async def write(self, part: WriteBlock) -> BlockTaken:
        """Takes a part of a block, and writes the block with its last part. Parts come in their order."""
        if part.form != self._tier.identity or part.size != self._tier.block_bytes:
            return BlockTaken(OTHER_FORM)
        if part.offset == 0:
            self._arriving[part.name] = bytearray()
            while len(self._arriving) > limits.SESSION_WRITES_MAX:
                self._arriving.popitem(last=False)
        data = self._arriving.get(part.name)
        if data is None or len(data) != part.offset or not 0 < len(part.data) <= part.size - part.offset:
            self._arriving.pop(part.name, None)
            return BlockTaken("a part of a block is missing")
        data += part.data
        if len(data) < part.size:
            return BlockTaken()
        del self._arriving[part.name]
        whole = np.frombuffer(bytes(data), dtype=np.uint8)
        block = StoredBlock(part.name, whole, await asyncio.to_thread(checksum, whole))
        is_written = await asyncio.wrap_future(self._tier.keep(block))
        return BlockTaken("" if is_written else "the disk is full, fails, or has no room for it")

    def _beside(self, name: bytes) -> list[bytes]:
        found = list[bytes]()
        for number in range(limits.SESSION_SUFFIXES_MAX):
            beside = name + number.to_bytes(limits.SESSION_SUFFIX_BYTES, "little")
            if beside not in self._tier:
                break
            found.append(beside)
        return found
