"""Writes the file of a session, with the blocks of KV that an engine has on its disk."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from antiphon.services.gateway.guests.sessions.blocks import EngineBlocks, NoAnswerError, Stored, parts_of
from antiphon.services.gateway.guests.sessions.session import Session, block_names, root_of
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.blocks import adapter_salt, root_hash
from antiphon.shared.recorded_request import RecordedContent
from antiphon.shared.session_file.frames import FileBlock, SessionHead, pack_block, pack_head
from antiphon.shared.session_file.sealing import Sealer

log = logging.getLogger(__name__)


def root(session: Session, content: RecordedContent) -> bytes:
    """Returns the parent of the first blocks of a session here; b"" if it is not known."""
    if session.imported is None:
        return root_of(content)
    salt = session.salt.encode()
    return root_hash(adapter_salt(salt, content.adapter_version) if content.adapter_version else salt)


async def exported(session: Session, card: ModelCard, sealer: Sealer, blocks: EngineBlocks) -> AsyncIterator[bytes]:
    """Yields the file. If an engine ends meanwhile, the file has the blocks before: it is a whole one nevertheless."""
    content = session.recorded()
    names, store = await _stored(content, root(session, content), card, blocks)
    head = SessionHead(created=time.time(), content=session.content, weights=session.weights)
    if store is not None:
        head = SessionHead(
            created=head.created,
            content=session.content,
            weights=session.weights,
            kv_form=store.form,
            block_size=store.block_size,
            num_blocks=len(store.names),
        )
    yield sealer.header + sealer.feed(pack_head(head))
    for name in () if store is None else store.names:
        assert store is not None
        try:
            data = await blocks.read(store, name)
        except NoAnswerError as error:
            log.warning("the file of %s has not all its KV: %s", session.id, error)
            break
        place, suffix = parts_of(name)
        if data:
            yield await asyncio.to_thread(sealer.feed, pack_block(FileBlock(names[place], suffix, data)))
    yield sealer.finish()


async def _stored(
    content: RecordedContent, first: bytes, card: ModelCard, blocks: EngineBlocks
) -> tuple[dict[bytes, int], Stored | None]:
    """Returns the numbers of the blocks' places, and the store that has most of the blocks; None if none has any."""
    best: Stored | None = None
    numbers: dict[bytes, int] = {}
    for store in await blocks.stores(card.served_by) if first else ():
        names = block_names(content, first, store.block_size)
        try:
            found = await blocks.having(store, names)
        except NoAnswerError as error:
            log.warning("%s", error)
            continue
        if found.names and (best is None or len(found.names) > len(best.names)):
            best, numbers = found, {name: number for number, name in enumerate(names)}
    return numbers, best
