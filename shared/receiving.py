"""Connections whose bytes are received into one buffer of the process, on both sides: HTTP and the bus.

asyncio allocates 256 KiB for each receive and gives back what was not filled. If something that lives longer is
allocated meanwhile, the rest is no longer large enough for the next receive, and the heap grows. In a gateway these
were 100 KiB a minute, although the number and size of its objects stayed the same.

Base class of protocols in `antiphon.services.gateway.edge.http.server.connection` and `antiphon.shared.bus.nats_tcp`.
"""

import asyncio
import threading

RECEIVE_BYTES = 256 * 1024
"""Size of the buffer and longest piece that one receive returns, in bytes. asyncio's own limit is the same."""


class _Buffers(threading.local):
    """One buffer for each thread, because each thread may run an event loop."""

    def __init__(self) -> None:
        self.mine = memoryview(bytearray(RECEIVE_BYTES))


_BUFFERS = _Buffers()


class ReceivesIntoOneBuffer(asyncio.BufferedProtocol):
    """Gives `data_received` a part of the buffer, which is valid only during the call.

    The last base class of a protocol, so that the methods of the other ones are found before asyncio's empty ones.
    Connections share the buffer: the event loop handles a receive to its end before the next one begins.
    """

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return _BUFFERS.mine

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self.data_received(_BUFFERS.mine[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Takes received bytes; copies what it keeps."""
        raise NotImplementedError
