"""Memory that two engines of one machine share, and its use for several transfers.

The receiver creates it (`ReceiverPool`) and names it in `Fetch`; the sender opens it (`SenderPool`), after which the
name is removed. New memory costs more time than the copies of a short transfer, so both sides keep it after a transfer
that has succeeded: the receiver for the next transfer from the same address, the sender under its former name. A
transfer that has failed does not give its memory back, because the other side may still use it. If the sender has
dropped memory that the receiver offers, the blocks go through the socket.
"""

import contextlib
import hashlib
import logging
import mmap
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from antiphon.services.engine.kv.pieces import Bytes
from antiphon.shared import limits

log = logging.getLogger(__name__)
SHARED_DIRECTORY = Path("/dev/shm")
_PREFIX = "antiphon-kv-"
STALE_S = 60.0
"""Age in seconds from which a name of shared memory is considered left over by a killed process."""
MARK_BYTES = 64
"""Number of bytes at the beginning of shared memory, for a hash of the transfer's name."""
_START = mmap.PAGESIZE
"""Where the first place begins: at the boundary of a page, so that copies are as fast as they can be."""


class SharedMemory:
    """Memory that two processes of one machine share: a mark, then `num_places` places of `place_bytes` bytes."""

    def __init__(self, file: int, name: str, num_places: int, place_bytes: int) -> None:
        # All pages are mapped at once, because a fault for each page costs more than the copy of its contents.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(file, _START + num_places * place_bytes, flags=flags)
        self.name, self.num_places, self.place_bytes = name, num_places, place_bytes
        self._is_named = False
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, mark: str, num_places: int, place_bytes: int) -> "SharedMemory":
        """Returns new memory with a mark. Raises OSError if there is none.

        Its name must be removed with `forget_name` once the other process has opened it.
        """
        size = _START + num_places * place_bytes
        file, path = tempfile.mkstemp(prefix=_PREFIX, dir=SHARED_DIRECTORY)
        try:
            # Allocate the memory now: otherwise a lack of memory would kill the process when it writes.
            os.posix_fallocate(file, 0, size)
            made = cls(file, Path(path).name, num_places, place_bytes)
            made.mark(mark)
            made._is_named = True
            return made
        except OSError:
            Path(path).unlink()
            raise
        finally:
            os.close(file)

    @classmethod
    def open(cls, name: str, mark: str, num_places: int, place_bytes: int) -> "SharedMemory | None":
        """Returns the memory that another process has created; None if it is missing or has another mark or size."""
        if not name.startswith(_PREFIX) or "/" in name:
            return None
        try:
            file = os.open(SHARED_DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            facts = os.fstat(file)
            if facts.st_uid != os.getuid() or facts.st_size != _START + num_places * place_bytes:
                return None
            opened = cls(file, name, num_places, place_bytes)
        except OSError:
            return None
        finally:
            os.close(file)
        return opened if opened.is_for(mark) else None

    def mark(self, mark: str) -> None:
        """Sets the mark. No other transfer may use the memory."""
        self._bytes[:MARK_BYTES] = np.frombuffer(_digest(mark), dtype=np.uint8)

    def is_for(self, mark: str) -> bool:
        """Whether the memory has this mark."""
        return self._bytes[:MARK_BYTES].tobytes() == _digest(mark)

    def place(self, index: int, num_bytes: int) -> Bytes:
        """Returns the first bytes of a place. They must not be used after `close`."""
        start = _START + index * self.place_bytes
        return self._bytes[start : start + num_bytes]

    def forget_name(self) -> None:
        """Removes the name, if this process has created it. The memory is freed when both processes have closed it."""
        if self._is_named:
            self._is_named = False
            (SHARED_DIRECTORY / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmaps the memory and removes its name. No place may be in use."""
        self.forget_name()
        del self._bytes, self._map


def num_places(place_bytes: int) -> int:
    """Returns the number of places of new memory; 0 if one would be larger than `KV_SHARED_BYTES_MAX`.

    With two places one side can fill one while the other reads the other one.
    """
    return min(max(2, limits.KV_SHARED_BYTES // place_bytes), limits.KV_SHARED_BYTES_MAX // place_bytes)


class ReceiverPool:
    """The receiver's memory of ended transfers, by the sender's address. To be used on one event loop."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, str, SharedMemory]] = []
        """When it was last used, the address and the memory; the oldest first."""

    def take(self, address: str, mark: str, place_bytes: int) -> SharedMemory | None:
        """Returns memory with this mark, kept or new; None if there is none, or a block is too large for it."""
        count = num_places(place_bytes)
        if not count:
            return None
        for entry in reversed(self._kept):
            if entry[1] == address and entry[2].place_bytes == place_bytes:
                self._kept.remove(entry)
                entry[2].mark(mark)
                return entry[2]
        try:
            return SharedMemory.create(mark, count, place_bytes)
        except OSError as error:
            log.info("no shared memory (%s): KV goes through a socket", error)
            return None

    def release(self, address: str, shared: SharedMemory) -> None:
        """Keeps the memory of a transfer in which the sender has used it and which has succeeded."""
        self._kept.append((time.monotonic(), address, shared))
        self._drop(limits.KV_SHARED_KEPT_S)

    def expire(self) -> None:
        """Frees memory that has not been used for `KV_SHARED_KEPT_S`."""
        self._drop(limits.KV_SHARED_KEPT_S)

    def close(self) -> None:
        """Frees all memory."""
        self._drop(-1)

    def _drop(self, age_s: float) -> None:
        now = time.monotonic()
        while self._kept and (now - self._kept[0][0] > age_s or len(self._kept) > limits.KV_SHARED_KEPT_MAX):
            self._kept.pop(0)[2].close()


class SenderPool:
    """The sender's view of memory that receivers have created. To be used on one event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, SharedMemory]] = {}
        """When it was last used, and the memory, by its former name; the oldest first."""

    def open(self, name: str, mark: str, num_places: int, place_bytes: int) -> SharedMemory | None:
        """Returns the memory that the receiver offers for the transfer `mark`; None if it cannot be used."""
        if num_places < 1 or place_bytes < 1:
            return None
        _, kept = self._kept.pop(name, (0.0, None))
        if kept is not None:
            if (kept.num_places, kept.place_bytes) == (num_places, place_bytes) and kept.is_for(mark):
                return kept
            kept.close()
        return SharedMemory.open(name, mark, num_places, place_bytes)

    def keep(self, shared: SharedMemory) -> None:
        """Keeps the memory of a transfer that has succeeded."""
        self._kept[shared.name] = time.monotonic(), shared
        self.expire()

    def expire(self) -> None:
        """Frees memory that no receiver offers any more: a receiver keeps memory for only half as long."""
        now, names = time.monotonic(), list(self._kept)
        for number, name in enumerate(names):
            used_at, shared = self._kept[name]
            is_old = now - used_at > 2 * limits.KV_SHARED_KEPT_S
            if is_old or len(names) - number > limits.KV_SHARED_MAPPED_MAX:
                shared.close()
                del self._kept[name]

    def close(self) -> None:
        """Frees all memory."""
        self._kept.clear()


def forget_stale() -> None:
    """Removes names left over by killed processes of this user.

    A running transfer needs its name only briefly, so old names are unused.
    """
    oldest = time.time() - STALE_S
    for path in SHARED_DIRECTORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if facts.st_uid == os.getuid() and facts.st_mtime < oldest:
                path.unlink()


def _digest(mark: str) -> bytes:
    return hashlib.blake2b(mark.encode(), digest_size=MARK_BYTES).digest()
