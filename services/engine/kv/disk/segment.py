"""A segment: blocks appended by one engine, which others may read while it grows.

    NAME.kv     the bytes of the blocks, each from a multiple of 512 bytes on
    NAME.idx    an entry of 64 bytes for each block, written after its bytes

    entry       name (24 bytes, padded with zeros), its length, tokens, bytes of the block, offset, checksum of the
                block (`kv.pieces`), CRC-32 of the entry

Nothing is ever changed, and no write is waited for: after a power cut, entries and bytes may be missing, cut off or
full of zeros in any place. An entry whose CRC is wrong does not count, and the reader of a block compares its checksum.
So a damaged block is a missing one. The writer holds a lock on the index while it lives.
"""

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from antiphon.services.engine.kv.pieces import Bytes

_FIELDS = struct.Struct("<24sHHIQI")
_CRC = struct.Struct("<I")
ENTRY_BYTES = 64
_ALIGNED_BYTES = 512
_PADDING = bytes(ENTRY_BYTES - _FIELDS.size - _CRC.size)
DATA, INDEX = ".kv", ".idx"


class Entry(NamedTuple):
    """Where a block is in a segment: its first byte, its size in bytes, tokens and checksum."""

    name: bytes
    offset: int
    size: int
    num_tokens: int
    checksum: int


def pack_entry(entry: Entry) -> bytes:
    """Returns the 64 bytes of an entry."""
    fields = _FIELDS.pack(entry.name, len(entry.name), entry.num_tokens, entry.size, entry.offset, entry.checksum)
    return fields + _CRC.pack(zlib.crc32(fields)) + _PADDING


def unpack_entry(data: bytes | bytearray) -> Entry | None:
    """Returns the entry in 64 bytes; None if they are damaged."""
    fields = data[: _FIELDS.size]
    if _CRC.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(fields):
        return None
    name, length, num_tokens, size, offset, checksum = _FIELDS.unpack(fields)
    return Entry(name[:length], offset, size, num_tokens, checksum) if 0 < length <= len(name) and size else None


class Files(Protocol):
    """The system calls of segments, so that tests can let them fail."""

    def write(self, file: int, data: "bytes | memoryview", offset: int) -> None:
        """Writes all of `data` at `offset`. Raises OSError."""
        ...

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        """Reads as many bytes as there are, at most the size of the buffer. Returns their number. Raises OSError."""
        ...


class SystemFiles:
    """Those of the operating system."""

    def write(self, file: int, data: "bytes | memoryview", offset: int) -> None:
        """See `Files`."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(file, rest, offset)
            rest, offset = rest[written:], offset + written

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        """See `Files`."""
        count = 0
        while count < len(buffer):
            read = os.preadv(file, [buffer[count:]], offset + count)
            if not read:
                break
            count += read
        return count


SYSTEM = SystemFiles()


class Segment:
    """An open segment. `path` is without suffix. To be used by one thread, except `read`."""

    def __init__(self, path: Path, *, is_own: bool, files: Files = SYSTEM) -> None:
        """Opens a segment to read, or creates and locks one to append to (`is_own`). Raises OSError."""
        self.path, self._files = path, files
        self.grows = True
        """Whether its writer may still append. When it has ended, `entries` has returned all after one more call."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if is_own else os.O_RDONLY
        self._index = os.open(path.with_suffix(INDEX), flags | os.O_CLOEXEC, 0o600)
        try:
            if is_own:
                fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._data = os.open(path.with_suffix(DATA), flags | os.O_CLOEXEC, 0o600)
        except OSError:
            os.close(self._index)
            raise
        self.num_bytes = 0
        """Bytes of the blocks that were appended here."""
        self._num_entries = 0
        """Entries that were written, or that `entries` has passed."""
        self.names: list[bytes] = []
        """Of the blocks that the owner of this object has taken into its index."""
        self._lock = threading.Lock()
        self._num_readers, self._closed = 0, False

    @property
    def size(self) -> int:
        """Bytes of both files, as far as blocks were appended here."""
        return self.num_bytes + self._num_entries * ENTRY_BYTES

    def append(self, name: bytes, data: Bytes, num_tokens: int, checksum: int) -> Entry:
        """Writes a block and then its entry. Raises OSError; what was written of the block then does not count."""
        flat = data.reshape(-1).data
        entry = Entry(name, self.num_bytes, len(flat), num_tokens, checksum)
        self._files.write(self._data, flat, entry.offset)
        self._files.write(self._index, pack_entry(entry), self._num_entries * ENTRY_BYTES)
        self.num_bytes += -(-len(flat) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._num_entries += 1
        return entry

    def finish(self) -> None:
        """Ends writing. The segment may then be deleted, by any engine."""
        fcntl.flock(self._index, fcntl.LOCK_UN)
        self.grows = False

    def entries(self) -> Iterator[Entry]:
        """Returns the entries that have been added since the last call. Raises OSError.

        Damaged ones are left out; those at the end are tried again later while the segment grows, since they may be
        being written.
        """
        # Asked first: what a writer that has ended has written is all there.
        self.grows = is_alive(self.path)
        size = os.fstat(self._index).st_size // ENTRY_BYTES - self._num_entries
        if size <= 0:
            return
        buffer = bytearray(size * ENTRY_BYTES)
        count = self._files.read_into(self._index, memoryview(buffer), self._num_entries * ENTRY_BYTES) // ENTRY_BYTES
        found = [unpack_entry(buffer[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES]) for place in range(count)]
        while found and found[-1] is None:
            found.pop()
        self._num_entries += len(found)
        yield from (entry for entry in found if entry is not None)

    def read(self, entry: Entry, buffer: memoryview) -> bool:
        """Reads a block into the first bytes of a buffer. Returns False if it is not there. Raises OSError.

        The caller compares the checksum. May be called on any thread.
        """
        with self._lock:
            if self._closed:
                return False
            self._num_readers += 1
        try:
            return self._files.read_into(self._data, buffer[: entry.size], entry.offset) == entry.size
        finally:
            with self._lock:
                self._num_readers -= 1
                is_last = self._closed and not self._num_readers
            if is_last:
                os.close(self._data)

    def close(self) -> None:
        """Closes the files, which releases the lock, when no thread reads any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            is_read = self._num_readers > 0
        os.close(self._index)
        if not is_read:
            os.close(self._data)


def is_alive(path: Path) -> bool:
    """Whether the engine that writes a segment lives. `path` is without suffix. False if the segment is gone."""
    try:
        index = os.open(path.with_suffix(INDEX), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(index)
    return False


def remove(path: Path) -> None:
    """Deletes a segment, the index first, so that nobody opens half of one. It need not exist. Raises OSError."""
    path.with_suffix(INDEX).unlink(missing_ok=True)
    path.with_suffix(DATA).unlink(missing_ok=True)
