"""Reads the journals of other gateways for streams that are taken over: one read for all streams of a gateway.

When a gateway dies, the clients of all its streams reconnect within tenths of a second, and each message of its journal
has tokens of many streams. If each stream were read separately, the whole journal would be read once for each stream.
So what was read is kept for some seconds, and later reads begin after it.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from antiphon.services.gateway.guests.resume.record import JournalEntry, decoded_entries
from antiphon.shared.actors.background import Background
from antiphon.shared.bus.durable_log import DurableLog

KEPT_S = 5.0
"""Time for which what was read of a journal is kept for further streams, seconds."""


@dataclass(slots=True)
class _Claim:
    """A stream whose entries are wanted from the sequence number `first` on."""

    request_id: str
    first: int
    entries: "asyncio.Future[list[JournalEntry]]"


@dataclass(slots=True)
class _Journal:
    """What was read of a journal: entries from sequence number `first` on, by stream, with their sequence numbers."""

    first: int
    next: int
    """Sequence number from which on nothing was read yet."""
    entries: dict[str, list[tuple[int, JournalEntry]]] = field(
        default_factory=lambda: defaultdict[str, list[tuple[int, JournalEntry]]](list)
    )
    forgetting: asyncio.TimerHandle | None = None


class JournalReader:
    """Reads journals from `log`. Streams that ask while a read runs share the next one, so none gets an older state."""

    def __init__(self, log: DurableLog) -> None:
        self._log = log
        self._waiting: dict[str, list[_Claim]] = {}
        """By subject: the streams for the next read. A subject is in it while it is read."""
        self._journals: dict[str, _Journal] = {}
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
                journal = await self._known_to(subject, min(claim.first for claim in claims))
            except Exception as error:  # the callers raise it
                for claim in claims:
                    if not claim.entries.done():
                        claim.entries.set_exception(error)
                continue
            for claim in claims:
                if not claim.entries.done():  # its client may have gone
                    logged = journal.entries.get(claim.request_id, [])
                    claim.entries.set_result([entry for sequence, entry in logged if sequence >= claim.first])
        del self._waiting[subject]

    async def _known_to(self, subject: str, first: int) -> _Journal:
        """Returns a journal from `first` on, read up to its present end."""
        journal = self._journals.get(subject)
        if journal is None or first < journal.first:
            journal = self._journals[subject] = _Journal(first, first)
        for logged in await self._log.all_following(subject, journal.next):
            for entry in decoded_entries(logged.payload):
                journal.entries[entry.request_id].append((logged.sequence, entry))
            journal.next = logged.sequence + 1
        if journal.forgetting is not None:
            journal.forgetting.cancel()
        journal.forgetting = asyncio.get_running_loop().call_later(KEPT_S, self._journals.pop, subject, None)
        return journal
