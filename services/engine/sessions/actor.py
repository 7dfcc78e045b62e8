"""Answers gateways that export or import sessions. It has its own mailbox, so that a disk delays no sequence."""

import asyncio

from antiphon.services.engine.sessions.blocks import SessionBlocks, Tier
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import BlockPiece, BlocksFound, BlockTaken, FindBlocks, ReadBlock, WriteBlock


class SessionActor(Actor):
    """The stored blocks of one engine on the bus."""

    def __init__(self, host: Host, tier: Tier) -> None:
        super().__init__(f"stored blocks of {host.id}", host.transport)
        self._host = host
        self._blocks: SessionBlocks | None = SessionBlocks(tier)
        """None while the engine sleeps."""
        self._using = asyncio.Lock()

    async def listen(self) -> None:
        """Subscribes to the engine's subject of stored blocks."""
        subject = self._host.subjects.engine_stored(self._host.id, self._host.instance_id)
        await self.bind(subject, FindBlocks, ReadBlock, WriteBlock)

    async def sleep(self) -> None:
        """The engine falls asleep, and its store is closed. Waits for the block that is read or written now."""
        async with self._using:
            self._blocks = None

    def wake(self, tier: Tier) -> None:
        """The engine has woken with this store."""
        self._blocks = SessionBlocks(tier)

    @handles(FindBlocks)
    def on_find(self, envelope: Envelope[FindBlocks]) -> BlocksFound:
        """Tells which blocks are on the disk."""
        return self._awake().find(envelope.message)

    @handles(ReadBlock)
    async def on_read(self, envelope: Envelope[ReadBlock]) -> BlockPiece:
        """Sends a part of a block."""
        async with self._using:
            return await self._awake().read(envelope.message)

    @handles(WriteBlock)
    async def on_write(self, envelope: Envelope[WriteBlock]) -> BlockTaken:
        """Takes a part of a block, and writes the block with its last part."""
        async with self._using:
            return await self._awake().write(envelope.message)

    def _awake(self) -> SessionBlocks:
        if self._blocks is None:
            raise ServiceError(
                "no_engine", f"The engine {self._host.id} sleeps, and its stored blocks with it: wake it."
            )
        return self._blocks
