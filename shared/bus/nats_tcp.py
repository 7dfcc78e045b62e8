"""The TCP connection of nats-py, with and without TLS, which receives into one buffer (`antiphon.shared.receiving`).

Made by `nats_client` for each connection to a server.
"""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

from antiphon.shared.receiving import ReceivesIntoOneBuffer

Take = Callable[[memoryview, bool], int]
"""Processes some of the received bytes, and returns how many. The second argument says whether the stream is empty."""


class _Protocol(asyncio.StreamReaderProtocol, ReceivesIntoOneBuffer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The protocol of asyncio's streams, whose reader copies what it is given, and `take` before it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._waiting: bytearray = reader._buffer  # type: ignore[attr-defined]
        self.take: Take | None = None

    def data_received(self, data: bytes | memoryview) -> None:
        """See asyncio.Protocol. What `take` leaves goes to the stream."""
        if self.take is not None and isinstance(data, memoryview):
            data = data[self.take(data, not self._waiting) :]
        super().data_received(data)  # type: ignore[arg-type]


class BufferedTransport(TcpTransport):
    """See nats.aio.transport.TcpTransport, whose streams receive into a new buffer each time."""

    _protocol: _Protocol | None = None

    @property
    def is_congested(self) -> bool:
        """Whether the socket has not taken all that was written."""
        return self._io_writer is not None and self._io_writer.transport.get_write_buffer_size() > 0

    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Returns host and port of the server and of this client."""
        assert self._io_writer is not None, "connect comes first"
        return self._io_writer.get_extra_info("peername")[:2], self._io_writer.get_extra_info("sockname")[:2]

    def take_with(self, take: Take) -> None:
        """Calls `take` with everything that this connection receives from now on, before the stream gets it."""
        assert self._protocol is not None, "connect comes first"
        self._protocol.take = take

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """See TcpTransport. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        protocol = _Protocol(reader := asyncio.StreamReader(buffer_size))
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(lambda: protocol, uri.hostname or "", uri.port or 0)
        self._protocol = protocol
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """See TcpTransport. Raises OSError (also a failed handshake) or TimeoutError."""
        assert self._io_writer is not None, "connect comes first"
        loop = asyncio.get_running_loop()
        protocol = _Protocol(reader := asyncio.StreamReader(buffer_size))
        name = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            transport = await loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=name)
        assert transport is not None
        self._protocol = protocol
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
