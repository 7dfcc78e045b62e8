"""The log of usage records on the bus. A request has at most one record in it, whoever writes.

A record is written only if its request has none (compare-and-set on the request's subject). The start of a request is
sent without waiting, on the connection that later carries the request itself, so the bus has it first.
"""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.codec import DecodeError, Decoder, encode
from antiphon.shared.deployment import stores
from antiphon.shared.messages import UsageRecord

T = TypeVar("T")
_RECORDS = Decoder([UsageRecord])


class OpenRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that has no usage record yet, and the gateway's process that runs it.

    `started`: what is recorded if nothing more becomes known of it. Its `outcome` is `lost` while the request runs.
    """

    instance_id: str
    started: UsageRecord

    @property
    def owner(self) -> tuple[str, str]:
        """Id and instance id of the gateway that has written this."""
        return self.started.gateway_id, self.instance_id


class SinkPosition(msgspec.Struct, frozen=True, array_like=True):
    """Which records a sink has: those up to the sequence number `last`.

    `owner`: the gateway that feeds it; ("", "") if none does.
    """

    owner: tuple[str, str]
    last: int


_OPEN = msgspec.msgpack.Decoder(OpenRequest)
_POSITIONS = msgspec.msgpack.Decoder(SinkPosition)
_encode = msgspec.msgpack.Encoder().encode


class UsageLog:
    """The log of one deployment, as one gateway uses it. Methods that wait raise LogUnavailableError."""

    def __init__(self, logs: GatewayLogs) -> None:
        host = logs.host
        self.own = host.id, host.instance_id
        self._transport, self._subjects = host.transport, host.subjects
        self._log = logs.log(stores.usage(host.subjects, logs.storage))

    async def open(self) -> None:
        """Returns when the log exists."""
        await self._log.open()

    # --- requests ---

    def start(self, started: UsageRecord) -> None:
        """Sends that a request runs here, or that this gateway has left it. Does not wait. Raises ServiceError."""
        data = _encode(OpenRequest(self.own[1], started))
        self._transport.send(self._subjects.usage_open(started.request_id), data)

    async def end(self, records: Sequence[UsageRecord]) -> None:
        """Writes the records of requests that have none; then these requests run no more."""
        await asyncio.gather(*(self._write(record) for record in records))
        await asyncio.gather(*(self.close(record.request_id) for record in records))

    async def close(self, request_id: str) -> None:
        """Writes that a request runs no more."""
        await self._log.clear(self._subjects.usage_open(request_id))

    async def opened(self) -> list[OpenRequest]:
        """Returns the requests that have no record yet, as far as the log has them."""
        found = await self._log.all_following(self._subjects.usage_open("*"), 1)
        return [_decoded(_OPEN, one.payload) for one in found if one.payload]

    async def _write(self, record: UsageRecord) -> None:
        await self._log.append(self._subjects.usage_record(record.request_id), encode(record), last=0)

    # --- sinks ---

    async def records(self, after: int, most: int) -> list[tuple[int, UsageRecord]]:
        """Returns the next records with sequence numbers above `after`, in order, with these numbers."""
        found = await self._log.all_following(self._subjects.usage_record("*"), after + 1, most)
        return [(one.sequence, _record(one.payload)) for one in found]

    async def position(self, sink: str) -> tuple[SinkPosition, int]:
        """Returns the position of a sink, which is 0 if there is none, and its revision."""
        found = await self._log.last(self._subjects.usage_sink(sink))
        if found is None:
            return SinkPosition(("", ""), 0), 0
        return _decoded(_POSITIONS, found.payload), found.sequence

    async def move(self, sink: str, position: SinkPosition, revision: int) -> int | None:
        """Writes the position of a sink if it still has this revision. Returns the new one; None if it has not."""
        return await self._log.append(self._subjects.usage_sink(sink), _encode(position), last=revision)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise LogUnavailableError(f"the log of usage records cannot be read ({error})") from error


def _record(data: bytes) -> UsageRecord:
    try:
        return _RECORDS.decode(data)
    except DecodeError as error:
        raise LogUnavailableError(f"a usage record cannot be read ({error})") from error
