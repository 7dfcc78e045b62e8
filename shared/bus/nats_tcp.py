"""The TCP connection of nats-py, with and without TLS, which receives into one buffer (`shared.receiving`).

Made by `nats_client` for each connection to a server.
"""

import asyncio
import ssl
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

from shared.receiving import ReceivesIntoOneBuffer


class _Protocol(asyncio.StreamReaderProtocol, ReceivesIntoOneBuffer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The protocol of asyncio's streams, whose reader copies what it is given."""


class BufferedTransport(TcpTransport):
    """See nats.aio.transport.TcpTransport, whose streams receive into a new buffer each time."""

    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Returns host and port of the server and of this client."""
        assert self._io_writer is not None, "connect comes first"
        return self._io_writer.get_extra_info("peername")[:2], self._io_writer.get_extra_info("sockname")[:2]

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """See TcpTransport. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        protocol = _Protocol(reader := asyncio.StreamReader(buffer_size))
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(lambda: protocol, uri.hostname or "", uri.port or 0)
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
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
