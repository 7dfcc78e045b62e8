"""The durable log of the in-process bus. Made by `MemoryTransport`. It forgets nothing by age or size."""

import asyncio
import fnmatch
from typing import TYPE_CHECKING, NamedTuple

from antiphon.shared.bus.durable_log import LogConfig, Logged, LogUnavailableError

if TYPE_CHECKING:
    from tests.support.memory_connection import MemoryTransport


class LogEntry(NamedTuple):
    """A message; its sequence number is its place in the log. Empty payload: only the newest of its subject is kept."""

    subject: str
    payload: bytes | None


class MemoryDurableLog:
    """Implements `durable_log.DurableLog`. `entries` belong to the bus."""

    def __init__(
        self, transport: "MemoryTransport", entries: list[LogEntry], config: LogConfig, timeout_s: float
    ) -> None:
        self._transport, self._entries, self._config, self._timeout_s = transport, entries, config, timeout_s

    async def open(self) -> None:
        """See DurableLog."""
        await self._reach()

    async def append(self, subject: str, payload: bytes, *, last: int | None = None) -> int | None:
        """See DurableLog."""
        await self._reach()
        newest = await self.last(subject)
        if last is not None and last != (newest.sequence if newest else 0):
            return None
        self.store(subject, payload)
        return len(self._entries)

    def store(self, subject: str, payload: bytes) -> None:
        """Stores a message, as the server does with all that is published to a subject of the log."""
        if self._config.per_subject == 1 and (former := self._kept(subject)):
            self._entries[former[-1].sequence - 1] = LogEntry(subject, None)
        self._entries.append(LogEntry(subject, payload))

    def captures(self, subject: str) -> bool:
        """Whether a subject is one of the log's."""
        return fnmatch.fnmatchcase(subject, self._config.subject)

    async def clear(self, subject: str, *, last: int | None = None) -> None:
        """See DurableLog."""
        former = self._kept(subject)
        if await self.append(subject, b"", last=last) is not None:
            for one in former:
                self._entries[one.sequence - 1] = LogEntry(subject, None)

    async def last(self, subject: str) -> Logged | None:
        """See DurableLog."""
        await self._reach()
        found = self._kept(subject)
        return found[-1] if found else None

    async def following(self, subject: str, sequence: int) -> Logged | None:
        """See DurableLog."""
        await self._reach()
        return next((one for one in self._kept(subject) if one.sequence >= sequence), None)

    async def all_following(self, subject: str, sequence: int, most: int = 0) -> list[Logged]:
        """See DurableLog."""
        await self._reach()
        return [one for one in self._kept(subject) if one.sequence >= sequence][: most or None]

    def _kept(self, subject: str) -> list[Logged]:
        numbered = enumerate(self._entries, start=1)
        return [
            Logged(number, one.payload)
            for number, one in numbered
            if one.payload is not None and fnmatch.fnmatchcase(one.subject, subject)
        ]

    async def _reach(self) -> None:
        if not self._transport.connected or not self._transport.bus.has_store:
            await asyncio.sleep(self._timeout_s)
            raise LogUnavailableError("the bus has no log")
