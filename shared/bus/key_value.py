"""The interface to a key-value store that all processes on the bus share. For small state that may be lost.

Implemented by `nats_key_value` on JetStream; tests have an in-process store. One test suite checks both. A store has no
locks: a writer reads an entry, and writes it only if it has not changed since (`replace`, compare-and-set). Entries
that are not written for the store's TTL expire; all entries may be lost when a server restarts.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key. `revision` is above 0 and changes with every write."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """Configuration of a store. `ttl_s`: time after its last write at which an entry expires."""

    name: str
    ttl_s: float


class StoreUnavailableError(Exception):
    """The store did not answer in time: the bus is disconnected, has no JetStream, or denies access."""


class KeyValueStore(Protocol):
    """A store of one name. Keys have letters, digits and `-_.=/`, without a dot at either end."""

    async def get(self, key: str) -> Entry | None:
        """Returns the entry of a key; None if there is none. Raises StoreUnavailableError."""
        ...

    async def replace(self, key: str, value: bytes, revision: int) -> int | None:
        """Writes a value if the entry still has this revision (0: if there is no entry). Returns the new revision.

        Returns None, and writes nothing, if another process has written. Raises StoreUnavailableError; the value may
        have been written nevertheless.
        """
        ...
