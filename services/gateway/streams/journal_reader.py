"""Reads the journals of other gateways for streams that are taken over: one read for all streams of a gateway.

When a gateway dies, the clients of all its streams reconnect at the same time, and each message of its journal has
tokens of many of them. A read for each stream would read the whole journal once for each of them.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from services.gateway.streams.record import JournalEntry, decoded_entries
from shared.actors.background import Background
from shared.actors.durable_log import DurableLog


@dataclass(slots=True)
class _Claim:
    """A stream whose entries are wanted from the sequence number `first` on."""

    request_id: str
    first: int
    entries: "asyncio.Future[list[JournalEntry]]"


class JournalReader:
    """Reads journals from `log`. Streams that ask while a read runs share the next one, so none gets an older state."""

    def __init__(self, log: DurableLog) -> None:
        self._log = log
        self._waiting: dict[str, list[_Claim]] = {}
        """By subject: the streams for the next read. A subject is in it while it is read."""
        self._background = Background("a journal could not be read")

    async def entries(self, subject: str, first: int, request_id: str) -> list[JournalEntry]:
        """Returns the entries of one stream in a journal, in order. Raises LogUnavailableError."""
        claim = _Claim(request_id, first, asyncio.get_running_loop().create_future())
        if subject in self._waiting:
            self._waiting[subject].append(claim)
        else:
            self._waiting[subject] = [claim]
            self._background.spawn(self._read(subject))
        return await claim.entries

    async def _read(self, subject: str) -> None:
        while claims := self._waiting[subject]:
            self._waiting[subject] = []
            try:
                found = await self._entries(subject, claims)
            except Exception as error:  # the callers raise it
                for claim in claims:
                    if not claim.entries.done():
                        claim.entries.set_exception(error)
                continue
            for claim in claims:
                if not claim.entries.done():  # its client may have gone
                    logged = found[claim.request_id]
                    claim.entries.set_result([entry for sequence, entry in logged if sequence >= claim.first])
        del self._waiting[subject]

    async def _entries(self, subject: str, claims: list[_Claim]) -> dict[str, list[tuple[int, JournalEntry]]]:
        """Returns the entries of each stream with the sequence numbers of their messages."""
        wanted = {claim.request_id for claim in claims}
        found: dict[str, list[tuple[int, JournalEntry]]] = defaultdict(list)
        for logged in await self._log.all_following(subject, min(claim.first for claim in claims)):
            for entry in decoded_entries(logged.payload):
                if entry.request_id in wanted:
                    found[entry.request_id].append((logged.sequence, entry))
        return found
