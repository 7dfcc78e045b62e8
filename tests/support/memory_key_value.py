"""The key-value store of the in-process bus, with the faults that a real one has. Made by `MemoryTransport`."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.shared.bus.key_value import Entry, StoreUnavailableError

if TYPE_CHECKING:
    from tests.support.memory_connection import MemoryTransport


@dataclass
class Bucket:
    """The entries of one store, with the time of their last write."""

    entries: dict[str, tuple[Entry, float]] = field(default_factory=dict[str, tuple[Entry, float]])
    revision: int = 0
    operations: int = 0
    """Number of operations that reached the store."""


class MemoryKeyValueStore:
    """Implements `key_value.KeyValueStore`."""

    def __init__(self, transport: "MemoryTransport", bucket: Bucket, ttl_s: float, timeout_s: float) -> None:
        self._transport, self._bucket, self._ttl_s, self._timeout_s = transport, bucket, ttl_s, timeout_s

    async def get(self, key: str) -> Entry | None:
        """See KeyValueStore."""
        await self._reach()
        entry = self._live(key)
        await self._travel()
        return entry

    async def replace(self, key: str, value: bytes, revision: int) -> int | None:
        """See KeyValueStore."""
        await self._reach()
        entry, bucket = self._live(key), self._bucket
        written = None
        if revision == (entry.revision if entry else 0):
            bucket.revision += 1
            written = bucket.revision
            bucket.entries[key] = Entry(value, written), self._now()
        await self._travel()
        return written

    def _live(self, key: str) -> Entry | None:
        entry, written_at = self._bucket.entries.get(key, (None, 0.0))
        return entry if self._now() - written_at < self._ttl_s else None

    async def _reach(self) -> None:
        await self._travel()
        if not self._transport.connected or not self._transport.bus.has_store:
            await asyncio.sleep(self._timeout_s)
            raise StoreUnavailableError("the bus has no store")
        self._bucket.operations += 1

    async def _travel(self) -> None:
        await asyncio.sleep(self._transport.bus.draw_delay_s())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
