"""Answers gateways that export or import sessions. It has its own mailbox, so that a disk delays no sequence."""

from antiphon.services.engine.sessions.blocks import SessionBlocks, Tier
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.messages import BlockPiece, BlocksFound, BlockTaken, FindBlocks, ReadBlock, WriteBlock


class SessionActor(Actor):
    """The stored blocks of one engine on the bus."""

    def __init__(self, host: Host, tier: Tier) -> None:
        super().__init__(f"stored blocks of {host.id}", host.transport)
        self._host, self._blocks = host, SessionBlocks(tier)

    async def listen(self) -> None:
        """Subscribes to the engine's subject of stored blocks."""
        subject = self._host.subjects.engine_stored(self._host.id, self._host.instance_id)
        await self.bind(subject, FindBlocks, ReadBlock, WriteBlock)

    @handles(FindBlocks)
    def on_find(self, envelope: Envelope[FindBlocks]) -> BlocksFound:
        """Tells which blocks are on the disk."""
        return self._blocks.find(envelope.message)

    @handles(ReadBlock)
    async def on_read(self, envelope: Envelope[ReadBlock]) -> BlockPiece:
        """Sends a part of a block."""
        return await self._blocks.read(envelope.message)

    @handles(WriteBlock)
    async def on_write(self, envelope: Envelope[WriteBlock]) -> BlockTaken:
        """Takes a part of a block, and writes the block with its last part."""
        return await self._blocks.write(envelope.message)
