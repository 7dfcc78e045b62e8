"""Asks engines for blocks of KV on their disks, and gives them blocks. One message at a time, so memory is bounded."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.blocks import HASH_BYTES
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    BlockPiece,
    BlocksFound,
    BlockTaken,
    EngineStatus,
    ErrorReply,
    FindBlocks,
    Heartbeat,
    Message,
    ReadBlock,
    WriteBlock,
)

log = logging.getLogger(__name__)
_REPLIES = Decoder([BlocksFound, BlockPiece, BlockTaken, ErrorReply])


class NoAnswerError(Exception):
    """An engine did not answer about blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Blocks on the disk of an engine. `names`: each followed by those that belong to it."""

    engine: Heartbeat
    form: str
    block_size: int
    block_bytes: int
    names: tuple[bytes, ...] = ()


class EngineBlocks(Guest):
    """The blocks on the disks of all engines."""

    def __init__(self, gateway: GatewayActor) -> None:
        self._host: Host = gateway.host
        self._engines = gateway.engines

    async def stores(self, model: str) -> list[Stored]:
        """Returns an engine for each directory of blocks of a model, without names. Silent engines are left out.

        `model`: its name on the bus.
        """
        found: dict[tuple[str, str], Stored] = {}
        for beat in self._engines():
            status = beat.status
            if not isinstance(status, EngineStatus) or status.model != model or not status.kv_store:
                continue
            try:
                reply = await self._find(beat, ())
            except NoAnswerError as error:
                log.warning("%s", error)
                continue
            one = Stored(engine=beat, form=reply.form, block_size=status.block_size, block_bytes=reply.block_bytes)
            found.setdefault((status.kv_store, reply.form), one)
        return list(found.values())

    async def having(self, store: Stored, names: Sequence[bytes]) -> Stored:
        """Returns a store with those of the names that it has. Raises NoAnswerError."""
        there = list[bytes]()
        for first in range(0, len(names), limits.SESSION_NAMES_MAX):
            part = tuple(names[first : first + limits.SESSION_NAMES_MAX])
            there += (await self._find(store.engine, part)).names
        return Stored(
            engine=store.engine,
            form=store.form,
            block_size=store.block_size,
            block_bytes=store.block_bytes,
            names=tuple(there),
        )

    async def read(self, store: Stored, name: bytes) -> bytes:
        """Returns a block; b"" if it is not there any more. Raises NoAnswerError."""
        data = bytearray()
        while True:
            piece = await self._ask(store.engine, ReadBlock(name, len(data)))
            assert isinstance(piece, BlockPiece)
            if piece.size != store.block_bytes or not piece.data:
                return b""
            data += piece.data
            if len(data) >= piece.size:
                return bytes(data)

    async def write(self, store: Stored, name: bytes, data: bytes) -> str:
        """Writes a block. Returns "", or why the engine does not take it. Raises NoAnswerError."""
        for offset in range(0, len(data), limits.SESSION_PIECE_BYTES):
            piece = data[offset : offset + limits.SESSION_PIECE_BYTES]
            part = WriteBlock(form=store.form, name=name, size=len(data), offset=offset, data=piece)
            taken = await self._ask(store.engine, part)
            assert isinstance(taken, BlockTaken)
            if taken.refusal:
                return taken.refusal
        return ""

    async def _find(self, engine: Heartbeat, names: tuple[bytes, ...]) -> BlocksFound:
        reply = await self._ask(engine, FindBlocks(names))
        assert isinstance(reply, BlocksFound)
        return reply

    async def _ask(self, engine: Heartbeat, message: Message) -> Message:
        subject = self._host.subjects.engine_stored(engine.id, engine.instance_id)
        try:
            return await ask(self._host.transport, subject, message, _REPLIES, timeout_s=limits.SESSION_BLOCK_S)
        except (NoRespondersError, RequestTimeoutError, ServiceError) as error:
            raise NoAnswerError(f"{engine.id} did not answer about blocks of KV: {error!r}") from error


def parts_of(name: bytes) -> tuple[bytes, bytes]:
    """Returns the name of a block's place, and what tells the blocks of that place apart."""
    return name[:HASH_BYTES], name[HASH_BYTES:]
