"""A connection between two engines."""

import asyncio
import socket
from collections.abc import Sequence

from antiphon.services.engine.kv.pieces import Bytes
from antiphon.services.engine.kv.wire import LENGTH_BYTES, Header, decode, encode
from antiphon.shared import limits

_READ_BYTES = 4096
"""Bytes to read at once if a header is expected: several headers, but only little of a block that follows one."""


class Closed(ConnectionError):
    """The other side has closed the connection."""


class Channel:
    """Sends and receives headers and blocks on a connected socket. To be used on one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._ahead = bytearray()
        """Bytes that were read from the connection but belong to no returned header or block yet."""

    async def send(self, header: Header, data: Bytes | None = None) -> None:
        """Sends a header and the bytes that follow it. Raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._sock, encode(header))
        if data is not None:
            await loop.sock_sendall(self._sock, data.data.cast("B"))

    async def send_all(self, headers: Sequence[Header]) -> None:
        """Sends several headers at once, none of which is followed by bytes. Raises OSError."""
        await asyncio.get_running_loop().sock_sendall(self._sock, b"".join(encode(header) for header in headers))

    @property
    def has_header(self) -> bool:
        """Whether the next header has been read from the connection already."""
        ahead = self._ahead
        return len(ahead) >= LENGTH_BYTES and len(ahead) >= LENGTH_BYTES + self._length()

    async def receive(self) -> Header:
        """Returns the next header. Raises OSError if the connection ends, msgspec.DecodeError for another message."""
        loop = asyncio.get_running_loop()
        while not self.has_header:
            missing = LENGTH_BYTES + self._length() - len(self._ahead)
            data = await loop.sock_recv(self._sock, max(_READ_BYTES, missing))
            if not data:
                raise Closed("the connection ended")
            self._ahead += data
        return decode(self._frame())

    async def receive_into(self, out: Bytes, timeout_s: float) -> None:
        """Fills `out`, which must be contiguous. Raises OSError; TimeoutError if nothing arrives for `timeout_s`."""
        loop, rest = asyncio.get_running_loop(), out.data.cast("B")
        count = min(len(self._ahead), len(rest))
        rest[:count] = self._ahead[:count]
        del self._ahead[:count]
        rest = rest[count:]
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

    def _length(self) -> int:
        """Returns the length of the next header, 0 if it has not been read. Raises Closed if it is too large."""
        if len(self._ahead) < LENGTH_BYTES:
            return 0
        length = int.from_bytes(self._ahead[:LENGTH_BYTES], "little")
        if length > limits.KV_HEADER_BYTES_MAX:
            raise Closed(f"a header of {length} bytes")
        return length

    def _frame(self) -> bytes:
        """Removes the next header from the bytes that were read, and returns it."""
        end = LENGTH_BYTES + self._length()
        found = bytes(self._ahead[LENGTH_BYTES:end])
        del self._ahead[:end]
        return found


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
