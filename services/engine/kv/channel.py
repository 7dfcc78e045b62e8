"""A connection between two engines, and the shared memory of two engines on one machine."""

import asyncio
import contextlib
import mmap
import os
import socket
import tempfile
import time
from pathlib import Path

import numpy as np

from services.engine.kv.layout import Bytes
from services.engine.kv.wire import LENGTH_BYTES, Header, decode, encode
from shared import limits

SHARED_DIRECTORY = Path("/dev/shm")
_PREFIX = "antiphon-kv-"
STALE_S = 60.0
"""Age in seconds from which a name of shared memory is considered left over by a killed process."""
MARK_BYTES = 64
"""Number of bytes at the beginning of shared memory, for the transfer's name."""


class Closed(ConnectionError):
    """The other side has closed the connection."""


class Channel:
    """Sends and receives headers and blocks on a connected socket. To be used on one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    async def send(self, header: Header, data: Bytes | None = None) -> None:
        """Sends a header and the bytes that follow it. Raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._sock, encode(header))
        if data is not None:
            await loop.sock_sendall(self._sock, data.data.cast("B"))

    async def receive(self) -> Header:
        """Returns the next header. Raises OSError if the connection ends, msgspec.DecodeError for another message."""
        length = int.from_bytes(await self._exactly(LENGTH_BYTES), "little")
        if length > limits.KV_HEADER_BYTES_MAX:
            raise Closed(f"a header of {length} bytes")
        return decode(await self._exactly(length))

    async def receive_into(self, out: Bytes, timeout_s: float) -> None:
        """Fills `out`, which must be contiguous. Raises OSError; TimeoutError if nothing arrives for `timeout_s`."""
        loop, rest = asyncio.get_running_loop(), out.data.cast("B")
        while rest:
            async with asyncio.timeout(timeout_s):
                count = await loop.sock_recv_into(self._sock, rest)
            if not count:
                raise Closed("the connection ended within a block")
            rest = rest[count:]

    @property
    def is_local(self) -> bool:
        """Whether the other side is on this machine."""
        return self._sock.getsockname()[0] == self._sock.getpeername()[0]

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._sock.close()

    async def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        loop, rest = asyncio.get_running_loop(), memoryview(data)
        while rest:
            received = await loop.sock_recv_into(self._sock, rest)
            if not received:
                raise Closed("the connection ended")
            rest = rest[received:]
        return bytes(data)


async def connect(address: str) -> Channel:
    """Connects to `host:port`.

    Raises OSError, TimeoutError after `KV_CONNECT_S`, or ValueError for an invalid address.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(limits.KV_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, (host.strip("[]"), int(port)))
        return Channel(sock)
    except BaseException:
        sock.close()
        raise


class SharedMemory:
    """Memory that two processes of one machine share: a mark, then `num_places` places of `place_bytes` bytes."""

    def __init__(self, file: int, num_places: int, place_bytes: int) -> None:
        self._map = mmap.mmap(file, MARK_BYTES + num_places * place_bytes)
        self.num_places = num_places
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._place_bytes = place_bytes

    @classmethod
    def create(cls, mark: str, num_places: int, place_bytes: int) -> "tuple[SharedMemory, str]":
        """Returns new memory that begins with `mark`, and its name. Raises OSError if there is none.

        The name must be removed with `forget` once the other process has opened it.
        """
        size = MARK_BYTES + num_places * place_bytes
        file, path = tempfile.mkstemp(prefix=_PREFIX, dir=SHARED_DIRECTORY)
        try:
            # Allocate the memory now: otherwise a lack of memory would kill the process when it writes.
            os.posix_fallocate(file, 0, size)
            os.pwrite(file, mark.encode(), 0)
            return cls(file, num_places, place_bytes), Path(path).name
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
            own = facts.st_uid == os.getuid() and facts.st_size == MARK_BYTES + num_places * place_bytes
            if not own or os.pread(file, MARK_BYTES, 0).rstrip(b"\0") != mark.encode():
                return None
            return cls(file, num_places, place_bytes)
        except OSError:
            return None
        finally:
            os.close(file)

    def place(self, index: int, num_bytes: int) -> Bytes:
        """Returns the first bytes of a place. They must not be used after `close`."""
        start = MARK_BYTES + index * self._place_bytes
        return self._bytes[start : start + num_bytes]

    def close(self) -> None:
        """Unmaps the memory. No place may be in use."""
        del self._bytes, self._map


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


def forget(name: str) -> None:
    """Removes the name of shared memory, which is freed when both processes have closed it."""
    if name:
        (SHARED_DIRECTORY / name).unlink(missing_ok=True)
