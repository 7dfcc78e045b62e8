"""The asyncio protocol of a connection to NATS, which no public name leads to."""

import asyncio

from antiphon.shared.bus.nats import NatsTransport


def protocol_of(transport: NatsTransport) -> asyncio.BaseProtocol:
    """Returns the protocol that receives the server's bytes."""
    writer: asyncio.StreamWriter = getattr(transport._client._transport, "_io_writer")  # noqa: B009
    return writer.transport.get_protocol()
