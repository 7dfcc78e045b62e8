"""The part of a log on the bus that one gateway may fill, so that each key can keep something in the log.

A full log drops its oldest messages, whoever has stored them. So that it is not full, each gateway fills only a part of
it, and when that part is full, drops the oldest entry of the key that has most in it (`Kept`).

A gateway counts what it has written itself since its start. The log also has what ended gateways have written, until it
is too old; with file storage also what this gateway wrote before its last start. So the log is divided as if there were
one gateway more: there is room for all that one ended gateway has left. Only if several end that had filled their parts
can the log drop its oldest messages after all, which are mostly theirs. An entry that another gateway has replaced
counts until it is dropped or too old, so a gateway never has more in the log than it counts.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from antiphon.shared import limits
from antiphon.shared.actors.background import Background
from antiphon.shared.actors.fair_work import leaves_room
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.durable_log import DurableLog, LogConfig, LogUnavailableError, Storage
from antiphon.shared.structures.kept import Kept

log = logging.getLogger(__name__)
_OVERHEAD_BYTES = 128
"""Size of a message besides its payload, at most: its subject, its headers, and what the server adds."""
_LEAVING = 1 / 8
"""Share of a gateway's part for entries that must go and are not dropped yet. With more, writers wait."""
IsOwn = Callable[[bytes], bool]
"""Whether this gateway has written a message."""


class _Entry(NamedTuple):
    """What was written to a subject: its size, the sequence number of the last message (0: unknown), and when."""

    size: int
    last: int
    at: float


class LogPart:
    """What one gateway has in a log. An entry is all that it has written to one subject.

    Methods raise LogUnavailableError.
    """

    def __init__(self, logs: "GatewayLogs", config: LogConfig, is_own: IsOwn) -> None:
        self.log = logs.log(config)
        self._config, self._is_own = config, is_own
        self._num_gateways, self._now = logs.num_gateways, logs.host.clock.monotonic
        self._kept = Kept(0)
        self._divided_at = -math.inf
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """By subject, those that were written last at the end."""
        self._leaving: OrderedDict[str, _Entry] = OrderedDict()
        """Entries that must go and are not dropped yet, by subject."""
        self._leaving_bytes = 0
        self._dropping = asyncio.Lock()
        self._background = Background("an entry of a log could not be dropped")

    async def admit(self, key: str, subject: str, payload: bytes, *, in_use: bool = False) -> bool:
        """Counts a new entry, which is about to be written. Returns False if its key may not have it.

        `in_use`: it will be in use. Of such entries, which cannot be dropped, a key may have at most as much as stays
        free for others.
        """
        self._divide()
        size, used = len(payload) + _OVERHEAD_BYTES, self._kept.used
        if in_use and not leaves_room(key, used[key] + size, used.total() + size, self._kept.max_bytes):
            return False
        await self._count(key, subject, size, 0)
        return subject in self._kept

    async def append(self, key: str, subject: str, payload: bytes, *, last: int | None = None) -> int | None:
        """Appends to an entry, or replaces it if the log has one message for each subject. See `DurableLog.append`."""
        sequence = await self.log.append(subject, payload, last=last)
        if sequence is not None:
            self._divide()
            before = self._entries.get(subject) if self._config.per_subject != 1 else None
            size = len(payload) + _OVERHEAD_BYTES + (0 if before is None else before.size)
            await self._count(key, subject, size, sequence)
        return sequence

    async def remove(self, subject: str) -> None:
        """Removes an entry, whichever gateway has written it."""
        self._kept.remove(subject)
        self._entries.pop(subject, None)
        await self.log.clear(subject)

    def use(self, subject: str) -> None:
        """An entry is not dropped from now on until `release`. It need not exist yet."""
        self._kept.use(subject)

    def release(self, subject: str) -> None:
        """See `use`."""
        self._kept.release(subject)

    def _divide(self) -> None:
        """Forgets entries that are too old, and looks now and then how many gateways share the log."""
        now = self._now()
        while self._entries and now - next(iter(self._entries.values())).at > self._config.max_age_s:
            self._kept.remove(self._entries.popitem(last=False)[0])
        if now - self._divided_at > 1.0:
            self._divided_at = now
            part = self._config.max_bytes // (max(1, self._num_gateways()) + 1)
            self._kept.max_bytes = int(part * (1 - _LEAVING))

    async def _count(self, key: str, subject: str, size: int, last: int) -> None:
        """Counts an entry. Returns when there is room for it: usually at once, while others are dropped."""
        self._entries[subject] = _Entry(size, last, self._now())
        self._entries.move_to_end(subject)
        for gone in self._kept.put(key, subject, size):
            entry = self._entries.pop(gone)
            if entry.last or gone != subject:  # else it is a new one that is not admitted
                self._leave(gone, entry)
        if self._leaving_bytes > self._kept.max_bytes * _LEAVING:
            await self._drop_all()
        elif self._leaving and not self._dropping.locked():
            self._background.spawn(self._drop_all())

    def _leave(self, subject: str, entry: _Entry | None) -> None:
        """Notes that an entry must go; None: that it has gone."""
        former = self._leaving.pop(subject, None)
        self._leaving_bytes -= 0 if former is None else former.size
        if entry is not None:
            self._leaving[subject] = entry
            self._leaving_bytes += entry.size

    async def _drop_all(self) -> None:
        async with self._dropping:
            try:
                while self._leaving:
                    subject, entry = next(iter(self._leaving.items()))
                    await self._drop(subject, entry.last)
                    if self._leaving.get(subject) is entry:
                        self._leave(subject, None)
            except LogUnavailableError as error:
                log.warning("the log %s has more of this gateway than it should: %s", self._config.name, error)

    async def _drop(self, subject: str, last: int) -> None:
        """Drops an entry unless somebody has written to it since."""
        if not last:
            found = await self.log.last(subject)
            if found is None or subject in self._kept or not self._is_own(found.payload):
                return
            last = found.sequence
        await self.log.clear(subject, last=last)


def _one() -> int:
    return 1


def _any(payload: bytes) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class GatewayLogs:
    """What the logs of one gateway have in common. `num_gateways` returns the number of gateways that share them."""

    host: Host
    storage: Storage
    num_gateways: Callable[[], int] = _one

    def log(self, config: LogConfig) -> DurableLog:
        """Returns a log as a whole."""
        return self.host.transport.durable_log(config, timeout_s=limits.STREAM_STORE_TIMEOUT_S)

    def part(self, config: LogConfig, is_own: IsOwn = _any) -> LogPart:
        """Returns this gateway's part of a log."""
        return LogPart(self, config, is_own)
