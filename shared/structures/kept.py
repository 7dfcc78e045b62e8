"""What is kept in a place with room for some bytes, if the one that fills it most is the first to lose something."""

from collections import Counter, OrderedDict


class Kept:
    """Which entries are kept in a place of `max_bytes` bytes, and which ones must go. It has ids and sizes only.

    Each entry belongs to a key (of an API, or any other name of who fills the place).
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.used: Counter[str] = Counter()
        """For each key the size of its entries in use."""
        self._entries: dict[str, tuple[str, int]] = {}
        """Key and size of each entry, by id."""
        self._order: dict[str, OrderedDict[str, None]] = {}
        """For each key the ids of its entries that may go. The least recently used one is the first."""
        self._in_use: set[str] = set()
        self._bytes: Counter[str] = Counter()
        """For each key the size of its entries."""

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._entries

    def put(self, key: str, entry_id: str, size: int) -> list[str]:
        """Adds an entry of a key, or replaces it. Returns the ids of the entries that must go.

        They are removed here. The entry itself is among them if it is larger than its key's entries may be.
        """
        self.remove(entry_id)
        self._entries[entry_id] = key, size
        self._bytes[key] += size
        self.num_bytes += size
        self._put_in(entry_id)
        return self.shrink()

    def shrink(self) -> list[str]:
        """Removes entries until the rest fits into `max_bytes`: always the oldest one of the key that has most.

        Returns their ids. Entries in use count, but are not removed.
        """
        removed: list[str] = []
        while self.num_bytes > self.max_bytes and self._order:
            largest = max(self._order, key=self._bytes.__getitem__)
            oldest = next(iter(self._order[largest]))
            self.remove(oldest)
            removed.append(oldest)
        return removed

    def touch(self, entry_id: str) -> None:
        """Makes an entry the most recently used one of its key. Does nothing if it is not kept."""
        if entry_id in self._entries:
            self._take_out(entry_id)
            self._put_in(entry_id)

    def use(self, entry_id: str) -> None:
        """From now until `release`, the entry with this id is in use. It need not have been put yet."""
        self._take_out(entry_id)
        self._in_use.add(entry_id)
        self._put_in(entry_id)

    def release(self, entry_id: str) -> None:
        """An entry is in use no more, and is the most recently used one of its key."""
        self._take_out(entry_id)
        self._in_use.discard(entry_id)
        self._put_in(entry_id)

    def remove(self, entry_id: str) -> bool:
        """Removes an entry. Returns whether it was kept."""
        if entry_id not in self._entries:
            return False
        self._take_out(entry_id)
        key, size = self._entries.pop(entry_id)
        self.num_bytes -= size
        _subtract(self._bytes, key, size)
        return True

    def _put_in(self, entry_id: str) -> None:
        """Adds an entry, if it is kept, to those in use or to those that may go."""
        if entry_id in self._entries:
            key, size = self._entries[entry_id]
            if entry_id in self._in_use:
                self.used[key] += size
            else:
                self._order.setdefault(key, OrderedDict())[entry_id] = None

    def _take_out(self, entry_id: str) -> None:
        """Undoes `_put_in`."""
        if entry_id in self._entries:
            key, size = self._entries[entry_id]
            if entry_id in self._in_use:
                _subtract(self.used, key, size)
            else:
                del self._order[key][entry_id]
                if not self._order[key]:
                    del self._order[key]


def _subtract(amounts: Counter[str], key: str, amount: int) -> None:
    amounts[key] -= amount
    if not amounts[key]:
        del amounts[key]
