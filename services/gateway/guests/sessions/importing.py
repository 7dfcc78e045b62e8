"""Reads the file of a session, and passes its blocks on to engines whose blocks have the same form.

Nothing is used before it is authenticated. A block is written as soon as it has arrived, so a file that turns out to be
damaged later may have left whole blocks; these are named under the salt of a session that then does not exist.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from antiphon.services.gateway.guests.replay.checks import check_record
from antiphon.services.gateway.guests.replay.rerun import check_repeatable
from antiphon.services.gateway.guests.sessions.blocks import EngineBlocks, NoAnswerError, Stored
from antiphon.services.gateway.guests.sessions.exporting import root
from antiphon.services.gateway.guests.sessions.session import Moved, Session, as_raw, block_names
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.errors import ServiceError
from antiphon.shared.recorded_request import RecordedContent, changed
from antiphon.shared.session_file.frames import FileBlock, FrameReader, SessionHead, content_of
from antiphon.shared.session_file.sealing import HEADER_BYTES, Header, Opener, wrong_file

log = logging.getLogger(__name__)
NO_KV = "the file has none: the engines that computed it keep no KV on a disk (--kv-disk-gb)"
NO_DISK = "no engine of the model here keeps KV on a disk (--kv-disk-gb)"
OTHER_FORM = "the engines here have another precision, backend, processor or build"


class Importer:
    """Reads one file. `models`: those that the key may use here."""

    def __init__(self, session_id: str, key_name: str, models: Sequence[ModelCard], blocks: EngineBlocks) -> None:
        self._session_id, self._key_name, self._models, self._blocks = session_id, key_name, models, blocks
        self._frames = FrameReader()
        self._session: Session | None = None
        self._names: list[bytes] = []
        self._stores: list[Stored] = []
        self._num_blocks = self._num_taken = 0
        self._reason = NO_KV

    async def read(self, pieces: AsyncIterator[bytes], passphrase: bytes) -> Session:
        """Returns the session in a file. Raises ServiceError that says why the file is refused."""
        first = bytearray()
        opener: Opener | None = None
        async for piece in pieces:
            first += piece
            if opener is None and len(first) < HEADER_BYTES:
                continue
            if opener is None:
                opener = await asyncio.to_thread(Opener, passphrase, Header(bytes(first)))
                del first[:HEADER_BYTES]
            plain = opener.feed(bytes(first))
            first.clear()
            for found in self._frames.feed(plain):
                await self._take(found)
        if opener is None:
            Header(bytes(first))  # says what is wrong
            raise wrong_file("it is truncated")
        opener.finish()
        self._frames.finish()
        return self._whole()

    async def _take(self, found: SessionHead | FileBlock) -> None:
        if isinstance(found, SessionHead):
            await self._begin(found)
        else:
            self._num_blocks += 1
            await self._write(found)

    async def _begin(self, head: SessionHead) -> None:
        content = content_of(head)
        card = card_for(head, content, self._models)
        content = changed(content, model=card.name)
        check_repeatable(content, card)
        check_record(content, card)
        self._session = Session(
            id=self._session_id,
            created=time.time(),
            key_name=self._key_name,
            content=as_raw(content),
            weights=card.facts.digest,
            salt=f"session {secrets.token_hex(16)}",
            imported=Moved(in_file=0, taken=0),
        )
        if not head.num_blocks or head.block_size < 1:
            return
        here = await self._blocks.stores(card.served_by)
        self._stores = [one for one in here if (one.form, one.block_size) == (head.kv_form, head.block_size)]
        self._reason = "" if self._stores else OTHER_FORM if here else NO_DISK
        if self._stores:
            self._names = block_names(content, root(self._session, content), head.block_size)

    async def _write(self, block: FileBlock) -> None:
        if not self._stores:
            return
        if block.place >= len(self._names):
            raise wrong_file("it has a block beyond the end of its tokens")
        name, taken = self._names[block.place] + block.suffix, False
        for store in list(self._stores):
            try:
                reason = await self._blocks.write(store, name, block.data)
            except NoAnswerError as error:
                reason = str(error)
            if reason:
                log.warning("%s does not take the KV of %s: %s", store.engine.id, self._session_id, reason)
                self._reason = f"{store.engine.id}: {reason}"
                self._stores.remove(store)
            taken = taken or not reason
        self._num_taken += taken

    def _whole(self) -> Session:
        session = self._session
        assert session is not None, "the reader of frames requires a head"
        reason = self._reason if self._num_taken < self._num_blocks or not self._num_blocks else ""
        return Session(
            id=session.id,
            created=session.created,
            key_name=session.key_name,
            content=session.content,
            weights=session.weights,
            salt=session.salt,
            imported=Moved(in_file=self._num_blocks, taken=self._num_taken, reason=reason),
        )


def card_for(head: SessionHead, content: RecordedContent, models: Sequence[ModelCard]) -> ModelCard:
    """Returns the model here that a session belongs to, by its files; of several, the one with the same name.

    Raises ServiceError if there is none.
    """
    same = [
        card
        for card in models
        if card.adapter_version == content.adapter_version
        and (card.facts.digest == head.weights if head.weights else card.name == content.model)
    ]
    found = next((card for card in same if card.name == content.model), same[0] if same else None)
    if found is None:
        here = ", ".join(sorted(card.name for card in models)) or "none"
        message = (
            f"The session file is of another model: '{content.model}', whose files have the hash "
            f"{head.weights or 'unknown'}. The models here are: {here}. Serve the same files to import it."
        )
        if content.adapter_version:
            message += f" It also needs the adapter with the version {content.adapter_version}."
        raise ServiceError("invalid_value", message, param="file")
    return found
