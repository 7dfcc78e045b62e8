"""An LRU cache with a limit in bytes."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """Values by key, up to `bytes_max` bytes; the newest value is always kept."""

    def __init__(self, bytes_max: int) -> None:
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._bytes_max = bytes_max
        self.num_bytes = 0

    def get(self, key: bytes) -> T | None:
        """Returns the value with this key; None if it is not in the cache."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: bytes, value: T, num_bytes: int) -> None:
        """Stores a value of this size, and evicts the least recently used ones."""
        if key in self._kept:
            return
        self._kept[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._bytes_max and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.num_bytes -= dropped
